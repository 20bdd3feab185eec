"""Who selects what of a bucket's mask, and how what they select crosses the network.

The ranks own equal ranges of the mask's bytes, and the ranges are gathered. A range travels as
bits, or coded where that is smaller: after Elias and Fano, a position's low bits as they are and
its high bits as gaps in unary, about log2(e / density) bits a selected element, whose size is known
before anything is selected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .bits import bits_of, flags_of, positions_of, set_bits_


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened tensor, of which about ``wanted`` are selected.

    ``at`` is where they begin among the flags of their rank's range. More than ``most`` are never
    selected.
    """

    tensor: int
    start: int
    stop: int
    at: int
    wanted: int
    most: int


class Part(NamedTuple):
    """What one rank selects: its range of the mask's bytes, and the pieces of tensors in it,
    ``most`` elements in all.

    ``low`` is how many low bits of a position its code keeps apart; 0 where bits are smaller
    than any code.
    """

    first: int
    last: int
    pieces: tuple[Piece, ...]
    most: int
    low: int


class Deal(NamedTuple):
    """Who selects what.

    ``coded``: the ranges travel as codes; ``length``: bytes of every rank's message.
    """

    parts: tuple[Part, ...]
    coded: bool
    length: int


def make_deal(ranges: list[tuple[int, int, tuple[Piece, ...]]]) -> Deal:
    """How these ranges of bytes, one a rank, travel.

    One rank has nobody to send to, and keeps its bits.
    """
    parts = []
    for first, last, pieces in ranges:
        n, k = 8 * (last - first), sum(piece.most for piece in pieces)
        size, best = min((_code_bits(n, k, low), low) for low in range(1, 24))
        parts.append(Part(first, last, pieces, k, best if size < n else 0))
    coded = len(parts) > 1 and all(part.low for part in parts)
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
    read = decode if deal.coded else _uncoded
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


def _uncoded(message: Tensor, part: Part) -> Tensor:
    """The positions in a range that travels as bits, ascending, int64."""
    return positions_of(message[: part.last - part.first])
