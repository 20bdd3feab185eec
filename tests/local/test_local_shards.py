"""Local steps where each replica's parameters are sharded over several ranks (HSDP): the shards decide together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import compopt

ROWS = 6


def sharded(mesh, **options) -> tuple[list[nn.Parameter], compopt.LocalSteps]:
    """Two matrices, each in two shards, and the optimizer over the replicas."""
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(ROWS, 40), mesh["shard"], [Shard(0)])) for _ in range(2)]
    sgd = torch.optim.SGD(params, lr=1.0)
    group = mesh.get_group("replicate")
    if "round_seconds" not in options:
        options["every"] = 2
    return params, compopt.LocalSteps(sgd, growth_steps=0, process_group=group, **options)


def give(params: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    from torch.distributed.tensor import DTensor

    for p, g in zip(params, grads, strict=True):
        n = ROWS // 2
        mine = g[n * p.device_mesh.get_local_rank() :][:n]
        p.grad = DTensor.from_local(mine.clone(), p.device_mesh, p.placements, run_check=False)


def whole(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().view(-1) for p in params])


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, 40, generator=generator) for _ in range(2)]


def one_replica(rank: int) -> dict[str, object]:
    """Two shards of one replica, and no other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, object] = {}
    params, optimizer = sharded(mesh)
    before, grads = whole(params), gradients(1)
    grads[1][ROWS - 1, 3] = float("nan")  # of the second shard only
    give(params, grads)
    optimizer.step()
    found["skipped"] = torch.equal(whole(params), before) and optimizer.stats.phase == "skipped"

    params, optimizer = sharded(mesh, max_grad_norm=1.0)
    before = whole(params)
    give(params, gradients(1))
    optimizer.step()
    found["clipped"] = float((before - whole(params)).norm())
    found["norm"] = optimizer.stats.grad_norm - float(torch.cat([g.view(-1) for g in gradients(1)]).norm())

    params, optimizer = sharded(mesh)
    before = whole(params)
    give(params, gradients(1))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(rank == 1))
    optimizer.step()
    found["scaler"] = torch.equal(whole(params), before) and optimizer.stats.phase == "skipped"
    return found


def one_replica_with_a_replicated_parameter(rank: int) -> float:
    """The norm that the step has clipped by, of which the replicated parameter is a part once."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    params, _ = sharded(mesh)
    with pytest.raises(ValueError, match="where parameters are sharded"):
        sharded(mesh, offload="outer")
    plain = nn.Parameter(torch.zeros(30))
    sgd = torch.optim.SGD([*params, plain], lr=1.0)
    optimizer = compopt.LocalSteps(sgd, 2, growth_steps=0, process_group=mesh.get_group("replicate"))
    give(params, gradients(1))
    plain.grad = torch.full((30,), 2.0)
    optimizer.step()
    return optimizer.stats.grad_norm


def test_a_parameter_that_all_shards_hold_counts_once():
    squared = sum(float(g.square().sum()) for g in gradients(1)) + 4 * 30
    for norm in run_ranks(one_replica_with_a_replicated_parameter, 2):
        assert norm == pytest.approx(squared**0.5, rel=1e-5)


def test_shards_of_a_replica_take_its_step_together_or_not_at_all():
    for found in run_ranks(one_replica, 2):
        assert found["skipped"], "a gradient that is not finite in one shard"
        assert found["clipped"] == pytest.approx(1.0, rel=1e-5) and abs(found["norm"]) < 1e-4
        assert found["scaler"], "a GradScaler that found an inf in one shard"


def two_replicas(rank: int) -> dict[str, object]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh.get_local_rank("replicate")
    found: dict[str, object] = {}
    params, optimizer = sharded(mesh, payload_dtype=None, outer_lr=1, outer_momentum=0)
    start = whole(params)
    for t in range(2):
        give(params, gradients(10 * t + replica))
        optimizer.step()
    moved = [sum(torch.cat([g.view(-1) for g in gradients(10 * t + k)]) for t in range(2)) for k in range(2)]
    found["far"] = float((whole(params) - (start - (moved[0] + moved[1]) / 2)).abs().max())
    cosine = torch.cosine_similarity(moved[0], moved[1], dim=0)
    found["cosine"] = [optimizer.stats.cosine, float(cosine)]

    before = whole(params)
    for t in range(2):  # the second shard of replica 1 is lost, and so all of this replica
        give(params, gradients(20 + 10 * t + replica))
        if rank == 3 and t == 1:
            params[0].data.to_local()[0, 0] = float("nan")
        optimizer.step()
    finite, theirs = whole(params), sum(torch.cat([g.view(-1) for g in gradients(20 + 10 * t)]) for t in range(2))
    found["lost"] = float((finite - (before - theirs / 2)).abs().max())
    others = [torch.empty_like(finite) for _ in range(4)]
    dist.all_gather(others, finite)
    found["equal"] = all(torch.equal(other, finite) for other in others)
    return found


def half_alike(rank: int) -> list[float]:
    """The cosine of replicas whose sharded parameters move alike, and as far another one that all shards hold."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, cosines = mesh.get_local_rank("replicate"), []
    for delay in (0, 1):
        params, _ = sharded(mesh)
        plain = nn.Parameter(torch.zeros(3000))
        sgd, group = torch.optim.SGD([*params, plain], lr=1.0), mesh.get_group("replicate")
        optimizer = compopt.LocalSteps(sgd, 2, delay=delay, growth_steps=0, process_group=group)
        length = sum(float(g.square().sum()) for g in gradients(1)) ** 0.5
        own = torch.randn(3000, generator=torch.Generator().manual_seed(replica))
        for _ in range(4):
            give(params, gradients(1))
            plain.grad = own * length / own.norm()
            optimizer.step()
        cosines.append(optimizer.stats.cosine)
    return cosines


def test_the_cosine_of_replicas_counts_a_parameter_that_all_shards_hold_once():
    for cosines in run_ranks(half_alike, 4):
        assert cosines == pytest.approx([0.5, 0.5], abs=0.07)


def test_replicas_of_two_shards_exchange_and_lose_a_replica_as_a_whole():
    ranks = run_ranks(two_replicas, 4)
    assert len({found["cosine"][0] for found in ranks}) == 1, "it is that of all shards"
    for found in ranks:
        assert found["far"] < 1e-5 and found["equal"]
        reported, true = found["cosine"]
        assert abs(reported - true) < 0.08  # an estimate
        assert found["lost"] < 1e-5, "the lost replica contributes nothing, in either of its shards"


def ends_by_time(rank: int) -> list[str]:
    """Two replicas of two shards; a step takes 3 s by the first shard's clock and 6 s by the other's."""
    from torch.distributed.device_mesh import init_device_mesh

    from compopt._local import rounds

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seconds = 0.0
    rounds.monotonic = lambda: seconds
    params, optimizer = sharded(mesh, round_seconds=10)
    phases = []
    for t in range(7):
        give(params, gradients(10 * t + mesh["replicate"].get_local_rank()))
        optimizer.step()
        phases.append(optimizer.stats.phase)
        seconds += 3 * (1 + mesh["shard"].get_local_rank())
    flat = whole(params)
    other = flat.clone()
    dist.broadcast(other, 0)
    return [*phases, str(torch.equal(flat, other))]


def test_shards_of_a_replica_end_a_round_together():
    """By the mean of their clocks."""
    for found in run_ranks(ends_by_time, 4):
        assert found == [*["local"] * 3, "exchanged", *["local"] * 2, "exchanged", "True"]
