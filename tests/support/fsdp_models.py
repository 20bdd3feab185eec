"""A model that FSDP2 cuts, its training, and how far apart two of them are: for tests of what works inside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    """Matrices with rows that no number of ranks divides, a bias and a matrix with empty shards, and a convolution."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 99), nn.LayerNorm(99), nn.Linear(99, 64)
        self.flat, self.conv = nn.Linear(4096, 1), nn.Conv1d(1, 64, 64, padding=32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.norm(self.up(x)).tanh())
        x = x + self.conv(x.unsqueeze(1)).mean((1, 2)).unsqueeze(1)
        return self.flat((x.unsqueeze(1) * x.unsqueeze(2)).flatten(1).tanh())


class Two(nn.Module):
    """Matrices whose rows all numbers of ranks divide: DDP's shards of a group and FSDP's are the same."""

    def __init__(self):
        super().__init__()
        self.down, self.flat = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(self.down(x).tanh()).tanh().sum(1, keepdim=True)  # else flat's gradient has rank 1


def make(kind=Net, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype)


def loss(model: nn.Module, step: int, who: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + who)
    x = torch.randn(4, 64, generator=generator, dtype=dtype)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def cut(model: nn.Module, **options) -> nn.Module:
    """FSDP in two nests: what is left of the root is reduced at last."""
    for part in (getattr(model, "down", None), getattr(model, "flat", None)):
        if part is not None:
            fully_shard(part, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> Tensor:
    """All parameters, gathered from the shards."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])


def train(model: nn.Module, optimizer, steps, rank: int, clip: float | None = None, backwards: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for turn in range(backwards):
            loss(model, backwards * step + turn, rank).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def apart(a: nn.Module, b: nn.Module) -> float:
    return float((whole(a) - whole(b)).abs().max())
