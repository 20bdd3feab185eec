"""Sketches of the ranks' pseudo-gradients, whose inner products estimate those of the vectors.

They are the sketches of Alon, Matias and Szegedy (1996): every element gets a random sign, the same
on all ranks, and is added to one of SKETCH / ranks sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    for number, (tensor, factor) in enumerate(tensors if size else ()):
        for place, block in enumerate(tensor.reshape(-1).split(BLOCK)):
            at = noise_offset((*seed, number, place))
            signed = block.to(device, torch.float32) * _random_signs(device)[at : at + len(block)]
            padded = torch.nn.functional.pad(signed, (0, -len(signed) % size))
            sums.add_(padded.view(-1, size).sum(0), alpha=factor)
    return sums


@lru_cache(maxsize=4)
def _random_signs(device: torch.device) -> Tensor:
    """Return 1 and -1 in a random order, for a block at any offset."""
    generator, size = torch.Generator().manual_seed(0), (2 * BLOCK,)
    drawn = torch.randint(2, size, generator=generator, dtype=torch.int8)
    return drawn.mul_(2).sub_(1).to(device)


def sum_of_products(lengths: Tensor, sketches: Tensor) -> float:
    """Return the squared norm of the sum of vectors, of which these are the lengths and, in a row
    each, the sketches. Vectors of one direction add up exactly.
    """
    rows = sketches.double()
    scales = lengths / rows.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return float((scales @ rows).square().sum())
