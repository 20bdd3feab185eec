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

from .._state.tensors import upload
from .._wire.quantization import NOISE_TABLE, noise_offset

SKETCH = 4096  # numbers of all ranks together
BLOCK = 2**17  # elements, which stay in a core's cache
DEVICE_BLOCKS = 512  # at a time, where every operator is a launch


def sketch_size(ranks: int) -> int:
    """Return the numbers in a rank's sketch, a power of 2; none without other ranks."""
    return 0 if ranks == 1 else max(64, 2 ** int(math.log2(SKETCH / ranks)))


def make_sketch(
    vectors: Iterable[tuple[Tensor, float]], ranks: int, seed: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the sketch of a vector that is given as several, each with a factor."""
    size, number = sketch_size(ranks), 0
    sums = torch.zeros(size, dtype=torch.float32, device=device)
    if not size:
        return sums
    for vector, factor in vectors:
        blocks = 1 if vector.device.type == "cpu" else DEVICE_BLOCKS
        for part in vector.split(blocks * BLOCK):
            count = -(-len(part) // BLOCK)
            offsets = [noise_offset((*seed, number + i)) for i in range(count)]
            signed = part.float() * _signs_at(offsets, part.device)[: len(part)]
            rest = -len(part) % size
            padded = torch.nn.functional.pad(signed, (0, rest)) if rest else signed
            sums.add_(padded.view(-1, size).sum(0).to(device), alpha=factor)
            number += count
    return sums


def _signs_at(offsets: list[int], device: torch.device) -> Tensor:
    """Return the signs of blocks, which enter the table at ``offsets``."""
    table = _random_signs(device)
    if len(offsets) == 1:
        return table[offsets[0] : offsets[0] + BLOCK]
    index = upload(offsets, torch.int64, device)
    return table.unfold(0, BLOCK, 1).index_select(0, index).view(-1)


@lru_cache(maxsize=4)
def _random_signs(device: torch.device) -> Tensor:
    """Return 1 and -1 in a random order, for a block at any offset."""
    generator, size = torch.Generator().manual_seed(0), (BLOCK + NOISE_TABLE,)
    drawn = torch.randint(2, size, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.mul_(2).sub_(1).to(device)


def sum_of_products(lengths: Tensor, sketches: Tensor) -> float:
    """Return the squared norm of the sum of vectors, from their ``lengths`` and their ``sketches``,
    one in each row. It is exact if all vectors have one direction.
    """
    rows = sketches.double()
    scales = lengths / rows.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return float((scales @ rows).square().sum())
