"""The model every benchmark times: a GPT of 10 M parameters over bytes, and batches of real text for it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in (batch, context), mean cross-entropy against `targets` of the same shape out."""

    def __init__(self, layers: int = 8, width: int = 320, heads: int = 5, context: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_model(seed: int = 0, small: bool = False) -> GPT:
    """The 10 M parameter model, or one of 0.14 M, with the same initial values on every rank."""
    torch.manual_seed(seed)
    return GPT(2, 64, 2) if small else GPT()


class Batches:
    """Endless (tokens, targets) of shape (batch, context), int64, from Python source text; each rank draws its own."""

    def __init__(self, rank: int, batch: int = 8, context: int = 64) -> None:
        text = Path(argparse.__file__).read_bytes()  # 100 kB that every Python brings
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.random = torch.Generator().manual_seed(rank)
        self.shape = (batch, context)

    def next(self) -> tuple[Tensor, Tensor]:
        batch, context = self.shape
        starts = torch.randint(len(self.text) - context - 1, (batch, 1), generator=self.random)
        windows = self.text[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]
