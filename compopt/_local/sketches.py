"""Sketches of the ranks' pseudo-gradients, whose inner products estimate those of the vectors.

They are the sketches of Alon, Matias and Szegedy (1996): every element gets a random sign, the same
on all ranks, and is added to one of SKETCH / ranks sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from .._wire.quantization import noise_offset

SKETCH = 4096  # numbers of all ranks together
BLOCK = 2**20  # elements at a time


def sketch_size(ranks: int) -> int:
    """Return the numbers in a rank's sketch, a power of 2; none without other ranks."""
    return 0 if ranks == 1 else max(64, 2 ** int(math.log2(SKETCH / ranks)))


def make_sketch(
    tensors: Iterable[tuple[Tensor, float]], ranks: int, seed: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the sketch of a vector that is given as tensors, each with a factor."""
    size = sketch_size(ranks)
    sums = torch.zeros(size, dtype=torch.float32, device=device)
    if not size:
        return sums
    for number, block in enumerate(_cut_blocks(tensors)):
        at = noise_offset((*seed, number))
        signed = block.to(device) * _random_signs(device)[at : at + len(block)]
        sums += torch.nn.functional.pad(signed, (0, -len(signed) % size)).view(-1, size).sum(0)
    return sums


def _cut_blocks(tensors: Iterable[tuple[Tensor, float]]) -> Iterator[Tensor]:
    """Yield the vector in copies of at most BLOCK elements."""
    pieces: list[Tensor] = []
    length = 0
    for tensor, factor in tensors:
        for piece in tensor.reshape(-1).split(BLOCK):
            if pieces and length + len(piece) > BLOCK:
                yield torch.cat(pieces)
                pieces, length = [], 0
            pieces.append(piece.float() if factor == 1 else piece.float() * factor)
            length += len(piece)
    if pieces:
        yield torch.cat(pieces)


@lru_cache(maxsize=4)
def _random_signs(device: torch.device) -> Tensor:
    """Return 1 and -1 in a random order, for a block at any offset."""
    generator, size = torch.Generator().manual_seed(0), (2 * BLOCK,)
    drawn = torch.randint(2, size, generator=generator, dtype=torch.int8, device="cpu")
    return drawn.mul_(2).sub_(1).to(device)


def sum_of_products(lengths: Tensor, sketches: Tensor) -> float:
    """Return the squared norm of the sum of vectors, from their ``lengths`` and their ``sketches``,
    one in each row. It is exact if all vectors have one direction.
    """
    rows = sketches.double()
    scales = lengths / rows.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return float((scales @ rows).square().sum())
