"""Exactly the k elements of largest magnitude, as bits, without a host wait. Reference: ``top_k``
of ``tests/support/oracles/kernels.py``.

Radix selection: four passes count 8, 8, 8 and 7 bits of |x| as a float32, from the top, in 256
bins, and descend into the bin of the k-th. The third, which knows 16 bits, writes the bits of all
elements above them, and marks those that have them: the candidates, one in some hundreds. Whatever
follows loads candidates only, so x is read three times. Of elements equal to the k-th the first
are selected.
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
    is_set,
    load_field,
    make_blocks,
    on,
    store_field,
)
from .mask_bits import to_bytes

# of a magnitude's 31 bits: the lowest that a pass counts, and how many
PASSES = ((23, 8), (15, 8), (7, 8), (0, 7))
MARKS, LOADS_MARKED = 2, 3  # the pass that marks candidates, and the first that loads only these
BINS = 256
# Elements that are counted at a time, and that a program counts, in blocks. Measured on an H200:
# parts of 1,024 elements are counted at .75 of the rate, 1,024 bins at .3 of it.
PART, WIDE = 4, 32
WARPS = 8
# Elements of a part that are added to the shared bins one by one, at most: 1 in so many.
FEW = 128


class TopKRow(NamedTuple):
    """One tensor, of which ``k`` elements are selected; ``bits``: memory for the mask."""

    n: int
    k: int
    x: Tensor
    bits: Tensor


FIELDS, K, X, BITS = (tl.constexpr(f) for f in (4, 1, 2, 3))
BINS_, FEW_ = tl.constexpr(BINS), tl.constexpr(FEW)


@inlined
def _magnitude(row, i, in_range, TYPE: tl.constexpr):
    """Load |x| as an integer of 31 bits with the same order."""
    x = load_field(row, X, i, in_range, TYPE).to(tl.float32)
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@inlined
def _load_marks(marks, at, in_range, PART: tl.constexpr):
    """Load whether elements are candidates; ``at``: the first of them, of all blocks' elements."""
    i = tl.arange(0, PART)
    bytes_ = tl.load(marks + at // 8 + (i >> 3), mask=in_range, other=0).to(tl.int32)
    return ((bytes_ >> (i & 7)) & 1) != 0


@triton.jit
def _histogram(
    where,
    table,
    prefix,
    bins,
    marks,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    MARKS: tl.constexpr,
    LOADS_MARKED: tl.constexpr,
    TYPE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    number = tl.load(where + 2 * block)
    row = table + HEAD_ + number * FIELDS
    start, n = tl.load(where + 2 * block + 1), tl.load(row)
    above, bins = tl.load(prefix + number), bins + number * BINS_
    total = tl.zeros([BINS_], tl.int32)
    others = tl.zeros([], tl.int32)
    for part in range(tl.cdiv(tl.minimum(n - start, BLOCK), PART)):
        i = start + part * PART + tl.arange(0, PART)
        at = block * BLOCK + part * PART
        in_range = i < n
        if LOADS_MARKED:
            in_range = in_range & _load_marks(marks, at, in_range, PART)
        key = _magnitude(row, i, in_range, TYPE)
        known = key >> (SHIFT + WIDTH)
        counted = in_range & (known == above)
        if MARKS:
            byte = start // 8 + part * (PART // 8) + tl.arange(0, PART // 8)
            larger = to_bytes(in_range & (known > above), PART)
            store_field(row, BITS, byte, byte < (n + 7) // 8, larger, tl.uint8)
            tl.store(marks + at // 8 + tl.arange(0, PART // 8), to_bytes(counted, PART))
        bin = (key >> SHIFT) & ((1 << WIDTH) - 1)
        selected = tl.sum(counted.to(tl.int32), 0)
        if selected <= PART // FEW_:
            one = tl.full([PART], 1, tl.int64)
            tl.atomic_add(bins + bin, one, mask=counted, sem="relaxed")
        else:
            # Other elements go into bin 0 and are subtracted again: a mask needs Triton 3.4.
            total += tl.histogram(tl.where(counted, bin, 0), BINS_)
            others += PART - selected
    b = tl.arange(0, BINS_)
    total -= tl.where(b == 0, others, 0)
    tl.atomic_add(bins + b, total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def _descend(table, prefix, larger, sizes, bins, WIDTH: tl.constexpr):
    """Descend into the bin of the k-th largest; elements in higher bins are selected."""
    t = tl.program_id(0)
    b = tl.arange(0, BINS_)
    counts, so_far = tl.load(bins + t.to(tl.int64) * BINS_ + b), tl.load(larger + t)
    want = tl.load(table + HEAD_ + t * FIELDS + K) - so_far
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    # the highest bin, if none has as many
    chosen = tl.minimum(tl.sum((at_least >= want).to(tl.int32), 0) - 1, (1 << WIDTH) - 1)
    tl.store(larger + t, so_far + tl.sum(tl.where(b > chosen, counts, 0), 0))
    tl.store(sizes + t, tl.sum(tl.where(b == chosen, counts, 0), 0))
    tl.store(prefix + t, (tl.load(prefix + t) << WIDTH) + chosen)


@inlined
def _load_equal(row, i, marked, last, unequal, TYPE: tl.constexpr):
    """Return which candidates equal the k-th magnitude, and which are larger.

    ``unequal``: how many do not equal it. If none, nothing is loaded.
    """
    loaded = marked & is_set(unequal, i)
    key = _magnitude(row, i, loaded, TYPE)
    return marked & ((key == last) | (loaded == 0)), loaded & (key > last)


@triton.jit
def _count_equal(
    where,
    table,
    prefix,
    larger,
    candidates,
    equals,
    marks,
    counts,
    TYPE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the equal elements of each block, if not all of them are selected."""
    block = tl.program_id(0).to(tl.int64)
    number = tl.load(where + 2 * block)
    row = table + HEAD_ + number * FIELDS
    start, n, last = tl.load(where + 2 * block + 1), tl.load(row), tl.load(prefix + number)
    size = tl.load(equals + number)
    unequal = tl.load(candidates + number) - size
    total = tl.zeros([], tl.int32)
    if tl.load(row + K) - tl.load(larger + number) < size:
        for part in range(tl.cdiv(tl.minimum(n - start, BLOCK), PART)):
            i = start + part * PART + tl.arange(0, PART)
            marked = _load_marks(marks, block * BLOCK + part * PART, i < n, PART)
            equal, _ = _load_equal(row, i, marked, last, unequal, TYPE)
            total += tl.sum(equal.to(tl.int32), 0)
    tl.store(counts + block, total)


@triton.jit
def _select(
    where,
    table,
    prefix,
    larger,
    candidates,
    equals,
    marks,
    starts,
    TYPE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the candidates that are selected to the bits."""
    block = tl.program_id(0).to(tl.int64)
    number = tl.load(where + 2 * block)
    row = table + HEAD_ + number * FIELDS
    start, n, last = tl.load(where + 2 * block + 1), tl.load(row), tl.load(prefix + number)
    size = tl.load(equals + number)
    unequal = tl.load(candidates + number) - size
    wanted = tl.load(row + K) - tl.load(larger + number)
    # equal elements of this block, from the first, that are selected
    left = tl.where(wanted < size, wanted - tl.load(starts + block), BLOCK)
    left = tl.minimum(tl.maximum(left, 0), BLOCK).to(tl.int32)
    for part in range(tl.cdiv(tl.minimum(n - start, BLOCK), PART)):
        i = start + part * PART + tl.arange(0, PART)
        marked = _load_marks(marks, block * BLOCK + part * PART, i < n, PART)
        equal, above = _load_equal(row, i, marked, last, unequal, TYPE)
        flags = equal.to(tl.int32)
        bytes_ = to_bytes(above | (equal & (tl.cumsum(flags, 0) <= left)), PART)
        byte = start // 8 + part * (PART // 8) + tl.arange(0, PART // 8)
        changed = (byte < (n + 7) // 8) & (bytes_ != 0)
        known = load_field(row, BITS, byte, changed, tl.uint8)
        store_field(row, BITS, byte, changed, known | bytes_, tl.uint8)
        left -= tl.sum(flags, 0)


def top_k_table(rows: Sequence[TopKRow]) -> Table:
    """Return a table of these rows, for ``top_k``."""
    return Table(rows, rows[0].x.device, TYPE=TYPES[rows[0].x.dtype])


def top_k(blocks: Blocks, rows: Sequence[TopKRow] | Table) -> None:
    """Write the packed mask of the k largest |x| of each row to ``row.bits``, for k from 0 to n.

    NaN is the largest.
    """
    table = rows if isinstance(rows, Table) else top_k_table(rows)
    device, n = table.device, len(blocks.lengths)
    wide = make_blocks(blocks.lengths, device, blocks.size * WIDE)
    passes = len(PASSES)
    zeros = torch.zeros((passes * (BINS + 1) + 2) * n, dtype=torch.int64, device=device)
    prefix, larger, *rest = zeros.split([n, n, *[n] * passes, *[BINS * n] * passes])
    prefix, sizes, bins = prefix.view(torch.int32), rest[:passes], rest[passes:]
    marks = torch.empty(wide.count * wide.size // 8, dtype=torch.uint8, device=device)
    addresses = table.with_head()
    options = dict(table.constants, PART=blocks.size * PART, num_warps=WARPS)
    for number, (shift, width) in enumerate(PASSES):
        wide.launch(
            _histogram,
            addresses,
            prefix,
            bins[number],
            marks,
            SHIFT=shift,
            WIDTH=width,
            MARKS=number == MARKS,
            LOADS_MARKED=number >= LOADS_MARKED,
            **options,
        )
        with on(device):
            _descend[(n,)](addresses, prefix, larger, sizes[number], bins[number], WIDTH=width)
    known = addresses, prefix, larger, sizes[MARKS - 1], sizes[-1], marks
    counts = torch.empty(wide.count, dtype=torch.int32, device=device)
    wide.launch(_count_equal, *known, counts, **options)
    wide.launch(_select, *known, wide.prefix_sums(counts), **options)
