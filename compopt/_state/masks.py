"""Masks as bits, as positions, and as they cross the network.

A bucket's mask is one bit an element of its compressed tensors, whole bytes a tensor, one tensor
after the other. The ranks own equal ranges of these bytes, and the ranges are gathered. A range
travels as bits, or coded where that is smaller: after Elias and Fano, a position's low bits as they
are and its high bits as gaps in unary, about log2(e / density) bits a selected element, whose size
is known before anything is selected."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 8  # bytes: ranges begin at whole words of 64 bits
# times a word of 8 booleans: their bits, the first lowest, in the highest byte
GATHER_BITS = 0x0102040810204080
SPREAD_BYTE, ONE_BIT_EACH = (
    0x0101010101010101,
    -0x7FBFDFEFF7FBFDFF,
)  # a byte in all 8; bit i of byte i (0x8040...01)


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened tensor, of which about ``wanted`` are selected.

    ``at`` is where they begin among the flags of their rank's range. More than ``most`` are never
    selected."""

    tensor: int
    start: int
    stop: int
    at: int
    wanted: int
    most: int


class Part(NamedTuple):
    """What one rank selects: its range of the mask's bytes, and the pieces of tensors in it,
    ``most`` elements in all.

    ``low`` is how many low bits of a position its code keeps apart; None where bits are smaller
    than any code."""

    first: int
    last: int
    pieces: tuple[Piece, ...]
    most: int
    low: int | None


class Deal(NamedTuple):
    """Who selects what.

    ``coded``: the ranges travel as codes; ``length``: bytes of every rank's message.
    """

    parts: tuple[Part, ...]
    coded: bool
    length: int


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
    if (
        item.numel() * 4 > words.numel() * 3
    ):  # dense: the search below would go through most words many times
        return flags_of(bits).nonzero().view(-1)
    left, counts, found = words.index_select(0, item), torch.zeros_like(item), []
    base, alive = item << 6, torch.arange(item.numel(), dtype=torch.int64, device=bits.device)
    while left.numel():  # the lowest bit of every word, then the next of those that have more
        lowest = torch.neg(left).bitwise_and_(left)
        place = (
            (lowest.double().view(torch.int64) >> 52).bitwise_and_(0x7FF).add_(base)
        )  # its exponent, plus 1023
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


def set_bits_(bits: Tensor, positions: Tensor) -> None:
    """Exactly the bits at ``positions``."""
    one = torch.ones((), dtype=torch.uint8, device=bits.device)
    bits.zero_().index_add_(0, positions >> 3, one << (positions & 7).to(torch.uint8))


def count_shared(bits: Tensor, positions: Tensor) -> Tensor:
    """How many of the bits at ``positions`` are set."""
    shifts = (positions & 7).to(torch.uint8)
    return (bits.index_select(0, positions >> 3).bitwise_right_shift_(shifts) & 1).sum()


# On the wire


def make_deal(ranges: list[tuple[int, int, tuple[Piece, ...]]]) -> Deal:
    """How these ranges of bytes, one a rank, travel.

    One rank has nobody to send to, and keeps its bits.
    """
    parts = []
    for first, last, pieces in ranges:
        n, k = 8 * (last - first), sum(piece.most for piece in pieces)
        best = min(range(1, 24), key=lambda low: _code_bits(n, k, low))
        parts.append(Part(first, last, pieces, k, best if _code_bits(n, k, best) < n else None))
    coded = len(parts) > 1 and all(part.low is not None for part in parts)
    lengths = [
        _code_bits(8 * (p.last - p.first), p.most, p.low) // 8 if coded else p.last - p.first
        for p in parts
    ]
    return Deal(tuple(parts), coded, max(lengths))


def _code_bits(n: int, k: int, low: int) -> int:
    """Bits of the code of at most k among n positions: high bits in unary, then a row for each low
    bit.
    """
    return _upper(n, k, low) + low * _whole(k)


def _upper(n: int, k: int, low: int) -> int:
    return _whole((n >> low) + k + 1)


def _whole(n: int) -> int:
    return n + -n % 8


def code_of(part: Part) -> tuple[int, int, int]:
    """How a range is coded: bits of the run of high bits, bits of a row of low bits, and how many
    rows.
    """
    return _upper(8 * (part.last - part.first), part.most, part.low), _whole(part.most), part.low


def encode(positions: Tensor, bits: Tensor, deal: Deal, rank: int) -> Tensor:
    """This rank's message, from the positions and bits of its range."""
    code = _code(positions, deal.parts[rank]) if deal.coded else bits
    return torch.nn.functional.pad(code, (0, deal.length - code.numel()))


def _code(position: Tensor, part: Part) -> Tensor:
    k, device = position.numel(), position.device
    upper = torch.zeros(
        _upper(8 * (part.last - part.first), part.most, part.low), dtype=torch.bool, device=device
    )
    upper[(position >> part.low).add_(torch.arange(k, dtype=torch.int64, device=device))] = True
    rows = torch.zeros(part.low, _whole(part.most), dtype=torch.bool, device=device)
    for n, row in enumerate(rows):
        row[:k] = (position >> n) & 1
    return bits_of(torch.cat([upper, rows.view(-1)]))


def decode(message: Tensor, part: Part) -> Tensor:
    """The positions in a coded range, ascending, int64."""
    upper, k = _upper(8 * (part.last - part.first), part.most, part.low) // 8, _whole(part.most)
    position = positions_of(message[:upper])
    position.sub_(
        torch.arange(position.numel(), dtype=torch.int64, device=message.device)
    ).bitwise_left_shift_(part.low)
    rows = flags_of(message[upper : upper + part.low * k // 8]).view(part.low, k)[
        :, : position.numel()
    ]
    for n, row in enumerate(rows):
        position.add_(row, alpha=1 << n)
    return position


def assemble(messages: Tensor, deal: Deal, rank: int, own: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' messages as the bucket's mask, and its positions among the mask's bits, ascending,
    int64.

    ``own``: the positions in this rank's own range, which it knows.
    """
    read = (
        decode
        if deal.coded
        else lambda message, part: positions_of(message[: part.last - part.first])
    )
    pairs = enumerate(zip(messages, deal.parts, strict=True))
    found = [
        (own if r == rank else read(message, part)) + 8 * part.first for r, (message, part) in pairs
    ]
    positions = torch.cat(found) if len(found) > 1 else found[0]
    if not deal.coded:
        return torch.cat(
            [m[: p.last - p.first] for m, p in zip(messages, deal.parts, strict=True)]
        ), positions
    bits = messages.new_empty(deal.parts[-1].last)
    set_bits_(bits, positions)
    return bits, positions


def per_tensor(positions: Tensor, lengths: tuple[int, ...]) -> list[Tensor | None]:
    """The positions within each tensor, int32 where that holds them; None for tensors of length 0
    (not compressed).
    """
    offsets = offsets_of(lengths)
    dtype = torch.int32 if max(lengths) < 2**31 else torch.int64
    cuts = torch.searchsorted(
        positions, 8 * torch.tensor(offsets, dtype=torch.int64, device=positions.device)
    ).tolist()
    local = torch.empty(positions.numel(), dtype=dtype, device=positions.device)
    for offset, a, b in zip(offsets, cuts, cuts[1:], strict=False):
        local[a:b] = positions[a:b] - 8 * offset
    return [local[a:b] if n else None for n, a, b in zip(lengths, cuts, cuts[1:], strict=False)]
