"""Ranks given as a value: groups that torch.distributed has not registered, and ranks that leave and join."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conformance import Small, loss
from ranks import catch_message, run_ranks
from sim import World
from table import CASES
from torch import nn

import compopt


def make_group(rank: int, size: int, name: str) -> dist.ProcessGroup:
    """Return a group over gloo that torch.distributed knows nothing of."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def train(case, rank: int, group, other) -> tuple[list, int]:
    """Train, save, and go on over another group; return parameters and bytes."""
    torch.manual_seed(0)
    model = Small()
    optimizer = case.make(model.parameters(), process_group=group)
    sent = 0
    for step in range(8):
        if step == 6:
            optimizer.consolidate_state()
            optimizer.load_state_dict(optimizer.state_dict())
            sent = optimizer.comm.bytes_sent
            optimizer.rebind(other)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return [p.detach().double().sum().item() for p in model.parameters()], sent + optimizer.comm.bytes_sent


def over_both(rank: int) -> list[str]:
    """Return the classes that compute another thing over ranks that are given as a value."""
    wrong = []
    for number, case in enumerate(CASES):
        known = train(case, rank, None, dist.new_group([0, 1]))
        groups = [make_group(rank, 2, f"{number}/{i}") for i in range(2)]
        given = [compopt.Ranks(group, rank, 2, generation=i) for i, group in enumerate(groups)]
        if train(case, rank, *given) != known:
            wrong.append(case.name)
    generation = [0]
    moved = compopt.Ranks(make_group(rank, 2, "moved"), rank, 2, lambda: generation[0])
    optimizer = compopt.SeparateAdam(nn.Linear(4, 4).parameters(), process_group=moved)
    generation[0] = 1
    wrong.append(catch_message(compopt.CommunicationError, optimizer.step))
    return wrong


def test_every_class_does_the_same_over_a_group_that_torch_does_not_know():
    told = run_ranks(over_both, 2)
    for rank, (*wrong, message) in enumerate(told):
        assert wrong == []
        assert f"generation 0 had 2 ranks, of which this was rank {rank}, and 1 has 2" in message
        assert "Call rebind() with the new Ranks" in message


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 1), (0, 2), (0.0, 1)])
def test_ranks_that_cannot_be_are_refused(rank, size):
    with pytest.raises(ValueError, match=r"0 <= rank < size|no group to reach"):
        compopt.Ranks(None, rank, size)


def make_local(**options) -> compopt.LocalSteps:
    torch.manual_seed(0)
    model = nn.Linear(8, 64)
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer = compopt.LocalSteps(inner, 3, **{"growth_steps": 0, **options})
    optimizer.model = model
    return optimizer


def make_separate(**options) -> compopt.SeparateAdam:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64))
    optimizer = compopt.SeparateAdam(model.parameters(), 0.01, rank=4, dense_steps=1, **options)
    optimizer.model = model
    return optimizer


def take(optimizer, rank: int, steps: int) -> None:
    for _ in range(steps):
        count = optimizer.param_groups[0].setdefault("taken", 0)
        optimizer.param_groups[0]["taken"] += 1
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + count))
        optimizer.zero_grad()
        with torch.enable_grad():
            optimizer.model(x).square().mean().backward()
        optimizer.step()


def run(world: World, optimizers: list, steps: int, rebinds: bool = False) -> None:
    if rebinds:
        world.run([partial(o.rebind, comm) for o, comm in zip(optimizers, world.comms, strict=True)])
    world.run([partial(take, o, rank, steps) for rank, o in enumerate(optimizers)])


def join(source, make) -> torch.optim.Optimizer:
    """Return a rank that has loaded the state of ``source``."""
    optimizer = make(process_group=compopt.Ranks(None, 0, 1))
    optimizer.model.load_state_dict({name: t.clone() for name, t in source.model.state_dict().items()})
    optimizer.load_state_dict(source.state_for_joiner())
    return optimizer


def states(optimizer) -> list[torch.Tensor]:
    """All tensors of a state dict, without residuals."""
    found = []

    def look(value, name=""):
        if isinstance(value, dict):
            for key, each in value.items():
                look(each, key)
        elif isinstance(value, torch.Tensor) and name != "residual":
            found.append(value.clone())

    look(optimizer.state_dict()["state"])
    return [*found, *(p.detach().clone() for p in optimizer.param_groups[0]["params"])]


def residual(optimizer) -> float:
    return float(optimizer.stats.residual_norm())


