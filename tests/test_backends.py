"""The back ends: which one is chosen, and that all compute the same."""

from __future__ import annotations

import pytest
import torch
from sim import Ranks
from table import by_name
from torch import nn

SHAPE = (64, 68)


class Net(nn.Module):
    """Two matrices that are compressed, one of them transposed in memory, and a vector that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(SHAPE)), nn.Parameter(torch.randn(SHAPE[::-1]).t())
        self.scale, self.unused = nn.Parameter(torch.ones(SHAPE[1])), nn.Parameter(torch.randn(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.a).tanh() * self.scale) @ self.b.t()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, SHAPE[0], generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x).square().mean()


def trained(backend: str, monkeypatch, name: str, ranks: int = 2, steps: int = 7, **options) -> Ranks:
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    world = Ranks(ranks, Net, lambda params, **o: by_name[name].make(params, **options, **o))
    assert {o.backend for o in world.optimizers} == {backend}
    world.train(loss, steps)
    world.assert_replicas_equal()
    return world


def assert_same(ours: Ranks, theirs: Ranks, tolerance: float = 1e-5) -> None:
    for mine, yours in zip(ours.optimizers, theirs.optimizers, strict=True):
        assert mine.stats.phase == yours.stats.phase and mine.stats.bytes_sent == yours.stats.bytes_sent
        a, b = mine.state_dict(), yours.state_dict()
        for key in (k for k, state in a["state"].items() if state["step"]):  # without a gradient all are equally large
            for name, value in a["state"][key].items():
                torch.testing.assert_close(value, b["state"][key][name], rtol=tolerance, atol=tolerance)
    for p, q in zip(ours.models[0].parameters(), theirs.models[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


TRITON = {  # each class twice: what it does in all its phases, and the options that its kernels see
    "RadiusAdamW": [
        {"warmup_steps": 2, "interval": 4, "maximize": True, "max_grad_norm": 0.5, "residual_scale": 0.5, "lr": 1e-3}
    ],
    "ScapeAdamS": [
        {"warmup_steps": 1, "lr": 1e-3, "mask_delay": 0, "bias_correction": "adams"},
        {"warmup_steps": 1, "lr": 1e-3, "max_grad_norm": 0.5, "clip": "scape", "maximize": True},
    ],
    "AdamS": [{}],
}


@pytest.mark.parametrize("name, options", [(name, options) for name, all_ in TRITON.items() for options in all_])
def test_triton_equals_torch(monkeypatch, name, options):
    """In the interpreter, ranks in lockstep."""
    pytest.importorskip("triton")
    steps = 2 if name == "AdamS" else 5
    plain, ours = (trained(backend, monkeypatch, name, steps=steps, **options) for backend in ("torch", "triton"))
    assert_same(ours, plain)
