"""Norms of averages that nothing before the commit needs: the commit's kernel finds them while it reads the average."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU then", allow_module_level=True)

from sim import World
from test_places import CLASSES, RANKS, Job, absent, not_finite

import compopt
import compopt._engine.verdicts as verdicts


def with_clip(params, comm):
    return compopt.RadiusAdamW(params, density=0.3, warmup_steps=1, interval=100, max_grad_norm=0.5, process_group=comm)


# a dense step, a resample (which sends residuals too), sparse ones; steps that must look at the average: the resample
RUNS = {
    "AdamS": (CLASSES["AdamS"], 0),
    "Radius": (CLASSES["Radius"], 1),
    "Radius, clipped": (with_clip, 6),
    "Radius, bfloat16": (CLASSES["Radius, bfloat16"], 6),
    "SCAPE": (CLASSES["SCAPE"], 6),
}
STEPS, ABSENT, BAD = 6, 3, 4


def run(make: Callable, backend: str, monkeypatch) -> tuple[list[list[float]], int]:
    """Norms after each step, and how many steps looked at the average for it."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    job, norms = Job(make), []
    with mock.patch.object(verdicts, "stacked_squared_norms", wraps=verdicts.stacked_squared_norms) as looked:
        for t in range(STEPS):
            job.gradients(t)
            {ABSENT: absent, BAD: not_finite}.get(t, lambda job: None)(job)
            job.step()
            norms.append([optimizer.stats.grad_norm for optimizer in job.optimizers])
            assert norms[-1] == [optimizer.stats.grad_norm for optimizer in job.optimizers] or t == BAD  # read once
    return norms, looked.call_count // len(job.optimizers)


@pytest.mark.parametrize("name", RUNS)
def test_norms_are_those_of_the_average(name, monkeypatch):
    make, looked = RUNS[name]
    found, looks = run(make, "triton", monkeypatch)
    expected, _ = run(make, "torch", monkeypatch)
    for t, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True) and not theirs[0] < 1, t
        assert ours[0] == ours[1] or t == BAD
    assert looks == looked + (looked < STEPS)  # and the step that is not applied


@pytest.mark.parametrize("name", ["AdamS", "Radius", "Radius, capturable"])
def test_steps_whose_norm_nobody_reads_have_none_of_it_left_behind(name, monkeypatch):
    """What is read is the last step's, whatever was not read before."""
    monkeypatch.setenv("COMPOPT_BACKEND", "triton")
    job = Job(CLASSES[name])
    for t in range(4):
        job.gradients(t)
        job.step()
        if t == 2:
            job.params[0][0].grad[3, 4] = 0.0
    means = [torch.stack([params[i].grad for params in job.params]).mean(0) for i in range(3)]
    sent = means if name == "AdamS" else [means[0] * (mask_of(job) > 0), *means[1:]]
    norm = torch.cat([x.flatten() for x in sent]).norm().item()
    assert [optimizer.stats.grad_norm for optimizer in job.optimizers] == [pytest.approx(norm, rel=1e-6)] * 2
    job.optimizers[0]._engine.settle()
    assert job.optimizers[0].stats.grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_an_average_that_overflows_alone_is_not_applied(backend, monkeypatch):
    """Gradients whose squares float64 adds up, sent in float32, which does not hold the sum over ranks."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    world, params = World(RANKS), [torch.nn.Parameter(torch.ones(9, dtype=torch.float64)) for _ in range(RANKS)]
    optimizers = [
        compopt.RadiusAdamW([p], payload_dtype="float32", process_group=world.comms[rank])
        for rank, p in enumerate(params)
    ]
    for size, phase in ((1.0, "dense"), (3e38, "skipped"), (2.0, "dense")):
        before = params[0].detach().clone()
        for rank, p in enumerate(params):
            p.grad = torch.full_like(p, size - rank * size / 10)
        world.step(optimizers)
        assert [optimizer.stats.phase for optimizer in optimizers] == [phase] * RANKS
        assert torch.equal(params[0], before) == (phase == "skipped") and torch.equal(*params)


def mask_of(job: Job) -> torch.Tensor:
    """Of the compressed tensor, in its shape."""
    bits = next(x for x in job.optimizers[0].state[job.params[0][0]].values() if x.dtype == torch.uint8)
    flags = torch.stack([bits >> i & 1 for i in range(8)], 1).flatten()
    return flags[: job.params[0][0].numel()].view_as(job.params[0][0])
