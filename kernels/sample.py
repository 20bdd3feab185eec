"""A code of a few elements of some tensors, as bits for a message. Reference: ``samples.code``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import HEAD_, TYPES, Table, on, read

WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}


class SampleRow(NamedTuple):
    """One tensor, of which ``n`` elements are looked at, ``stride`` apart.

    ``first``: how many of the tensors before it are.
    """

    n: int
    x: Tensor
    stride: int
    first: int


FIELDS = tl.constexpr(len(SampleRow._fields))
X, STRIDE, FIRST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _sample(
    table,
    factors,
    said,
    count,
    TYPE: tl.constexpr,
    WORD: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all: there are few."""
    total, others, bad = tl.zeros([], tl.int64), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    i = tl.arange(0, BLOCK)
    for number in range(count):
        row = table + HEAD_ + number * FIELDS
        there = i < tl.load(row)
        x = read(row, X, i * tl.load(row + STRIDE), there, TYPE)
        factor = tl.load(factors + tl.load(row + FIRST) + i, mask=there, other=0)
        total += tl.sum(x.to(WORD, bitcast=True).to(tl.int64) * factor, 0)
        size = tl.abs(x.to(tl.float64))
        others += tl.sum((size > 0).to(tl.int32), 0)
        bad += BLOCK - tl.sum((size < float("inf")).to(tl.int32), 0)
    telling = (others > 0) & (bad == 0)
    b = tl.arange(0, 2 * BITS)
    bit = (total >> (64 - BITS + b % BITS)) & 1
    word = tl.where(b < BITS, bit, 1 - bit)
    tl.store(said + b, tl.where(telling, word, 0).to(tl.float32))
    tl.store(said + 2 * BITS, tl.where(telling, 0.0, 1.0))


def sample_table(rows: Sequence[SampleRow]) -> Table:
    """These rows, for ``sample``: contiguous, of one dtype of 2, 4 or 8 bytes."""
    x = rows[0].x
    return Table(rows, x.device, TYPE=TYPES[x.dtype], WORD=WORDS[x.element_size()])


def sample(table: Table, count: int, factors: Tensor, bits: int, block: int) -> Tensor:
    """The highest ``bits`` of the sum, over all elements, of an element's bits times its factor;
    their complements; 1 where all are 0 or one is not finite, and nothing else then. Float32.

    ``count``: rows of the table. ``block``: elements of a row at most, a power of 2.
    """
    said = torch.empty(2 * bits + 1, dtype=torch.float32, device=table.device)
    with on(table.device):
        _sample[(1,)](
            table.under(), factors, said, count, BITS=bits, BLOCK=block, **table.constants
        )
    return said
