"""A stack of layers whose gradients fill several small buckets, and a loss that differs between ranks."""

from __future__ import annotations

import torch
from torch import nn


class Deep(nn.Module):
    """64 x 64 layers; with BUCKET_BYTES at 33 to 40 kB a bucket holds two of them."""

    def __init__(self, layers: int = 8):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


def loss(model: Deep, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model.layers(x) - x).square().mean()
