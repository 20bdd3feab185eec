"""A model for DistributedDataParallel, its batches, and scripts that users write around it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import compopt


class Net(nn.Module):
    """Six 96 x 96 layers, a norm, and a branch that only some inputs take."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.norm, self.branch = nn.LayerNorm(96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x + self.branch(x) if branch else x)


def batch(step: int, micro: int = 0) -> torch.Tensor:
    seed = 1000 * step + 10 * micro + dist.get_rank()
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(seed), dtype=torch.get_default_dtype())


def radius(params, **options):
    return compopt.RadiusAdamW(params, **{"lr": 1e-2, "density": 0.4, "interval": 4, "dense_steps": 2, **options})


def plain(model, optimizer, step, made):
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def apart(model: nn.Module) -> float:
    """Return the distance of this rank's parameters from rank 0's."""
    theirs = vector(model)
    dist.broadcast(theirs, 0)
    return float((vector(model) - theirs).abs().max())
