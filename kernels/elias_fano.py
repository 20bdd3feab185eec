"""Elias-Fano codes of masks. References: ``encode_mask``, ``decode_positions`` of
``compopt/_state/masks.py``.

The high bits of the j-th selected position are one set bit, at their value plus j, in a first run
of bits; each of its ``low`` low bits is the j-th bit of its own row. Bits are set by atomic OR into
words that were zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import Blocks, Table, inlined, load_block, load_field, load_mask, selected_before
from .mask_bits import block_offsets

BITS = tl.constexpr(1)


@inlined
def _set_bit(words, place, which):
    bit = (tl.full(place.shape, 1, tl.int32) << (place & 31).to(tl.int32)).to(tl.int32)
    tl.atomic_or(words + (place >> 5), bit, mask=which, sem="relaxed")


class EncodeRow(NamedTuple):
    """One packed mask of ``n`` bits, whole bytes, and its code.

    ``first``: the bit of the words where its message begins. ``upper``: bits of the run of high
    bits. ``row_bits``: bits of each row of low bits, at least the number of positions; a multiple
    of 8, as ``upper``. ``low``: the number of low bits.
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
    block, row, i, in_range = load_block(where, table, ENCODE_FIELDS, BLOCK)
    first, low = tl.load(row + ENCODE_FIRST), tl.load(row + ENCODE_LOW)
    rows, row_bits = first + tl.load(row + ENCODE_UPPER), tl.load(row + ENCODE_ROW)
    chosen = load_mask(row, BITS, i, in_range)
    j, ours = selected_before(chosen, starts, block), chosen == 1
    _set_bit(words, first + (i >> low) + j, ours)
    for n in range(low):
        _set_bit(words, rows + n * row_bits + j, ours & (((i >> n) & 1) == 1))


class DecodeRow(NamedTuple):
    """One encoded range: ``upper`` bits of the run of high bits at the start of ``message``, then
    rows of low bits.

    ``first``: the bit of the words where the range begins. ``row_bits`` and ``low`` as for
    ``EncodeRow``.
    """

    upper: int
    message: Tensor
    first: int
    row_bits: int
    low: int


FIELDS, FIRST, ROW_BITS, LOW_BITS = (tl.constexpr(f) for f in (len(DecodeRow._fields), 2, 3, 4))


@triton.jit
def _decode(where, table, starts, words, BLOCK: tl.constexpr):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK)
    upper, row_bits, low = tl.load(row), tl.load(row + ROW_BITS), tl.load(row + LOW_BITS)
    chosen = load_mask(row, BITS, i, in_range)
    j, ours = selected_before(chosen, starts, block), chosen == 1
    position = (i - j) << low
    for n in range(low):
        at = upper + n * row_bits + j
        byte = load_field(row, BITS, at >> 3, ours, tl.uint8).to(tl.int64)
        position += ((byte >> (at & 7)) & 1) << n
    _set_bit(words, tl.load(row + FIRST) + position, ours)


def encode_table(rows: Sequence[EncodeRow], device: torch.device) -> Table:
    """Return a table of these rows, for ``encode_masks``."""
    return Table(rows, device, FIELDS=len(EncodeRow._fields))


def encode_masks(blocks: Blocks, rows: Sequence[EncodeRow] | Table, words: Tensor) -> None:
    """Write the codes of the set bits to ``words``, messages of int32 zeros.

    ``blocks``: over the rows' ``n``.
    """
    table = rows if isinstance(rows, Table) else encode_table(rows, words.device)
    blocks.launch(_encode, table.with_head(), block_offsets(blocks, table), words)


def decode_table(rows: Sequence[DecodeRow], device: torch.device) -> Table:
    """Return a table of these rows, for ``decode_masks``."""
    return Table(rows, device, FIELDS=len(DecodeRow._fields))


def decode_masks(blocks: Blocks, rows: Sequence[DecodeRow] | Table, words: Tensor) -> None:
    """Set the encoded bits in ``words``, packed masks of int32 zeros.

    ``blocks``: over the rows' ``upper``.
    """
    table = rows if isinstance(rows, Table) else decode_table(rows, words.device)
    blocks.launch(_decode, table.with_head(), block_offsets(blocks, table), words)
