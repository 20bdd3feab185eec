"""Local steps where each replica's parameters are sharded over several ranks, simulated and under FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from sim import Ranks
from torch import nn

import compopt

OPTIONS = [dict(), dict(fragments=2), dict(fragments=2, delay=1), dict(delay=2)]
STEPS = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()) * self.scale


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.flip(1)).square().mean()


def made(params, process_group, **options) -> compopt.LocalSteps:
    options = {"every": 4, "growth_steps": 0, "payload_dtype": None, "max_grad_norm": 0.5, **options}
    return compopt.LocalSteps(torch.optim.AdamW(params, lr=1e-2), process_group=process_group, **options)


def sharded(**options) -> tuple[nn.Module, compopt.LocalSteps]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("sites", "ranks"))
    model = Net()
    fully_shard(model.up, mesh=mesh["ranks"])
    fully_shard(model, mesh=mesh["ranks"])
    return model, made(model.parameters(), mesh.get_group("sites"), **options)


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().view(-1) for p in model.parameters()])


def train(model, optimizer, rank: int, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def length(optimizer) -> float:
    """Return the length of the last exchange's average."""
    return optimizer.stats.step_length


def load(path: str, options: dict) -> tuple[nn.Module, compopt.LocalSteps]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = sharded(**options)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def on_sites(rank: int, folder: str) -> list[tuple[list[torch.Tensor], bool, tuple[float, float]]]:
    """The parameters after every second step; whether a checkpoint, loaded after the fifth, goes on to the bit; and how
    far sites are apart in the end.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    found = []
    for number, options in enumerate(OPTIONS):
        model, optimizer = sharded(**options)
        reached = []
        for step in range(0, STEPS, 2):
            train(model, optimizer, rank, range(step, step + 2))
            reached.append(whole(model))
        other, again = sharded(**options)
        train(other, again, rank, range(6))
        again.consolidate_state()
        path = f"{folder}/{number}"
        weights, state = get_state_dict(other, again)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        third, resumed = load(path, options)
        for one in ((other, again), (third, resumed)):
            train(*one, rank, range(6, STEPS))
        found.append((reached, torch.equal(whole(other), whole(third)), length(optimizer)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def sites(folder):
    return run_ranks(on_sites, 4, folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=lambda n: str(OPTIONS[n]))
def test_two_sites_of_two_ranks_are_two_replicas(number, sites):
    """The oracle knows nothing of shards: a replica's gradient is the mean over its site."""
    options = OPTIONS[number]
    oracle = Ranks(2, Net, lambda params, process_group: made(params, process_group, **options))

    def loss(model: nn.Module, site: int, step: int) -> torch.Tensor:
        return (loss_of(model, 2 * site, step) + loss_of(model, 2 * site + 1, step)) / 2

    for i in range(STEPS // 2):
        oracle.train(loss, 2)
        for rank, found in enumerate(sites):
            expected = torch.cat([p.detach().view(-1) for p in oracle.models[rank // 2].parameters()])
            torch.testing.assert_close(found[number][0][i], expected, rtol=0, atol=1e-10)
    expected = length(oracle.optimizers[0])
    for found in sites:
        assert found[number][2] == pytest.approx(expected, abs=0.08)  # by other signs


@pytest.mark.slow
def test_a_checkpoint_of_sites_goes_on_to_the_bit(sites):
    assert all(is_same for found in sites for _, is_same, _ in found)


def on_one_site(rank: int, folder: str) -> None:
    for number, options in enumerate(OPTIONS):
        model, optimizer = load(f"{folder}/{number}", options)
        before = whole(model)
        optimizer.end_round()
        optimizer.consolidate_state()
        assert torch.equal(whole(model), before), "its ranks hold different shards, and average nothing"
        train(model, optimizer, rank, range(6, 8))


@pytest.mark.slow
def test_one_site_goes_on_from_a_checkpoint_of_two(sites, folder):
    run_ranks(on_one_site, 2, folder)


def groups_of(rank: int) -> list[bool]:
    """Return True if the exchange and the decision of shards run over groups in which training sends nothing."""
    model, optimizer = sharded(delay=1)
    train(model, optimizer, rank, range(1))
    sync, engine = optimizer._sync, optimizer._engine
    pairs = [(sync.comm, engine.comm), *zip(sync.shards, engine.shard_communicators, strict=True)]
    return [beside.group is not training.group and beside.ranks == training.ranks for beside, training in pairs]


@pytest.mark.slow
def test_a_delayed_exchange_has_groups_of_its_own():
    assert run_ranks(groups_of, 4) == [[True, True]] * 4


ROWS = 6


def sharded_by_hand(mesh, **options) -> tuple[list[nn.Parameter], compopt.LocalSteps]:
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


def whole_of(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().view(-1) for p in params])


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, 40, generator=generator) for _ in range(2)]


def one_replica(rank: int) -> dict[str, object]:
    """Two shards of one replica, and no other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, object] = {}
    params, optimizer = sharded_by_hand(mesh)
    before, grads = whole_of(params), gradients(1)
    grads[1][ROWS - 1, 3] = float("nan")  # of the second shard only
    give(params, grads)
    optimizer.step()
    found["skipped"] = torch.equal(whole_of(params), before) and optimizer.stats.phase == "skipped"

    params, optimizer = sharded_by_hand(mesh, max_grad_norm=1.0)
    before = whole_of(params)
    give(params, gradients(1))
    optimizer.step()
    found["clipped"] = float((before - whole_of(params)).norm())
    found["norm"] = optimizer.stats.grad_norm - float(torch.cat([g.view(-1) for g in gradients(1)]).norm())

    params, optimizer = sharded_by_hand(mesh)
    before = whole_of(params)
    give(params, gradients(1))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(rank == 1))
    optimizer.step()
    found["scaler"] = torch.equal(whole_of(params), before) and optimizer.stats.phase == "skipped"
    return found


def one_replica_with_a_replicated_parameter(rank: int) -> float:
    """The norm that the step has clipped by, of which the replicated parameter is a part once."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    params, _ = sharded_by_hand(mesh)
    with pytest.raises(ValueError, match="where parameters are sharded"):
        sharded_by_hand(mesh, offload="outer")
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
    params, optimizer = sharded_by_hand(mesh, payload_dtype=None, outer_lr=1, outer_momentum=0)
    start = whole_of(params)
    for t in range(2):
        give(params, gradients(10 * t + replica))
        optimizer.step()
    moved = [sum(torch.cat([g.view(-1) for g in gradients(10 * t + k)]) for t in range(2)) for k in range(2)]
    found["far"] = float((whole_of(params) - (start - (moved[0] + moved[1]) / 2)).abs().max())
    true = (moved[0] + moved[1]).norm() / (moved[0].norm() + moved[1].norm())
    found["length"] = [optimizer.stats.step_length, float(true)]

    before = whole_of(params)
    for t in range(2):  # the second shard of replica 1 is lost, and so all of this replica
        give(params, gradients(20 + 10 * t + replica))
        if rank == 3 and t == 1:
            params[0].data.to_local()[0, 0] = float("nan")
        optimizer.step()
    finite, theirs = whole_of(params), sum(torch.cat([g.view(-1) for g in gradients(20 + 10 * t)]) for t in range(2))
    found["lost"] = float((finite - (before - theirs / 2)).abs().max())
    others = [torch.empty_like(finite) for _ in range(4)]
    dist.all_gather(others, finite)
    found["equal"] = all(torch.equal(other, finite) for other in others)
    return found


def half_alike(rank: int) -> list[float]:
    """The step length of replicas whose sharded parameters move alike, and as far another one that all shards hold."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica, lengths = mesh.get_local_rank("replicate"), []
    for delay in (0, 1):
        params, _ = sharded_by_hand(mesh)
        plain = nn.Parameter(torch.zeros(3000))
        sgd, group = torch.optim.SGD([*params, plain], lr=1.0), mesh.get_group("replicate")
        options = dict(delay=delay, growth_steps=0, payload_dtype=None)
        optimizer = compopt.LocalSteps(sgd, 2, process_group=group, **options)
        length = sum(float(g.square().sum()) for g in gradients(1)) ** 0.5
        own = torch.randn(3000, generator=torch.Generator().manual_seed(replica))
        for _ in range(4):
            give(params, gradients(1))
            plain.grad = own * length / own.norm()
            optimizer.step()
        lengths.append(optimizer.stats.step_length)
    return lengths


def test_the_step_length_counts_a_parameter_that_all_shards_hold_once():
    """Half of the square of what a replica moves is shared: 1 / 2 + 1 / 4 of it remain in the average."""
    for lengths in run_ranks(half_alike, 4):
        assert lengths == pytest.approx([0.75**0.5] * 2, abs=0.01)


def test_replicas_of_two_shards_exchange_and_lose_a_replica_as_a_whole():
    ranks = run_ranks(two_replicas, 4)
    assert len({found["length"][0] for found in ranks}) == 1, "it is that of all shards"
    for found in ranks:
        assert found["far"] < 1e-5 and found["equal"]
        reported, true = found["length"]
        assert reported == pytest.approx(true, rel=1e-5)
        assert found["lost"] < 1e-5, "the lost replica contributes nothing, in either of its shards"


def ends_by_time(rank: int) -> list[str]:
    """Two replicas of two shards; a step takes 3 s by the first shard's clock and 6 s by the other's."""
    from torch.distributed.device_mesh import init_device_mesh

    from compopt.local_steps import rounds

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seconds = 0.0
    rounds.monotonic = lambda: seconds
    params, optimizer = sharded_by_hand(mesh, round_seconds=10)
    phases = []
    for t in range(7):
        give(params, gradients(10 * t + mesh["replicate"].get_local_rank()))
        optimizer.step()
        phases.append(optimizer.stats.phase)
        seconds += 3 * (1 + mesh["shard"].get_local_rank())
    flat = whole_of(params)
    other = flat.clone()
    dist.broadcast(other, 0)
    return [*phases, str(torch.equal(flat, other))]


def test_shards_of_a_replica_end_a_round_together():
    """By the mean of their clocks."""
    for found in run_ranks(ends_by_time, 4):
        assert found == [*["local"] * 3, "exchanged", *["local"] * 2, "exchanged", "True"]
