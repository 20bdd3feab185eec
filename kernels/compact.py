"""A payload from gradients at a packed mask, and whether they are finite, in one pass.

Reference: ``math.compact``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import TYPES, Blocks, alignment, own_block, rank, read, scalar, selected, table, write

BITS, G, ADD, OUT, MARK = (tl.constexpr(field) for field in range(1, 6))


@triton.jit
def _compact(
    where,
    table,
    starts,
    GT: tl.constexpr,
    ST: tl.constexpr,
    OT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, there = own_block(where, table, 6, BLOCK, ALIGN)
    sign, scale = scalar(table, 0).to(ST), scalar(table, 1).to(ST)
    g = read(row, G, i, there, GT, ALIGN).to(ST)
    chosen = selected(row, BITS, i, there)
    add = read(row, ADD, i, chosen == 1, ST)
    write(row, OUT, rank(chosen, starts, block), chosen == 1, sign * g + scale * add, OT)
    # inf - inf and NaN - NaN are NaN.
    bad = tl.sum((g - g != 0).to(tl.int32), 0)
    write(
        row,
        MARK,
        tl.zeros([1], tl.int64),
        tl.full([1], 1, tl.int32) * bad > 0,
        tl.full([1], float("nan"), ST),
        OT,
    )


def compact(
    blocks: Blocks,
    bits: Sequence[Tensor | None],
    starts: Tensor,
    grads: Sequence[Tensor | None],
    parts: Sequence[Tensor],
    marks: Sequence[Tensor],
    add: Sequence[Tensor | None],
    scale: float,
    sign: float,
) -> None:
    """``parts[t] = (sign * grads[t] + scale * add[t])[bits[t]]``; NaN into ``marks[t]`` where a
    gradient is not finite.

    Args:
        blocks: over the tensors' lengths.
        bits: packed masks; None: all elements.
        starts: what ``count`` returned for them.
        grads: contiguous, of one dtype; None counts as zeros.
        parts: where the selected values go, of one dtype.
        marks: one element a tensor, of the parts' dtype; left as they are where all is finite.
        add: contiguous, float32 (float64 for float64 gradients); None: nothing is added.
    """
    some = [g for g in grads if g is not None]
    gradient = some[0].dtype if some else parts[0].dtype
    wide = torch.promote_types(gradient, torch.float32)
    rows = list(zip(blocks.lengths, bits, grads, add, parts, marks, strict=True))
    blocks.run(
        _compact,
        table(rows, blocks.where.device, [sign, scale]),
        starts,
        GT=TYPES[gradient],
        ST=TYPES[wide],
        OT=TYPES[parts[0].dtype],
        ALIGN=alignment(blocks, grads),
    )
