"""Named ranges of a step in the traces of torch.profiler, and none while no profiler runs."""

from __future__ import annotations

import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import compopt

STAGES = ("compopt::encode", "compopt::exchange", "compopt::decide", "compopt::commit")
MAKE = {
    "SeparateAdam": functools.partial(compopt.SeparateAdam, lr=1e-2, rank=4, dense_steps=0),
    "TagcAdamW": functools.partial(compopt.TagcAdamW, lr=1e-2, density=0.1),
}


def optimizer_after_a_step(name: str, rank: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 64))
    optimizer = MAKE[name](model.named_parameters())
    torch.manual_seed(1 + rank)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()  # which compares ranks
    return optimizer


def profiled(rank: int, name: str) -> list[tuple[str, float, float]]:
    """The package's ranges of one step: name, start and end in microseconds."""
    optimizer = optimizer_after_a_step(name, rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    with mock.patch("torch.autograd.profiler.record_function", wraps=torch.autograd.profiler.record_function) as made:
        optimizer.step()
    assert not any(str(call.args[0]).startswith("compopt::") for call in made.call_args_list), "no profiler runs"
    events = [event for event in profiler.events() if event.name.startswith("compopt::")]
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


@pytest.mark.parametrize("name", MAKE)
def test_a_step_shows_its_stages_in_order(name):
    for events in run_ranks(profiled, 2, name):
        counts = Counter(stage for stage, _, _ in events)
        assert set(counts) == set(STAGES)
        assert counts["compopt::decide"] == counts["compopt::commit"] == 1
        assert counts["compopt::exchange"] >= 2  # to start a collective, and to wait for it
        starts = {stage: min(start for other, start, _ in events if other == stage) for stage in STAGES}
        assert sorted(STAGES, key=starts.__getitem__) == list(STAGES)
        (decided,) = (end for stage, _, end in events if stage == "compopt::decide")
        assert starts["compopt::commit"] >= decided
