"""Positions of a packed mask's bits. Reference: ``math.positions``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import TYPES, Blocks, Table, own_block, rank, selected, table, write

BITS, OUT, SIZE = (tl.constexpr(f) for f in (1, 2, 3))


@triton.jit
def _count(where, table, counts, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK)
    tl.store(counts + block, tl.sum(selected(row, BITS, i, there), 0))


@triton.jit
def _positions(where, table, starts, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, there = own_block(where, table, 4, BLOCK)
    chosen = selected(row, BITS, i, there)
    at = rank(chosen, starts, block)
    write(row, OUT, at, (chosen == 1) & (at < tl.load(row + SIZE)), i, TYPE)


def count_table(blocks: Blocks, bits: Sequence[Tensor | None]) -> Table:
    """These masks, for ``count``."""
    return Table(zip(blocks.lengths, bits, strict=True), blocks.where.device, FIELDS=2)


def count(blocks: Blocks, bits: Sequence[Tensor | None] | Table) -> Tensor:
    """For each block the number of its tensor's elements selected before it, int64.

    ``bits``: a packed mask for each tensor; None: all its elements are selected. Or a table of rows
    that have these in their second field.
    """
    table = bits if isinstance(bits, Table) else count_table(blocks, bits)
    counts = torch.empty(blocks.count, dtype=torch.int32, device=table.device)
    blocks.run(_count, table.under(), counts, FIELDS=table.constants["FIELDS"])
    return blocks.starts(counts)


def positions(
    blocks: Blocks, bits: Sequence[Tensor], starts: Tensor, sizes: Sequence[int]
) -> list[Tensor]:
    """The selected positions of each tensor, ascending: int32, int64 where any tensor needs it.

    ``starts``: what ``count`` returned. ``sizes``: how many there are; known beforehand, so that
    nobody waits. No more than these are written.
    """
    device = blocks.where.device
    dtype = torch.int32 if max(blocks.lengths, default=0) < 2**31 else torch.int64
    found = list(torch.empty(sum(sizes), dtype=dtype, device=device).split(list(sizes)))
    rows = table(list(zip(blocks.lengths, bits, found, sizes, strict=True)), device)
    blocks.run(_positions, rows, starts, TYPE=TYPES[dtype])
    return found
