"""An optimizer lives as long as somebody holds it: no reference cycles, so nothing waits for Python's collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from sim import World
from table import CASES, FORMS, Case, projecting
from torch import nn

import compopt
from compopt._state import buckets

TRACKED = Case(
    compopt.SeparateAdam,
    compressed=projecting("tracked", rank=2),
    lossless={},
    reference=torch.optim.AdamW,
    form="tracked",
)


@pytest.fixture
def no_collector():
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch.compile, which leaves a cycle with its frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 10_000)


def trained(case: Case, comm: object, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3))
    optimizer = case.make(model.parameters(), process_group=comm)
    optimizer.simulate = True
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 80)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def begun_in_backward(optimizer) -> None:
    session = optimizer._session
    finished = [(p, bucket) for bucket in session.buckets for p in bucket.params]
    session.overlap.start_ready(finished, session.buckets, session.algorithm, session.comm)


@pytest.mark.parametrize("case", [*CASES, *FORMS, TRACKED], ids=lambda case: case.name)
def test_a_deleted_optimizer_is_gone_at_once(case, no_collector):
    """Also its model, with masks on the wire, with a bucket begun in backward, and whoever holds its statistics."""
    model, optimizer = trained(case, World(1).comms[0], steps=6)
    optimizer.state_dict()
    if getattr(optimizer, "averages_gradients", True):  # a local step sends nothing in backward
        begun_in_backward(optimizer)
        assert optimizer._session.overlap.schedule.exchanges
    stats, gone = optimizer.stats, [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[0].weight)]
    del optimizer
    assert gone[0]() is None
    del model
    assert [ref() for ref in gone] == [None] * 3
    with pytest.raises(ReferenceError, match="optimizer that was deleted"):
        stats.residual_norm()


def test_a_failed_step_leaves_no_cycle(no_collector):
    model, optimizer = trained(CASES[0], World(1).comms[0], steps=1)
    model[0].weight.grad = torch.zeros(80, 80).to_sparse()
    with pytest.raises(TypeError):
        optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


def test_the_collector_may_run_while_the_package_is_imported():
    """It calls a function of ours, which may only be there once all that it reads is."""
    code = "import gc, torch.distributed; gc.set_threshold(30); import compopt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
