"""Any shapes, dtypes, groups, options and faults: replicas equal to the bit, runs repeatable, gradients conserved.

120 examples here, the same each time, a share for each class; ``make properties`` draws thousands anew.
"""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from conservation import TOLERANCE, Ledger, everywhere
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import World
from table import CASES, Case
from torch import nn

import compopt

EXAMPLES = int(os.environ.get("COMPOPT_EXAMPLES", 0))
OPTIONS: dict[str, st.SearchStrategy] = {
    "density": st.sampled_from([0.2, 0.03, 0.5, 0.9, 1.0]),
    "interval": st.sampled_from([3, 2, 4, 1]),
    "dense_steps": st.sampled_from([1, 0, 2]),
    "density_steps": st.sampled_from([1, 0, 2]),
    "ratio": st.sampled_from([2, 7.5, 16, 1]),
    "reset_interval": st.sampled_from([None, 2, 5]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
}
EVENTS = ["nothing"] * 6 + ["not finite", "absent", "absent everywhere", "failure", "rank lost", "saved and loaded"]


@dataclass
class Example:
    case: Case
    dtype: torch.dtype
    ranks: int
    groups: list[dict[str, Any]]  # each with the shapes of its tensors
    options: dict[str, Any]
    events: list[str]
    seed: int
    repeat: bool


@st.composite
def examples(draw, case: Case) -> Example:
    shapes = st.lists(st.integers(0, 9) | st.just(33), max_size=3).map(tuple)
    group = st.fixed_dictionaries(
        {"shapes": st.lists(shapes, min_size=1, max_size=3), "compress": st.sampled_from([True, True, None, False])}
    )
    known = inspect.signature(case.cls).parameters
    options = {name: draw(values) for name, values in OPTIONS.items() if name in known}
    if case.cls is compopt.LocalSteps:
        del options["dense_steps"]  # its averaged start, throughout
    return Example(
        case,
        draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])),
        draw(st.integers(1, 4)),
        draw(st.lists(group, min_size=1, max_size=3)),
        options,
        draw(st.lists(st.sampled_from(EVENTS), min_size=7, max_size=9)),
        draw(st.integers(0, 99)),
        draw(st.sampled_from([True, False, False])),
    )


class Run:
    """One training of an example, by random gradients, with what befalls it."""

    def __init__(self, example: Example):
        self.example, self.world = example, World(example.ranks)
        self.optimizers = [self.make(comm) for comm in self.world.comms]
        self.worst = 0.0

    def make(self, comm):
        torch.manual_seed(self.example.seed)
        groups = [
            {"params": [nn.Parameter(torch.randn(s).to(self.example.dtype)) for s in group["shapes"]]}
            | {"compress": group["compress"]}
            for group in self.example.groups
        ]
        optimizer = self.example.case.make(groups, process_group=comm, **self.example.options)
        optimizer.simulate = self.example.ranks == 1  # where the other ranks are lost, the last one steps alone
        return optimizer

    def backward(self, step: int, absent: set[int] = frozenset()) -> None:
        for rank, optimizer in enumerate(self.optimizers):
            draw = torch.Generator().manual_seed(1000 * step + 10 * rank + self.example.seed)
            for n, p in enumerate(everywhere(optimizer)):
                g = torch.randn(p.shape, generator=draw).to(p.dtype) * 10.0 ** (n % 5 - 2)
                p.grad = None if n % 3 in absent and (rank + step) % 2 else g

    def go(self) -> Run:
        for step, event in enumerate(self.example.events):
            self.backward(step, {0, 1} if event == "absent" else set())
            getattr(self, event.replace(" ", "_"))(step)
            books = Ledger(self.example.case, self.optimizers)
            self.world.step(self.optimizers)
            assert all(optimizer.stats.phase != "skipped" for optimizer in self.optimizers)
            if self.example.dtype in TOLERANCE:
                self.worst = max(self.worst, books.check(self.optimizers) / TOLERANCE[self.example.dtype])
            self.assert_equal_replicas(step)
        return self

    def assert_equal_replicas(self, step: int) -> None:
        for rank, optimizer in enumerate(self.optimizers[1:], start=1):
            for n, (p, q) in enumerate(zip(everywhere(self.optimizers[0]), everywhere(optimizer), strict=True)):
                assert torch.equal(p, q), f"tensor {n} differs between ranks 0 and {rank} after step {step}"
        assert all(p.isfinite().all() for p in everywhere(self.optimizers[0]))

    # What befalls a run before a step

    def nothing(self, step: int) -> None:
        pass

    absent = nothing

    def absent_everywhere(self, step: int) -> None:
        for optimizer in self.optimizers:
            for p in everywhere(optimizer)[::2]:
                p.grad = None

    def not_finite(self, step: int) -> None:
        params = everywhere(self.optimizers[step % len(self.optimizers)])
        large = [p for p in params if p.numel()]
        if large:
            large[step % len(large)].grad.view(-1)[-1] = float("nan")
            self.world.step(self.optimizers)
            assert all(optimizer.stats.phase == "skipped" for optimizer in self.optimizers)
            self.backward(step)

    def failure(self, step: int) -> None:
        self.world.failing_everywhere.add(self.world.comms[0].started)
        with pytest.raises(compopt.CommunicationError):
            self.world.step(self.optimizers)

    def rank_lost(self, step: int) -> None:
        if len(self.optimizers) > 1:
            self.optimizers = self.optimizers[1:]
            self.world = World(len(self.optimizers))
            pairs = zip(self.optimizers, self.world.comms, strict=True)
            self.world.run([partial(optimizer.rebind, comm) for optimizer, comm in pairs])

    def saved_and_loaded(self, step: int) -> None:
        self.world.consolidate(self.optimizers)
        for optimizer in self.optimizers:
            optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_are_equal_runs_repeat_and_gradients_are_conserved(case):
    @settings(
        max_examples=-(-(EXAMPLES or 24) // len(CASES)), deadline=None, derandomize=not EXAMPLES, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples(case))
    def holds(example):
        run = Run(example).go()
        records.update(optimizer.stats.phase for optimizer in run.optimizers)
        assert run.worst < 1
        if example.repeat:
            for p, q in zip(everywhere(run.optimizers[0]), everywhere(Run(example).go().optimizers[0]), strict=True):
                assert torch.equal(p, q)

    records: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holds()
    assert records - {"dense", "none"} or not case.cls.rank_local_state
