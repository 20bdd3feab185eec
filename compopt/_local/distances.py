"""How far apart the pseudo-gradients of ranks are, from 8 KB or less of each.

Every rank sends the norm of its pseudo-gradient, and signs of random projections of it, the same on
all ranks: two vectors at an angle of a share h of a half turn differ in this share of the signs.
Over 16 KB of signs of all ranks a cosine is known to about .01, whatever else is sent of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .._state.masks import bits_of, flags_of
from .._wire.quantise import place_of

SIGNS = 131072  # of all ranks together
TERMS = 64  # of a projection, at least


def signs_of(vector: Sequence[Tensor], ranks: int, seed: int, device: torch.device) -> Tensor:
    """Bits: the signs of SIGNS / ranks projections of a vector, which is given in parts.

    Projection i is the sum of every element of which the place is i modulo their number, each times
    1 or -1. Of a short vector elements are in several projections, with other signs.
    """
    count = SIGNS // ranks // 8 * 8
    sums = torch.zeros(count, device=device)
    parts = [part.reshape(-1) for part in vector if part.numel()]
    size = sum(part.numel() for part in parts)
    if 0 < size < TERMS * count:
        parts = [torch.cat(parts).repeat(-(-TERMS * count // size))]
    at = 0
    for part in parts:
        for number, piece in enumerate(part.split(count)):
            place = place_of((seed, at, number))
            signed = piece.float() * random_signs(device)[place : place + len(piece)]
            start = at % count
            fits = min(len(piece), count - start)
            sums[start : start + fits] += signed[:fits]
            sums[: len(piece) - fits] += signed[fits:]
            at += len(piece)
    return bits_of(sums >= 0)


@lru_cache(maxsize=4)
def random_signs(device: torch.device) -> Tensor:
    """1 and -1: 65536 of them, twice, so that as many follow on any place."""
    drawn = torch.randint(2, (65536,), generator=torch.Generator().manual_seed(0))
    return drawn.mul_(2).sub_(1).float().repeat(2).to(device)


def inner_products(squared: Tensor, signs: Tensor) -> tuple[float, float]:
    """The mean squared norm of the vectors of all ranks, and the mean product of two of them, from
    their squared norms and, a row a rank, their signs.
    """
    ranks = len(squared)
    sides = torch.stack([flags_of(row) for row in signs]).double().mul_(2).sub_(1)
    norms = squared.sqrt()
    cosines = torch.sin(math.pi / 2 * (sides @ sides.T) / sides.shape[1])
    products = torch.outer(norms, norms) * cosines
    pairs = products.sum() - products.diagonal().sum()
    return float(squared.mean()), float(pairs) / max(1, ranks * (ranks - 1))


def distances(own: float, product: float, ranks: int) -> tuple[float, float]:
    """Cosine and spread, from what ``inner_products`` returns."""
    mean = max(0.0, (own + (ranks - 1) * product) / ranks)  # the squared norm of their mean
    spread = math.sqrt((own - mean) / mean) if 0 < mean < own else 0.0 if mean else math.inf
    return product / own, spread
