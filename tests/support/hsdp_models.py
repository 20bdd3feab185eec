"""A model that FSDP2 cuts inside a node, its training between nodes, and how far apart ranks are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp_models import loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    """Two matrices that are compressed, with an odd number of rows; one, and its bias, whose second shard is empty."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 99), nn.LayerNorm(99), nn.Linear(99, 64)
        self.flat = nn.Linear(4096, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.norm(self.up(x)).tanh())
        return self.flat((x.unsqueeze(1) * x.unsqueeze(2)).flatten(1).tanh())


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def hsdp(mesh: DeviceMesh, make_optimizer, model: nn.Module | None = None, **options):
    model = fully_shard(model or make(), mesh=mesh["shard"])
    return model, make_optimizer(model.parameters(), process_group=mesh.get_group("replicate"), **options)


def train(model: nn.Module, optimizer, steps, who: int, dtype: torch.dtype = torch.float64) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, who, dtype).backward()
        optimizer.step()


def differences(mine: torch.Tensor) -> float:
    first = mine.clone()
    dist.broadcast(first, 0)
    return float((mine - first).abs().max())
