"""Process groups that torch.distributed does not know as they are: made, or resized, by another library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import compopt
from compopt._wire.collectives import Communicator
from compopt._wire.requests import AllGather, AllReduceMean

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from _fake_ranks import fake_ranks


class Resized(dist.ProcessGroup):
    """Has as many ranks as it is told, as a group of torchft has."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.place = [rank, size]

    def rank(self) -> int:
        return self.place[0]

    def size(self) -> int:
        return self.place[1]


@pytest.fixture
def register(monkeypatch):
    """Registers a group as torch.distributed would, as that of these ranks."""
    with fake_ranks(1):
        known = dist.distributed_c10d._world.pg_group_ranks

        def register(group: Resized, *ranks: int) -> Resized:
            known[group] = {0: ranks.index(0), **{r: n for n, r in enumerate(ranks)}}
            return group

        yield register


def step(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def make(name: str, group: dist.ProcessGroup) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.ones(64, 65))]
    if name == "LocalSteps":
        return compopt.LocalSteps(torch.optim.AdamW(params), 2, growth_steps=0, process_group=group)
    return getattr(compopt, name)(params, process_group=group)


@pytest.mark.parametrize("name", ["SeparateAdam", "LocalSteps"])
@pytest.mark.parametrize("place", [(0, 2), (1, 2), (1, 1)])
def test_a_group_that_is_registered_as_another_is_refused(register, name, place):
    group = register(Resized(*place), 0)
    with pytest.raises(ValueError, match=f"rank {place[0]} of {place[1]}, and .* as rank 0 of 1.*pass compopt.Ranks"):
        step(make(name, group))


def test_a_group_that_is_not_registered_is_refused(register):
    with pytest.raises(ValueError, match=r"not registered with torch\.distributed: pass compopt\.Ranks"):
        step(make("SeparateAdam", Resized(0, 1)))


@pytest.mark.parametrize("name", ["SeparateAdam", "LocalSteps"])
@pytest.mark.parametrize("place", [[0, 2], [1, 1]])
def test_a_group_that_has_changed_is_noticed_in_the_next_step(register, name, place):
    group = register(Resized(0, 1), 0)
    optimizer = make(name, group)
    step(optimizer)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    group.place = place
    told = rf"step 2 was not applied on rank 0: .* rank {place[0]} of {place[1]} now.* call rebind\(\)"
    with pytest.raises(compopt.CommunicationError, match=told):
        step(optimizer)
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
    group.place = [0, 1]
    optimizer.rebind(group)
    step(optimizer)


def test_nothing_is_sent_over_a_group_that_has_changed(register):
    """Also what backward starts before the step."""
    comm = Communicator(group := register(Resized(0, 1), 0))
    group.place[1] = 2
    for request in (AllReduceMean, AllGather):
        with pytest.raises(compopt.CommunicationError, match="has changed since it was given"):
            comm.start(request(torch.ones(3)))
