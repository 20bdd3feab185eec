"""Exactly the k elements of largest magnitude, as bits, without a host wait. Reference: ``top_k``
of ``tests/oracles/kernels.py``.

Radix selection: three passes read 11, 11 and 9 bits of |x| as a float32, from the top. Each counts
the elements in every bin and descends into the bin of the k-th. The result is the k-th magnitude
and how many equal elements are selected; these in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import (
    HEAD_,
    TYPES,
    Blocks,
    Table,
    inlined,
    load_block,
    load_field,
    make_blocks,
    on,
    selected_before,
    store_field,
)
from .masks import to_bytes

# of a magnitude's 31 bits: the lowest that a pass reads, and how many
PASSES = ((20, 11), (9, 11), (0, 9))
BINS = 2048
# blocks that a program counts before it adds to the shared bins
CHUNKS = 16


class TopKRow(NamedTuple):
    """One tensor, of which ``k`` elements are selected; ``bits``: memory for the mask."""

    n: int
    k: int
    x: Tensor
    bits: Tensor


FIELDS, K, X, BITS = (tl.constexpr(f) for f in (4, 1, 2, 3))
BINS_ = tl.constexpr(BINS)


@inlined
def _magnitude(row, i, in_range, TYPE: tl.constexpr):
    """Load |x| as an integer of 31 bits with the same order."""
    x = load_field(row, X, i, in_range, TYPE).to(tl.float32)
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _histogram(
    where,
    table,
    prefix,
    bins,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    number = tl.load(where + 2 * block)
    row = table + HEAD_ + number * FIELDS
    start, n = tl.load(where + 2 * block + 1), tl.load(row)
    above = tl.load(prefix + number)
    total = tl.zeros([BINS_], tl.int32)
    others = tl.zeros([], tl.int32)
    for chunk in range(tl.cdiv(tl.minimum(n - start, BLOCK), PART)):
        i = start + chunk * PART + tl.arange(0, PART)
        key = _magnitude(row, i, i < n, TYPE)
        counted = (i < n) & ((key >> (SHIFT + WIDTH)) == above)
        # Other elements go into bin 0 and are subtracted again: a mask needs Triton 3.4.
        bin = (key >> SHIFT) & (BINS_ - 1 if WIDTH == 11 else (1 << WIDTH) - 1)
        total += tl.histogram(tl.where(counted, bin, 0), BINS_)
        others += PART - tl.sum(counted.to(tl.int32), 0)
    b = tl.arange(0, BINS_)
    total -= tl.where(b == 0, others, 0)
    at = number * BINS_ + b
    tl.atomic_add(bins + at, total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def _descend(table, prefix, counted, bins, WIDTH: tl.constexpr):
    """Descend into the bin of the k-th largest; elements in higher bins are selected."""
    t = tl.program_id(0)
    b = tl.arange(0, BINS_)
    counts, so_far = tl.load(bins + t.to(tl.int64) * BINS_ + b), tl.load(counted + t)
    want = tl.load(table + HEAD_ + t * FIELDS + K) - so_far
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    # the highest bin, if none has as many
    chosen = tl.minimum(tl.sum((at_least >= want).to(tl.int32), 0) - 1, (1 << WIDTH) - 1)
    tl.store(counted + t, so_far + tl.sum(tl.where(b > chosen, counts, 0), 0))
    tl.store(prefix + t, (tl.load(prefix + t) << WIDTH) + chosen)


@triton.jit
def _count_equal(where, table, prefix, counts, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK)
    equal = in_range & (
        _magnitude(row, i, in_range, TYPE) == tl.load(prefix + tl.load(where + 2 * block))
    )
    tl.store(counts + block, tl.sum(equal.to(tl.int32), 0))


@triton.jit
def _select(where, table, prefix, counted, starts, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK)
    number = tl.load(where + 2 * block)
    key, last = _magnitude(row, i, in_range, TYPE), tl.load(prefix + number)
    equal = (in_range & (key == last)).to(tl.int32)
    left = tl.load(row + K) - tl.load(counted + number)
    flags = (in_range & (key > last)) | (
        (equal == 1) & (selected_before(equal, starts, block) < left)
    )
    at = tl.load(where + 2 * block + 1) // 8 + tl.arange(0, BLOCK // 8)
    store_field(row, BITS, at, at < (tl.load(row) + 7) // 8, to_bytes(flags, BLOCK), tl.uint8)


def top_k_table(rows: Sequence[TopKRow]) -> Table:
    """Return a table of these rows, for ``top_k``."""
    return Table(rows, rows[0].x.device, TYPE=TYPES[rows[0].x.dtype])


def top_k(blocks: Blocks, rows: Sequence[TopKRow] | Table) -> None:
    """Write the packed mask of the k largest |x| of each row to ``row.bits``, for k from 0 to n.

    NaN is the largest.
    """
    table = rows if isinstance(rows, Table) else top_k_table(rows)
    addresses, kind = table.with_head(), table.constants["TYPE"]
    device, n = table.device, len(blocks.lengths)
    wide = make_blocks(blocks.lengths, device, blocks.size * CHUNKS)
    zeros = torch.zeros((len(PASSES) * BINS + 2) * n, dtype=torch.int64, device=device)
    *all_bins, prefix, counted = zeros.split([*[BINS * n] * len(PASSES), n, n])
    prefix = prefix.view(torch.int32)
    for (shift, width), bins in zip(PASSES, all_bins, strict=True):
        wide.launch(
            _histogram,
            addresses,
            prefix,
            bins,
            SHIFT=shift,
            WIDTH=width,
            TYPE=kind,
            PART=blocks.size,
        )
        with on(device):
            _descend[(n,)](addresses, prefix, counted, bins, WIDTH=width)
    counts = torch.empty(blocks.count, dtype=torch.int32, device=device)
    blocks.launch(_count_equal, addresses, prefix, counts, TYPE=kind)
    blocks.launch(_select, addresses, prefix, counted, blocks.prefix_sums(counts), TYPE=kind)
