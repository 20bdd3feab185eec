"""A GradScaler and steps that fail: the next step has the gradients of its own scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compopt

SCALE = 1024.0
MAKERS = {
    "SeparateAdam": lambda params: compopt.SeparateAdam(params, lr=1e-3, payload_dtype=None, simulate=True),
    "Average": lambda params: compopt.Average(torch.optim.AdamW(params, lr=1e-3), simulate=True),
    "LocalSteps": lambda params: compopt.LocalSteps(torch.optim.AdamW(params, lr=1e-3), 3, simulate=True),
}


class Run:
    """A model whose embedding may have sparse gradients, and its scaled steps."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(100, 64), nn.Linear(64, 64)
        self.optimizer = MAKERS[name]([*self.table.parameters(), *self.linear.parameters()])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def backward(self, factor: float = 1.0) -> float:
        """Compute scaled gradients; return the norm of the unscaled ones."""
        self.optimizer.zero_grad()
        loss = self.linear(self.table(torch.arange(8))).square().mean() * factor
        self.scaler.scale(loss).backward()
        grads = [p.grad.to_dense() for p in (*self.table.parameters(), *self.linear.parameters())]
        return float(torch.nn.utils.get_total_norm(grads)) / SCALE

    def step(self, factor: float = 1.0) -> float:
        """A step; how far its norm is from that of the gradients, relative to this."""
        norm = self.backward(factor)
        self.scaler.step(self.optimizer)
        return abs(self.optimizer.stats.grad_norm / norm - 1)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_that_raises_leaves_no_scale(name, unscaled):
    run = Run(name)
    assert run.step() < 1e-5
    run.scaler.update()
    run.table.sparse = True
    run.backward()
    if unscaled:
        run.scaler.unscale_(run.optimizer)
    with pytest.raises(TypeError, match="sparse"):
        run.scaler.step(run.optimizer)
    run.scaler.update()
    run.table.sparse = False
    assert run.step() < 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_too_many_skipped_steps_leave_no_scale(name):
    run = Run(name)
    run.optimizer.max_skipped = 1
    run.backward(float("inf"))
    with pytest.raises(FloatingPointError, match="1 steps in a row"):
        run.scaler.step(run.optimizer)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    assert run.step() < 1e-5


@pytest.mark.parametrize("name", MAKERS)
def test_without_any_gradient_there_is_nothing_to_unscale(name):
    run = Run(name)
    run.step()
    run.scaler.update()
    run.optimizer.zero_grad()
    run.optimizer.grad_scale, run.optimizer.found_inf = torch.tensor(SCALE), torch.tensor(0.0)
    run.optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_no_skipped_step_is_tolerated_and_a_good_one_does_not_raise(name):
    run = Run(name)
    run.optimizer.max_skipped = 0
    assert run.step() < 1e-5
