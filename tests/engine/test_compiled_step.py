"""``torch.compile`` around ``step()``: it runs as it is, at once, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import compopt

MAKES = {
    "Radius": lambda ps: compopt.RadiusAdamW(ps, lr=1e-2, density=0.3, dense_steps=1, interval=2, simulate=True),
    "tracked": lambda ps: compopt.SeparateAdam(ps, lr=1e-2, rank=4, dense_steps=0, payload_dtype=None, simulate=True),
    "around SGD": lambda ps: compopt.Separate(
        torch.optim.SGD(ps, lr=1e-2), projection="gaussian", ratio=8, simulate=True
    ),
}


def trained(make: Callable, around: Callable[[Callable], Callable]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    optimizer = make(model.parameters())
    step = around(optimizer.step)
    for number in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    assert optimizer.stats.applied_steps == 4
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("how", ["step", "a function that calls it"])
@pytest.mark.parametrize("name", MAKES)
def test_nothing_of_a_step_is_compiled(name, how):
    def around(step: Callable) -> Callable:
        def calls() -> torch.Tensor:
            scale = torch.ones(3) * 2
            step()
            return scale + 1

        return torch.compile(step if how == "step" else calls, backend="eager")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = trained(MAKES[name], lambda step: step), trained(MAKES[name], around)
    for p, q in zip(plain, compiled, strict=True):
        assert torch.equal(p, q)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= (0 if how == "step" else 2), f"{graphs} pieces of step() were compiled"
