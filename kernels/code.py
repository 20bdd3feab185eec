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

from ._blocks import Blocks, Table, inlined, own_block, rank, read, selected
from .positions import count

BITS = tl.constexpr(1)


@inlined
def _set_bit(words, place, which):
    bit = (tl.full(place.shape, 1, tl.int32) << (place & 31).to(tl.int32)).to(tl.int32)
    tl.atomic_or(words + (place >> 5), bit, mask=which, sem="relaxed")


class EncodeRow(NamedTuple):
    """One packed mask of ``n`` bits, whole bytes, and how it is coded.

    ``first``: the bit of the words where its message begins. ``upper``: bits of the run of high
    bits. ``row_bits``: bits of each row of low bits, at least as many as there are positions; like
    ``upper`` a multiple of 8. ``low``: how many low bits of a position its code keeps apart.
    """

    n: int
    bits: Tensor
    first: int
    upper: int
    row_bits: int
    low: int


ENCODE_FIELDS = tl.constexpr(len(EncodeRow._fields))
ENCODE_FIRST, ENCODE_UPPER, ENCODE_ROW, ENCODE_LOW = (tl.constexpr(f) for f in (2, 3, 4, 5))


@triton.jit
def _encode(where, table, starts, words, BLOCK: tl.constexpr):
    block, row, i, there = own_block(where, table, ENCODE_FIELDS, BLOCK)
    first, low = tl.load(row + ENCODE_FIRST), tl.load(row + ENCODE_LOW)
    rows, row_bits = first + tl.load(row + ENCODE_UPPER), tl.load(row + ENCODE_ROW)
    chosen = selected(row, BITS, i, there)
    j, ours = rank(chosen, starts, block), chosen == 1
    _set_bit(words, first + (i >> low) + j, ours)
    for n in range(low):
        _set_bit(words, rows + n * row_bits + j, ours & (((i >> n) & 1) == 1))


class CodeRow(NamedTuple):
    """One coded range: ``upper`` bits of the run of high bits, at the begin of ``message``; then
    rows of low bits.

    ``first``: the bit of the words that the range begins with. ``row_bits`` and ``low`` as for
    ``EncodeRow``.
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


def encode_table(rows: Sequence[EncodeRow], device: torch.device) -> Table:
    """These rows, for ``encode``."""
    return Table(rows, device, FIELDS=len(EncodeRow._fields))


def encode(blocks: Blocks, rows: Sequence[EncodeRow] | Table, words: Tensor) -> None:
    """Write the codes of the set bits to ``words``, messages as int32 of zeros.

    ``blocks``: over the rows' ``n``.
    """
    table = rows if isinstance(rows, Table) else encode_table(rows, words.device)
    blocks.run(_encode, table.under(), count(blocks, table), words)


def decode_table(rows: Sequence[CodeRow], device: torch.device) -> Table:
    """These rows, for ``decode``."""
    return Table(rows, device, FIELDS=len(CodeRow._fields))


def decode(blocks: Blocks, rows: Sequence[CodeRow] | Table, words: Tensor) -> None:
    """Set the bits that the messages code in ``words``, packed masks as int32 of zeros.

    ``blocks``: over the rows' ``upper``.
    """
    table = rows if isinstance(rows, Table) else decode_table(rows, words.device)
    blocks.run(_decode, table.under(), count(blocks, table), words)
