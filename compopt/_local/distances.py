"""Distances between the ranks' pseudo-gradients, estimated from 16 KB of all ranks together.

Every rank sends the signs of random projections of its pseudo-gradient, the same projections on all
ranks. The angle between two vectors, as a share of a half turn, is the expected share of signs in
which they differ: 65,536 signs give a cosine to about .01.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .._state.bits import pack_bits, unpack_bits
from .._wire.quantization import NOISE_TABLE, noise_offset

SIGNS = 131072  # of all ranks together
BLOCK = 2**20  # elements that are projected at a time


def count_signs(ranks: int) -> int:
    """Return how many signs a rank sends, a power of 2; none without other ranks."""
    return 0 if ranks == 1 else 2 ** int(math.log2(SIGNS / ranks))


def project_signs(vector: Sequence[Tensor], ranks: int, seed: int, device: torch.device) -> Tensor:
    """Return the signs of random projections of a vector, which is given in parts, as bits.

    Every element gets a random sign, and is added to one of as many sums as there are projections.
    A Hadamard transform, random signs, and another transform give every projection a share of every
    element, of about normal distribution, whatever the vector is like.
    """
    count = count_signs(ranks)
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    sums, signs = torch.zeros(count, dtype=torch.float32, device=device), _random_signs(device)
    for number, block in enumerate(_cut_blocks(vector, count)):
        place = noise_offset((seed, number))
        signed = block.to(device).mul_(signs[place : place + len(block)])
        sums += signed.view(-1, count).sum(0)
    # the Hadamard transform of 2^k numbers: two products with them as a matrix
    rows = 2 ** (int(math.log2(count)) // 2)
    left, right = _hadamard(rows, device), _hadamard(count // rows, device)
    for place in (0, count):
        matrix = (sums * signs[place : place + count]).view(rows, -1)
        sums = (left @ matrix @ right).view(-1)
    return pack_bits(sums >= 0)


def _cut_blocks(vector: Sequence[Tensor], count: int) -> Iterator[Tensor]:
    """Yield the vector, in copies of at most BLOCK elements, each padded to a multiple of
    ``count``.
    """
    pieces = [piece for part in vector for piece in part.reshape(-1).split(BLOCK)]
    while pieces:
        end, size = 0, 0
        while end < len(pieces) and size + len(pieces[end]) <= BLOCK:
            size += len(pieces[end])
            end += 1
        padding = pieces[0].new_zeros(-size % count)
        yield torch.cat([piece.float() for piece in (*pieces[:end], padding)])
        pieces = pieces[end:]


@lru_cache(maxsize=4)
def _random_signs(device: torch.device) -> Tensor:
    """Return 1 and -1 in a random order, as many as a block has from any place on."""
    generator, size = torch.Generator().manual_seed(0), (BLOCK + NOISE_TABLE,)
    drawn = torch.randint(2, size, generator=generator, dtype=torch.int64)
    return drawn.mul_(2).sub_(1).float().to(device)


@lru_cache(maxsize=8)
def _hadamard(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32)
    while len(matrix) < size:
        matrix = torch.kron(step, matrix)
    return matrix.to(device)


def estimate_products(squared: Tensor, bits: Tensor) -> tuple[float, float]:
    """Return the mean squared norm of vectors, and the mean inner product of two of them, from the
    squared norm of each and, in a row each, its signs.
    """
    signs = unpack_bits(bits).double().mul_(2).sub_(1)
    norms, pairs = squared.sqrt(), len(squared) * (len(squared) - 1)
    cosines = torch.sin(math.pi / 2 * (signs @ signs.T) / max(1, signs.shape[1]))
    products = torch.outer(norms, norms) * cosines
    of_pairs = float(products.sum() - products.diagonal().sum())
    return float(squared.mean()), of_pairs / max(1, pairs)


def cosine_and_spread(squared: float, product: float, ranks: int) -> tuple[float, float]:
    """Return both for pseudo-gradients of this mean squared norm and mean inner product."""
    mean = max(0.0, squared + (ranks - 1) * product) / ranks  # the squared norm of their mean
    spread = math.sqrt(max(0.0, squared - mean) / mean) if mean else math.inf
    return product / squared, spread
