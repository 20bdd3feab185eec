"""Fine-tuning under the real DistributedDataParallel: a head, adapters only, layers unfrozen in turn. Gloo."""

from __future__ import annotations

import torch
from ddp_models import Net, apart, plain, radius, vector
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets


class Adapted(nn.Module):
    """A frozen layer beside a trained product of two small matrices (LoRA)."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x).tanh() + self.b(self.a(x))


def adapters(rank: int, of_rank: int) -> list:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(Adapted(96, of_rank) for _ in range(4))))
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    optimizer = compopt.ScapeAdamS(model.parameters(), lr=1e-3, density=0.1, density_steps=0)
    for step in range(5):
        plain(model, optimizer, step, None)
    stats, kept = optimizer.stats, sum(t.numel() for entry in optimizer.state.values() for t in entry.values())
    unmoved = all(map(torch.equal, frozen, (p for p in model.parameters() if not p.requires_grad)))
    return [stats.bytes_dense, stats.bytes_sent, kept, unmoved, apart(model)]


def unfrozen_in_turn(rank: int) -> list:
    """The distance from DDP + AdamW, each phase with a DDP of its own, as torch wants it where layers change."""
    torch.set_default_dtype(torch.float64)
    buckets.BUCKET_BYTES = 160_000
    ends, overlapped = [], []
    for make in (lambda ps: torch.optim.AdamW(ps, lr=1e-2), lambda ps: radius(ps, density=1.0)):
        torch.manual_seed(0)
        net = Net()
        for p in net.parameters():
            p.requires_grad_(False)
        net.norm.requires_grad_(True)
        optimizer = make(net.parameters())
        for phase, more in enumerate([[net.branch], [net.layers[4], net.layers[5]], [net.layers], []]):
            model = DDP(net)
            if isinstance(optimizer, compopt.RadiusAdamW):
                compopt.attach(model, optimizer)
            for step in range(3 * phase, 3 * phase + 3):
                plain(model, optimizer, step, None)
            overlapped.append(getattr(optimizer, "stats", None) and optimizer.stats.early_buckets)
            for module in more:
                module.requires_grad_(True)
        ends.append(vector(net))
    return [float((ends[0] - ends[1]).abs().max()), overlapped[-1]]


def both(rank: int) -> list:
    return [adapters(rank, 8), adapters(rank, 64), unfrozen_in_turn(rank)]


def test_adapters_and_layers_unfrozen_in_turn():
    for small, large, in_turn in run_ranks(both, 2):
        dense, sent, kept, unmoved, distance = small
        assert dense == 4 * 4 * 2 * 8 * 96  # bytes of DDP
        assert sent < 1.1 * dense  # matrices below 4096 elements are averaged as they are; a few control words
        assert kept < 1.1 * dense / 4 + 100
        assert unmoved and distance == 0
        dense, sent, _, unmoved, distance = large
        assert dense == 4 * 4 * 2 * 64 * 96 and sent < 0.25 * dense
        assert unmoved and distance == 0
        assert in_turn[0] < 1e-9 and in_turn[1] > 0
