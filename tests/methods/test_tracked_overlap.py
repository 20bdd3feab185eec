"""projection="tracked" in backward's shadow, on real ranks and sharded rows, and what it sends again."""

from __future__ import annotations

import conformance
import torch
from ranks import run_ranks
from sim import Ranks
from table import projecting
from torch import nn

import compopt


def early_and_late(rank: int) -> dict[str, list]:
    """The same run with buckets that start in backward and without; and local shards against plain tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    from compopt._engine import exchange as exchange_module
    from compopt._state import buckets

    buckets.BUCKET_BYTES, buckets.JOINED_PART_ON_CPU = 40_000, 0
    complete_stage, completed = exchange_module.BucketExchange.complete_stage, []
    exchange_module.BucketExchange.complete_stage = lambda exchange: (
        completed.append(exchange.bucket.index) or complete_stage(exchange)
    )
    results: dict[str, list] = {}
    tracked = projecting("tracked", lr=1e-2, dense_steps=1)
    sparse = dict(lr=1e-2, density=0.3, interval=2, dense_steps=1, payload_dtype=torch.int8)
    makers = {
        "tracked": lambda params: compopt.SeparateAdam(params, **tracked),
        "tracked, int8": lambda params: compopt.SeparateAdam(params, **{**tracked, "payload_dtype": torch.int8}),
        "Radius, int8": lambda params: compopt.RadiusAdamW(params, **sparse),
    }
    for name, make in makers.items():
        ends, begun = [], []
        for overlap in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
            model = DDP(net) if overlap else net
            optimizer = make(net.parameters())
            for t in range(5):
                x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * t + rank))
                completed.clear()
                model(x).square().mean().backward()
                begun.append(len(completed) > 0)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
        results[name] = [torch.equal(*ends), any(begun), float(ends[0].double().sum())]

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    local = nn.Parameter(torch.randn(65 - rank, 96, generator=torch.Generator().manual_seed(rank)))
    shard = nn.Parameter(
        DTensor.from_local(local.detach().clone(), mesh["shard"], [Shard(0)], shape=(129, 96), stride=(96, 1))
    )
    single = dist.new_group([rank], use_local_synchronization=True)
    options = projecting("tracked", lr=1e-2, payload_dtype=torch.int8, simulate=True)
    ours = compopt.SeparateAdam([shard], process_group=mesh.get_group("replicate"), **options)
    plain = compopt.SeparateAdam([local], process_group=single, **options)
    for t in range(4):
        local.grad = torch.randn(local.shape, generator=torch.Generator().manual_seed(10 * t + rank))
        shard.grad = DTensor.from_local(local.grad.clone(), mesh["shard"], [Shard(0)], shape=(129, 96), stride=(96, 1))
        ours.step()
        plain.step()
        if t == 1:  # on from its state dict, where all states are laid out as the parameter
            saved = ours.state_dict()
            ours = compopt.SeparateAdam([shard], process_group=mesh.get_group("replicate"), **options)
            ours.load_state_dict(saved)
            laid_out = [value.placements == shard.placements for value in saved["state"][0].values() if value.dim()]
    results["sharded"] = [torch.equal(shard.to_local(), local), ours.stats.phase, len(laid_out), all(laid_out)]
    return results


def test_it_runs_in_backwards_shadow_and_on_sharded_rows():
    first, second = run_ranks(early_and_late, 2)
    for name in ("tracked", "tracked, int8", "Radius, int8"):
        same, completed, checksum = first[name]
        assert same and completed and checksum == second[name][2], name
    assert first["sharded"] == second["sharded"] == [True, "projected", 4, True]


def test_a_gradient_clipped_after_backward_on_one_rank_makes_all_send_again(monkeypatch):
    """Early payloads are stale on all ranks: both factors go out anew, of the gradients as they are."""
    from compopt._state import buckets

    monkeypatch.setattr(buckets, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(buckets, "JOINED_PART_ON_CPU", 0)
    options = projecting("tracked", lr=1e-2, payload_dtype=torch.int8)
    runs = [
        Ranks(
            2,
            conformance.Small,
            lambda ps, process_group: compopt.SeparateAdam(ps, process_group=process_group, **options),
        )
        for _ in range(2)
    ]
    for t in range(4):
        for overlapped, ranks in enumerate(runs):
            ranks.backward(conformance.loss)
            for _, model, optimizer in ranks if overlapped else ():
                optimizer.gradients_ready(reversed(list(model.parameters())))
                optimizer.backward_done()
            if t == 2:
                nn.utils.clip_grad_norm_(ranks.models[1].parameters(), 1e-3)
            ranks.world.step(ranks.optimizers)
            ranks.steps += 1
            ranks.assert_replicas_equal()
        assert runs[1].optimizers[0].stats.resent == (t == 2)
    for p, q in zip(runs[0].models[0].parameters(), runs[1].models[0].parameters(), strict=True):
        assert torch.equal(p, q)
