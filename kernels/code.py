"""Masks as codes on the wire (Elias and Fano). References: ``masks.encode``, ``masks.decode``.

Of the j-th selected position the high bits are one set bit, at their value plus j, in a first run
of bits; each of its ``low`` low bits is the j-th bit of a row of its own. Bits are set by atomic OR
into words that were zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import cut, inlined, own_block, rank, read, selected, table
from .positions import count

BITS = tl.constexpr(1)


@inlined
def _set_bit(words, place, which):
    bit = (tl.full(place.shape, 1, tl.int32) << (place & 31).to(tl.int32)).to(tl.int32)
    tl.atomic_or(words + (place >> 5), bit, mask=which, sem="relaxed")


@triton.jit
def _encode(where, table, starts, words, upper, row_bits, LOW: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, there = own_block(where, table, 2, BLOCK)
    chosen = selected(row, BITS, i, there)
    j, ours = rank(chosen, starts, block), chosen == 1
    _set_bit(words, (i >> LOW) + j, ours)
    for n in range(LOW):
        _set_bit(words, upper + n * row_bits + j, ours & (((i >> n) & 1) == 1))


class CodeRow(NamedTuple):
    """One coded range: ``upper`` bits of the run of high bits, at the begin of ``message``; then
    rows of low bits.

    ``first``: the bit of the mask that the range begins with. ``row_bits`` and ``low`` as for
    ``encode``.
    """

    upper: int
    message: Tensor
    first: int
    row_bits: int
    low: int


FIELDS, FIRST, ROW_BITS, LOW_BITS = (tl.constexpr(f) for f in (len(CodeRow._fields), 2, 3, 4))


@triton.jit
def _decode(where, table, starts, words, BLOCK: tl.constexpr):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK)
    upper, row_bits, low = tl.load(row), tl.load(row + ROW_BITS), tl.load(row + LOW_BITS)
    chosen = selected(row, BITS, i, there)
    j, ours = rank(chosen, starts, block), chosen == 1
    position = (i - j) << low
    for n in range(low):
        at = upper + n * row_bits + j
        byte = read(row, BITS, at >> 3, ours, tl.uint8).to(tl.int64)
        position += ((byte >> (at & 7)) & 1) << n
    _set_bit(words, tl.load(row + FIRST) + position, ours)


def encode(
    bits: Tensor, length: int, upper: int, row_bits: int, low: int, block: int | None = None
) -> Tensor:
    """The code of the set bits, ``length`` bytes.

    Args:
        bits: a packed mask.
        length: bytes of the message; what the code leaves of it is 0.
        upper: bits of the run of high bits; a multiple of 8.
        row_bits: bits of each row of low bits, at least as many as there are positions; a multiple
            of 8.
        low: how many low bits of a position its code keeps apart.
    """
    blocks = cut((8 * bits.numel(),), bits.device, block)
    words = torch.zeros((length + 3) // 4, dtype=torch.int32, device=bits.device)
    rows = table([[8 * bits.numel(), bits]], bits.device)
    blocks.run(_encode, rows, count(blocks, [bits]), words, upper, row_bits, LOW=low)
    return words.view(torch.uint8)[:length]


def decode(rows: Sequence[CodeRow], words: Tensor, block: int | None = None) -> None:
    """Set the bits that the messages code in ``words``, a packed mask as int32 of zeros."""
    device = words.device
    blocks = cut(tuple(row.upper for row in rows), device, block)
    starts = count(blocks, [row.message for row in rows])
    blocks.run(_decode, table(rows, device), starts, words)
