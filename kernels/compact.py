"""A payload from gradients at a packed mask, and whether they are finite, in one pass.

Reference: ``math.compact``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import (
    HEAD_,
    TYPES,
    Blocks,
    alignment,
    on,
    own_block,
    rank,
    read,
    scalar,
    selected,
    table,
    write,
)

BITS, G, ADD, OUT, FIRST, COUNT = (tl.constexpr(field) for field in range(1, 7))
FIELDS = tl.constexpr(7)


@triton.jit
def _compact(
    where,
    table,
    starts,
    squares,
    GT: tl.constexpr,
    ST: tl.constexpr,
    OT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK, ALIGN)
    sign, scale = scalar(table, 0).to(ST), scalar(table, 1).to(ST)
    g = read(row, G, i, there, GT, ALIGN).to(ST)
    chosen = selected(row, BITS, i, there)
    add = read(row, ADD, i, chosen == 1, ST)
    write(row, OUT, rank(chosen, starts, block), chosen == 1, sign * g + scale * add, OT)
    tl.store(squares + block, tl.sum(g * g, 0))


@triton.jit
def _marks(table, squares, header, OT: tl.constexpr, BLOCK: tl.constexpr):
    """1 where the sum of a tensor's squares is finite, NaN where not, 0 without a gradient."""
    number = tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + number * FIELDS
    first, count = tl.load(row + FIRST), tl.load(row + COUNT)
    i, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], squares.dtype.element_ty)
    for start in range(0, count, BLOCK):
        total += tl.load(squares + first + start + i, mask=start + i < count, other=0)
    mark = tl.sum(total, 0) * 0 + 1
    tl.store(header + number, tl.where(tl.load(row + G) != 0, mark, 0.0).to(OT))


def compact(
    blocks: Blocks,
    bits: Sequence[Tensor | None],
    starts: Tensor,
    grads: Sequence[Tensor | None],
    parts: Sequence[Tensor],
    header: Tensor,
    add: Sequence[Tensor | None],
    scale: float,
    sign: float,
) -> None:
    """``parts[t] = (sign * grads[t] + scale * add[t])[bits[t]]``; ``header[t]`` says whether the
    gradient is finite, and so is its squared norm: 1; NaN where not; 0 where there is none.

    Args:
        blocks: over the tensors' lengths.
        bits: packed masks; None: all elements.
        starts: what ``count`` returned for them.
        grads: contiguous, of one dtype; None counts as zeros.
        parts: where the selected values go, of one dtype.
        header: one element a tensor, of any dtype.
        add: contiguous, float32 (float64 for float64 gradients); None: nothing is added.
    """
    some = [g for g in grads if g is not None]
    gradient = some[0].dtype if some else parts[0].dtype
    wide = torch.promote_types(gradient, torch.float32)
    counts = blocks.per_tensor
    firsts = [end - n for end, n in zip(accumulate(counts), counts, strict=True)]
    # what is empty has no address, and is there all the same
    given = [g if g is None or g.numel() else 1 for g in grads]
    rows = list(zip(blocks.lengths, bits, given, add, parts, firsts, counts, strict=True))
    device = blocks.where.device
    addresses = table(rows, device, [sign, scale])
    squares = torch.empty(blocks.count, dtype=wide, device=device)
    blocks.run(
        _compact,
        addresses,
        starts,
        squares,
        GT=TYPES[gradient],
        ST=TYPES[wide],
        OT=TYPES[parts[0].dtype],
        ALIGN=alignment(blocks, grads),
    )
    if rows:
        with on(device):
            _marks[(len(rows),)](addresses, squares, header, OT=TYPES[header.dtype], BLOCK=1024)
