"""Norms of averaged gradients: the same on every backend, and finite in every step that is applied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sim import World
from slow_rows import slow_but

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip(
        "kernels run either on the GPU or, with TRITON_INTERPRET=1, in the interpreter", allow_module_level=True
    )

from test_kernel_tables import CLASSES, RANKS, Job, absent, not_finite

import compopt


def with_clip(params, comm):
    return compopt.RadiusAdamW(params, density=0.3, dense_steps=1, interval=100, max_grad_norm=0.5, process_group=comm)


RUNS = {name: CLASSES[name] for name in ("AdamS", "Radius", "Radius, bfloat16", "SCAPE")} | {
    "Radius, clipped": with_clip
}
STEPS, ABSENT, BAD = 6, 3, 4  # a dense step, a resample (which sends residuals too), sparse ones


def run(make: Callable, backend: str, monkeypatch) -> list[list[float]]:
    """Norms after each step."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    job, norms = Job(make), []
    for t in range(STEPS):
        job.gradients(t)
        {ABSENT: absent, BAD: not_finite}.get(t, lambda job: None)(job)
        job.step()
        norms.append([optimizer.stats.grad_norm for optimizer in job.optimizers])
    return norms


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("AdamS", "Radius, clipped", "SCAPE"), RUNS))
def test_kernels_report_the_norms_of_the_reference(name, monkeypatch):
    results = run(RUNS[name], "triton", monkeypatch)
    expected = run(RUNS[name], "torch", monkeypatch)
    for t, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True) and not theirs[0] < 1, t
        assert ours[0] == ours[1] or t == BAD


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
