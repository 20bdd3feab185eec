"""Packed masks: one bit an element, and how many are set before each block.

Reference: ``pack_bits`` of ``tests/support/oracles/kernels.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import BLOCK, Blocks, Table, inlined, load_block, load_mask, on

BITS = tl.constexpr(1)


@inlined
def to_bytes(flags, BLOCK: tl.constexpr):
    """Pack BLOCK numbers, 0 or 1, into BLOCK / 8 bytes, the first in the lowest bit."""
    eight = tl.reshape(flags.to(tl.int32), [BLOCK // 8, 8])
    return tl.sum(eight << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def _pack(mask, bits, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    flags = tl.load(mask + i, mask=i < n, other=0) != 0
    at = start // 8 + tl.arange(0, BLOCK // 8)
    tl.store(bits + at, to_bytes(flags, BLOCK), mask=at < (n + 7) // 8)


@triton.jit
def _count(where, table, counts, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK)
    tl.store(counts + block, tl.sum(load_mask(row, BITS, i, in_range), 0))


def pack_bits(mask: Tensor, block: int = BLOCK) -> Tensor:
    """Return n booleans as ceil(n/8) bytes, the first element in the lowest bit."""
    n = mask.numel()
    bits = torch.empty((n + 7) // 8, dtype=torch.uint8, device=mask.device)
    if n:
        flags = mask.reshape(-1).view(torch.uint8)
        with on(mask.device):
            _pack[(triton.cdiv(n, block),)](flags, bits, n, BLOCK=block)
    return bits


def block_offsets_table(blocks: Blocks, bits: Sequence[Tensor | None]) -> Table:
    """Return a table of these masks, for ``block_offsets``."""
    return Table(zip(blocks.lengths, bits, strict=True), blocks.where.device, FIELDS=2)


def block_offsets(blocks: Blocks, bits: Sequence[Tensor | None] | Table) -> Tensor:
    """Return for each block the number of its tensor's elements selected before it, int64.

    ``bits``: a packed mask for each tensor; None: all its elements are selected. Or a table whose
    rows have these in their second field.
    """
    table = bits if isinstance(bits, Table) else block_offsets_table(blocks, bits)
    counts = torch.empty(blocks.count, dtype=torch.int32, device=table.device)
    blocks.launch(_count, table.with_head(), counts, FIELDS=table.constants["FIELDS"])
    return blocks.prefix_sums(counts)
