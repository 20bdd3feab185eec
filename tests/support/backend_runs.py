"""A model that is trained on two simulated ranks with a backend, and how far two such runs are apart."""

from __future__ import annotations

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
    x = torch.randn(8, SHAPE[0], generator=torch.Generator().manual_seed(10 * step + rank)).to(model.a.device)
    return (model(x) - x).square().mean()


def trained(
    backend: str, monkeypatch, name: str, device: str = "cpu", steps: int = 5, model=Net, loss=loss, **options
) -> Ranks:
    """Two ranks in lockstep."""
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    world = Ranks(2, lambda: model().to(device), lambda params, **o: by_name[name].make(params, **options, **o))
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
                if name == "basis":  # QR and Cholesky-QR may choose other signs
                    value, b["state"][key][name] = value.abs(), b["state"][key][name].abs()
                torch.testing.assert_close(value, b["state"][key][name], rtol=tolerance, atol=tolerance)
    for p, q in zip(ours.models[0].parameters(), theirs.models[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
