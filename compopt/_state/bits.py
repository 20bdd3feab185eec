"""Bits: flags packed eight to a byte, the first in the lowest bit, and the positions selected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

WORD = 8  # bytes: ranges begin at whole words of 64 bits
# Times a word of 8 booleans: their bits, the first lowest, in the highest byte.
GATHER_BITS = 0x0102040810204080
# Times a byte: that byte in all 8 of a word.
SPREAD_BYTE = 0x0101010101010101
# Bit i of byte i: 0x8040...01.
ONE_BIT_EACH = -0x7FBFDFEFF7FBFDFF


def positions_dtype(lengths: Sequence[int]) -> torch.dtype:
    """Of positions in tensors of these lengths."""
    return torch.int32 if max(lengths) < 2**31 else torch.int64


def offsets_of(lengths: tuple[int, ...]) -> list[int]:
    """Where each tensor's bytes begin in the bucket's mask; at last, where they end."""
    return [0, *accumulate((n + 7) // 8 for n in lengths)]


def cut_bytes(total: int, ranks: int) -> list[int]:
    """Where each rank's range of ``total`` bytes of mask begins, and at last where they end."""
    return [total * rank // ranks // WORD * WORD for rank in range(ranks)] + [total]


# Bits, flags, positions


def bits_of(flags: Tensor) -> Tensor:
    """8 m booleans as m bytes, the first in the lowest bit. Overwrites ``flags``."""
    return flags.view(torch.int64).mul_(GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def flags_of(bits: Tensor) -> Tensor:
    """m bytes as 8 m booleans."""
    return bits.long().mul_(SPREAD_BYTE).bitwise_and_(ONE_BIT_EACH).view(torch.uint8).bool()


def positions_of(bits: Tensor) -> Tensor:
    """The positions of all set bits, ascending, int64."""
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % WORD)).view(torch.int64)
    item = words.nonzero().view(-1)
    # Dense: the search below would go through most words many times.
    if item.numel() * 4 > words.numel() * 3:
        return flags_of(bits).nonzero().view(-1)
    left, counts, found = words.index_select(0, item), torch.zeros_like(item), []
    base, alive = item << 6, torch.arange(item.numel(), dtype=torch.int64, device=bits.device)
    while left.numel():  # the lowest bit of every word, then the next of those that have more
        lowest = torch.neg(left).bitwise_and_(left)
        # Its exponent as a floating-point number, plus 1023.
        place = (lowest.double().view(torch.int64) >> 52).bitwise_and_(0x7FF).add_(base)
        found.append((alive, place))
        counts.scatter_(0, alive, torch.full_like(alive, len(found)))
        left = left.bitwise_xor_(lowest)
        more = left.nonzero().view(-1)
        left, base, alive = (t.index_select(0, more) for t in (left, base, alive))
    starts = counts.cumsum(0).sub_(counts)
    out = item.new_empty(sum(place.numel() for _, place in found))
    for n, (alive, place) in enumerate(found):
        out.scatter_(0, starts.index_select(0, alive).add_(n), place)
    return out.sub_(1023)


def set_bits_(bits: Tensor, positions: Tensor, wanted: Tensor | None = None) -> None:
    """Exactly the bits at ``positions``; with ``wanted``, booleans, only where these are true."""
    one = torch.ones((), dtype=torch.uint8, device=bits.device) if wanted is None else wanted.byte()
    bits.zero_().index_add_(0, positions >> 3, one << (positions & 7).to(torch.uint8))


def set_all_bits_(bits: Tensor, n: int) -> None:
    """Set the first n bits; those behind them, of the last byte, are 0."""
    bits.fill_(255)
    if n % 8:
        bits[-1] = (1 << n % 8) - 1


def bits_at(positions: Tensor, size: int, wanted: Tensor | None = None) -> Tensor:
    """``size`` bytes with the bits at these positions set, where ``wanted``."""
    bits = torch.empty(size, dtype=torch.uint8, device=positions.device)
    set_bits_(bits, positions, wanted)
    return bits


def count_shared(bits: Tensor, positions: Tensor) -> Tensor:
    """How many of the bits at ``positions`` are set."""
    return ones_at(bits, positions).sum()


def ones_at(bits: Tensor, positions: Tensor) -> Tensor:
    """The bits at ``positions``, 1 or 0 each, uint8."""
    shifts = (positions & 7).to(torch.uint8)
    return bits.index_select(0, positions >> 3).bitwise_right_shift_(shifts).bitwise_and_(1)


def per_tensor(positions: Tensor, lengths: tuple[int, ...]) -> list[Tensor | None]:
    """The positions within each tensor, int32 where that holds them; None for tensors of length 0
    (not compressed).
    """
    offsets = offsets_of(lengths)
    dtype = positions_dtype(lengths)
    cuts = torch.searchsorted(
        positions, 8 * torch.tensor(offsets, dtype=torch.int64, device=positions.device)
    ).tolist()
    local = torch.empty(positions.numel(), dtype=dtype, device=positions.device)
    for offset, a, b in zip(offsets, cuts, cuts[1:], strict=False):
        local[a:b] = positions[a:b] - 8 * offset
    return [local[a:b] if n else None for n, a, b in zip(lengths, cuts, cuts[1:], strict=False)]
