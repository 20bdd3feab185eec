"""Bits: flags packed eight to a byte, the first in the lowest bit; positions of set bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

# Bytes: ranges of ranks begin at whole words of 64 bits.
WORD = 8
# A word of 8 booleans times this has their bits, the first lowest, in its highest byte.
GATHER_BITS = 0x0102040810204080
# A byte times this is that byte in all 8 of a word.
SPREAD_BYTE = 0x0101010101010101
# Bit i of byte i: 0x8040...01.
ONE_BIT_EACH = -0x7FBFDFEFF7FBFDFF


def positions_dtype(lengths: Sequence[int]) -> torch.dtype:
    """Return the dtype of positions in tensors of these lengths."""
    return torch.int32 if max(lengths) < 2**31 else torch.int64


def byte_offsets(lengths: tuple[int, ...]) -> list[int]:
    """Return the offset of each tensor's bytes in the bucket's mask, and the total."""
    return [0, *accumulate((n + 7) // 8 for n in lengths)]


def split_bytes(total: int, ranks: int) -> list[int]:
    """Return the offset of each rank's range of ``total`` bytes of mask, and the total."""
    return [total * rank // ranks // WORD * WORD for rank in range(ranks)] + [total]


# Bits, flags, positions


def pack_bits(flags: Tensor) -> Tensor:
    """Pack 8 m booleans into m bytes, the first in the lowest bit. Overwrites ``flags``."""
    return flags.view(torch.int64).mul_(GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Unpack m bytes into 8 m booleans."""
    return bits.long().mul_(SPREAD_BYTE).bitwise_and_(ONE_BIT_EACH).view(torch.uint8).bool()


def find_positions(bits: Tensor) -> Tensor:
    """Return the positions of all set bits, ascending, int64."""
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % WORD)).view(torch.int64)
    indices = words.nonzero().view(-1)
    # If most words have set bits, the search below would visit most of them many times.
    if indices.numel() * 4 > words.numel() * 3:
        return unpack_bits(bits).nonzero().view(-1)
    left, counts, results = words.index_select(0, indices), torch.zeros_like(indices), []
    base = indices << 6
    owners = torch.arange(indices.numel(), dtype=torch.int64, device=bits.device)
    while left.numel():  # the lowest bit of every word, then the next bit of the remaining words
        lowest = torch.neg(left).bitwise_and_(left)
        # Its exponent as a floating-point number, plus 1023.
        exponent = (lowest.double().view(torch.int64) >> 52).bitwise_and_(0x7FF).add_(base)
        results.append((owners, exponent))
        counts.scatter_(0, owners, torch.full_like(owners, len(results)))
        left = left.bitwise_xor_(lowest)
        unfinished = left.nonzero().view(-1)
        left, base, owners = (t.index_select(0, unfinished) for t in (left, base, owners))
    starts = counts.cumsum(0).sub_(counts)
    out = indices.new_empty(sum(exponent.numel() for _, exponent in results))
    for n, (owners, exponent) in enumerate(results):
        out.scatter_(0, starts.index_select(0, owners).add_(n), exponent)
    return out.sub_(1023)


def set_bits_(bits: Tensor, positions: Tensor, flags: Tensor | None = None) -> None:
    """Set the bits at ``positions``, where ``flags`` are true, and clear all others."""
    one = torch.ones((), dtype=torch.uint8, device=bits.device) if flags is None else flags.byte()
    bits.zero_().index_add_(0, positions >> 3, one << (positions & 7).to(torch.uint8))


def set_all_bits_(bits: Tensor, n: int) -> None:
    """Set the first n bits, and clear those that follow in the last byte."""
    bits.fill_(255)
    if n % 8:
        bits[-1] = (1 << n % 8) - 1


def make_bits(positions: Tensor, size: int, flags: Tensor | None = None) -> Tensor:
    """Return ``size`` bytes with the bits at these positions set, where ``flags``."""
    bits = torch.empty(size, dtype=torch.uint8, device=positions.device)
    set_bits_(bits, positions, flags)
    return bits


def count_set_bits(bits: Tensor, positions: Tensor) -> Tensor:
    """Count the set bits at ``positions``."""
    shifts = (positions & 7).to(torch.uint8)
    return bits.index_select(0, positions >> 3).bitwise_right_shift_(shifts).bitwise_and_(1).sum()


def split_positions(positions: Tensor, lengths: tuple[int, ...]) -> list[Tensor | None]:
    """Split positions in a bucket's mask by tensor, relative to the tensor's first bit.

    They are int32 where that is wide enough; None for tensors of length 0 (not compressed).
    """
    offsets = byte_offsets(lengths)
    dtype = positions_dtype(lengths)
    cuts = torch.searchsorted(
        positions, 8 * torch.tensor(offsets, dtype=torch.int64, device=positions.device)
    ).tolist()
    local = torch.empty(positions.numel(), dtype=dtype, device=positions.device)
    for offset, a, b in zip(offsets, cuts, cuts[1:], strict=False):
        local[a:b] = positions[a:b] - 8 * offset
    return [local[a:b] if n else None for n, a, b in zip(lengths, cuts, cuts[1:], strict=False)]
