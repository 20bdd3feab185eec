"""A code of a few elements of some gradients: ranks compare it, to see whether theirs are the same
to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._state.devices import pinned
from .._state.tensors import upload

SAMPLE = 512  # elements of a gradient, at most
BITS = 16  # by accident ranks agree on them once in 65,536 steps, which costs a handshake
WORDS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NOTHING = [0.0] * 2 * BITS + [1.0]  # said where there is nothing to compare
# odd, its bits like drawn ones: low bits of a sum reach high ones
SPREAD = 0x9E3779B97F4A7C15 - 2**64


def code(gs: Sequence[Tensor]) -> Tensor:
    """Bits of a code of some elements of each, then their complements, then 1 where there is
    nothing to compare.

    Zeros only, or a number that is not finite, are nothing: those may well be alike on ranks of
    different data.
    """
    some = torch.cat([g.reshape(-1)[:: stride(g)][:SAMPLE] for g in gs])
    fixed = fixed_of(some.numel(), some.device)
    numbers = some.view(WORDS_OF[some.element_size()])
    total = (numbers * fixed.factors).sum(dtype=torch.int64)
    most = torch.linalg.vector_norm(some, float("inf"))
    telling = (most > 0).logical_and_(most < float("inf"))
    said = (total >> fixed.shifts).bitwise_and_(fixed.ones).bitwise_xor_(fixed.flips)
    return torch.where(telling, said, fixed.nothing)


def stride(g: Tensor) -> int:
    """From one element that is looked at to the next."""
    return max(1, g.numel() // SAMPLE)


def looked_at(g: Tensor) -> int:
    """How many elements are."""
    return min(SAMPLE, -(-g.numel() // stride(g)))


class Fixed(NamedTuple):
    """What a code of so many elements is made with, on their device."""

    factors: Tensor  # an odd one for every place, times SPREAD
    shifts: Tensor  # to bring each of the highest bits of a code down, twice
    ones: Tensor  # 1 for each of these, 0 for the last word
    flips: Tensor  # 1 for their complements
    nothing: Tensor


@lru_cache(maxsize=64)
def fixed_of(count: int, device: torch.device) -> Fixed:
    """The same tensors for the same: no step makes them anew."""
    odd = torch.arange(1, 2 * count, 2, dtype=torch.int64, device="cpu").mul_(SPREAD)
    shifts: list[float] = [*range(64 - BITS, 64)] * 2
    return Fixed(
        pinned(odd, device).to(device, non_blocking=True),
        upload([*shifts, 0], torch.int64, device),
        upload([1.0] * 2 * BITS + [0.0], torch.int64, device),
        upload([0.0] * BITS + [1.0] * BITS + [0.0], torch.int64, device),
        upload(NOTHING, torch.float32, device),
    )