@pytest.mark.parametrize("make", [make_local, make_separate])
def test_a_rank_that_joins_has_the_moments_of_its_source_and_no_residual(make):
    world = World(2)
    optimizers = [make(process_group=comm) for comm in world.comms]
    run(world, optimizers, 6)
    source = optimizers[1]
    assert residual(source) > 0
    started = [comm.started for comm in world.comms]
    saved = source.state_for_joiner()
    assert started == [comm.started for comm in world.comms], "it communicates nothing"
    before = states(source)
    for value in saved["state"].values():  # nothing is shared
        for tensor in value.values():
            if isinstance(tensor, torch.Tensor):
                tensor.add_(1)
    assert all(map(torch.equal, before, states(source)))
    joiner = join(source, make)
    assert residual(joiner) == 0
    assert all(map(torch.equal, states(source), states(joiner)))
    optimizers.append(joiner)
    run(World(3), optimizers, 6, rebinds=True)
    params = [[p.detach() for p in o.param_groups[0]["params"]] for o in optimizers]
    assert all(torch.equal(p, q) for other in params[1:] for p, q in zip(params[0], other, strict=True))


def test_the_state_for_a_joiner_has_each_moment_once():
    world = World(2)
    optimizers = [make_local(process_group=comm) for comm in world.comms]
    run(world, optimizers, 3)

    def count(value) -> int:
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        return value.numel() if isinstance(value, torch.Tensor) and value.numel() > 1 else 0

    elements = count(optimizers[0].state_for_joiner())
    assert elements == 5 * sum(p.numel() for p in optimizers[0].model.parameters())  # with the model 24 bytes


@pytest.mark.parametrize("make", [make_local, make_separate])
def test_one_rank_that_is_left_goes_on_as_one_of_several_and_another_joins_it(make):
    world = World(2)
    optimizers = [make(process_group=comm) for comm in world.comms]
    run(world, optimizers, 6)
    alone = optimizers[0]
    before, kept = states(alone), residual(alone)
    with pytest.warns(UserWarning, match="1 of 2 ranks are gone"):
        alone.rebind(compopt.Ranks(None, 0, 1, generation="alone"))
    assert all(map(torch.equal, before, states(alone)))
    assert residual(alone) == kept > 0
    take(alone, 0, 6)
    assert alone.stats.bytes_sent == 0
    assert alone.stats.phase != "dense"
    pair = [alone, join(alone, make)]
    before = states(alone)
    world = World(2)
    world.run([partial(o.rebind, comm) for o, comm in zip(pair, world.comms, strict=True)])
    assert all(map(torch.equal, before, states(alone)))
    run(world, pair, 6)
    params = [[p.detach() for p in o.param_groups[0]["params"]] for o in pair]
    assert all(map(torch.equal, *params))


def test_a_generation_that_has_passed_is_noticed_by_a_rank_that_is_alone():
    generation = [1]
    optimizer = make_local(process_group=compopt.Ranks(None, 0, 1, lambda: generation[0]))
    take(optimizer, 0, 3)
    generation[0] = 2
    before = states(optimizer)
    with pytest.raises(compopt.CommunicationError, match=r"generation 1 had 1 ranks.*call rebind\(\)|Call rebind"):
        take(optimizer, 0, 1)
    assert all(map(torch.equal, before, states(optimizer)))
    optimizer.rebind(compopt.Ranks(None, 0, 1, lambda: generation[0]))
    take(optimizer, 0, 3)


def test_shards_of_state_are_not_given_to_a_joiner():
    world = World(2)
    optimizers = [compopt.TagcAdamW(nn.Linear(8, 64).parameters(), process_group=comm) for comm in world.comms]
    with pytest.raises(ValueError, match=r"cut its state into shards.*consolidate_state\(\)"):
        optimizers[0].state_for_joiner()


@pytest.mark.parametrize(
    "options",
    [{}, {"growth_steps": 12}, {"fragments": 2, "growth_steps": 4}, {"delay": 1}, {"dense_steps": 2}],
    ids=str,
)
def test_it_is_known_before_a_step_whether_it_exchanges(options):
    world = World(2)
    optimizers = [make_local(**{"payload_dtype": None, **options}, process_group=comm) for comm in world.comms]
    seen = []
    for _ in range(24):
        due = [o.exchange_is_due for o in optimizers]
        run(world, optimizers, 1)
        is_exchanged = [o.stats.bytes_sent > 1000 or o.stats.phase == "exchanged" for o in optimizers]
        seen.append(is_exchanged[0])
        assert due == is_exchanged
    assert len({*seen}) == 2


def test_loading_a_delayed_exchange_makes_no_group_and_the_joiner_repeats_it():
    world = World(2)
    optimizers = [make_local(delay=2, process_group=comm) for comm in world.comms]
    run(world, optimizers, 4)
    assert optimizers[0]._sync.running is not None
    three = World(3)
    joiner = make_local(delay=2, process_group=three.comms[2])
    joiner.model.load_state_dict(optimizers[0].model.state_dict())
    joiner.load_state_dict(optimizers[0].state_for_joiner())
    assert three.beside is None
    optimizers.append(joiner)
    three.run([partial(o.rebind, comm) for o, comm in zip(optimizers, three.comms, strict=True)])
    run(three, optimizers, 6)
    three.run([o.end_round for o in optimizers])
    anchors = [[t.anchor for t in o._sync.anchors.tensors] for o in optimizers]
    assert all(torch.equal(a, b) for other in anchors[1:] for a, b in zip(anchors[0], other, strict=True))
