"""bfloat16 parameters train as float32 ones do: what a step computes is computed on float32 masters."""

from __future__ import annotations

import pytest
import torch
from table import CASES, FORMS, Case, by_name
from torch import nn

SHAPES = [(64, 80), (80,), (400, 500)]


def trained(case: Case, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    """Ends of one process's run on gradients that bfloat16 holds exactly."""
    params = [nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in SHAPES]
    optimizer = case.new(params, **{"lr": 1e-3, "weight_decay": 0.1, **case.lossless, **options})
    for t in range(5):
        random = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=random).bfloat16().to(dtype)
        optimizer.step()
    return [optimizer.state[p]["master"] if dtype == torch.bfloat16 else p.detach() for p in params]


@pytest.mark.parametrize("case", [c for c in CASES + FORMS if not c.build], ids=lambda case: case.name)
@pytest.mark.parametrize("maximize", [False, True])
def test_masters_take_the_steps_of_float32(case, maximize):
    ours, wanted = (trained(case, dtype, maximize=maximize) for dtype in (torch.bfloat16, torch.float32))
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.view(b.shape), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["AdamS", "RadiusAdamW"])
def test_a_step_does_not_depend_on_how_a_tensor_lies_in_memory(name, maximize):
    ends = []
    for turned in (False, True):
        random = torch.Generator().manual_seed(0)
        w = torch.randn(80, 70, generator=random)
        p = nn.Parameter(w.t().contiguous().t() if turned else w)
        optimizer = by_name[name].make([p], lr=0.1, maximize=maximize)
        for _ in range(7):
            p.grad = torch.randn(80, 70, generator=random)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
