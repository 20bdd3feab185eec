"""Inside FSDP2 a gradient that is not finite is always noticed: also where no rank sends the element that is not.

The rule is that of test_finite.py: all ranks skip the step where the squared norm of any rank's gradient overflows.
"""

from __future__ import annotations

import math
import os
from unittest import mock

import pytest
import torch
from conformance import OTHERS
from fsdp_models import Net, cut, loss, make
from ranks import run_ranks
from table import CASES, FORMS
from torch import Tensor, nn

from compopt._ops.operations import Ops

INSIDE = {case.name: case for case in CASES + FORMS + OTHERS if case.works_inside}
BACKENDS = ("torch", "native")
SELECT = "top_k_of_each"
FILLS = {  # which elements of one rank's gradient are replaced, and by what
    "the first is NaN": ((0, 0), math.nan),
    "the last is NaN": ((-1, -1), math.nan),
    "all are 1e18": ((slice(None), slice(None)), 1e18),  # each would do, their squared norm overflows
}


class FilledGradient(torch.autograd.Function):
    """The identity, whose gradient has ``value`` at ``where``."""

    @staticmethod
    def forward(ctx, weight: Tensor, where: tuple, value: float) -> Tensor:
        ctx.fill = where, value
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        where, value = ctx.fill
        grad = grad.clone()
        grad[where] = value
        return grad, None, None


class FilledLinear(nn.Linear):
    fill: tuple | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.fill is None else FilledGradient.apply(self.weight, *self.fill)
        return nn.functional.linear(x, weight, self.bias)


class FilledNet(Net):
    def __init__(self):
        super().__init__()
        self.down = FilledLinear(99, 64)


def select_finite_top_k(select):
    """A selection that never takes what is not finite, however a backend orders NaN."""
    return lambda ops, parts, ks: select(ops, [part.nan_to_num(0.0, 0.0, 0.0) for part in parts], ks)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank, torch.float32).backward()
        optimizer.step()


def copy_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [getattr(value, "_local_tensor", value).detach().clone() for value in [*model.parameters(), *states]]


def mistake_of(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, fill: tuple, step: int) -> str:
    """A step of which rank 1 has such a gradient, and one more: "" if all is as it should be."""
    phase, before = optimizer.stats.phase, copy_state(model, optimizer)
    model.down.fill = fill if rank == 1 else None
    train(model, optimizer, range(step, step + 1), rank)
    model.down.fill = None
    if optimizer.stats.phase != "skipped":
        return f"was {optimizer.stats.phase}, not skipped"
    if not all(map(torch.equal, before, copy_state(model, optimizer))):
        return "changed parameters or state"
    train(model, optimizer, range(step + 1, step + 2), rank)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in copy_state(model, optimizer))
    return "" if is_finite and optimizer.stats.phase == phase else f"does not go on: {optimizer.stats.phase}"


def mistakes_of(rank: int, name: str) -> dict[str, str]:
    """Of one run, in which such a step follows another, by what the gradient is filled with."""
    model = cut(make(FilledNet, torch.float32))
    optimizer = INSIDE[name].make(model.parameters())
    if optimizer.backend != os.environ["COMPOPT_BACKEND"]:
        return {"any": f"runs on {optimizer.backend}"}
    train(model, optimizer, range(3), rank)  # two of a dense start, and one that leaves residuals
    return {what: mistake_of(rank, model, optimizer, FILLS[what], 3 + 2 * n) for n, what in enumerate(FILLS)}


def find_mistakes(rank: int) -> dict[str, str]:
    answers = {}
    for backend in BACKENDS:
        os.environ["COMPOPT_BACKEND"] = backend
        answers |= {f"{name}, {backend}": mistakes_of(rank, name) for name in INSIDE}
        with mock.patch.object(Ops, SELECT, select_finite_top_k(getattr(Ops, SELECT))):
            answers[f"TagcAdamW without NaN among the largest, {backend}"] = mistakes_of(rank, "TagcAdamW")
    return {f"{name}, {what}": mistake for name, of in answers.items() for what, mistake in of.items() if mistake}


@pytest.mark.slow
@pytest.mark.long
def test_a_gradient_that_is_not_finite_makes_all_ranks_skip():
    assert run_ranks(find_mistakes, 2) == [{}, {}]
