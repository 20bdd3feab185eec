"""A payload from gradients at a packed mask, and whether they are finite, in one pass.

Reference: ``math.compact``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import (
    TYPES,
    Blocks,
    Table,
    alignment,
    own_block,
    rank,
    read,
    scalar,
    selected,
    write,
)

BITS, G, ADD, OUT, SQUARE = (tl.constexpr(field) for field in range(1, 6))
FIELDS = tl.constexpr(6)


@triton.jit
def _compact(
    where,
    table,
    starts,
    header,
    GT: tl.constexpr,
    ST: tl.constexpr,
    OT: tl.constexpr,
    HT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK, ALIGN)
    sign, scale = scalar(table, 0).to(ST), scalar(table, 1).to(ST)
    g = read(row, G, i, there, GT, ALIGN).to(ST)
    chosen = selected(row, BITS, i, there)
    add = read(row, ADD, i, chosen == 1, ST)
    write(row, OUT, rank(chosen, starts, block), chosen == 1, sign * g + scale * add, OT)
    # The tensor's |g|^2 so far: of the program that adds the last block it is the whole. It never
    # falls, so what once is not finite stays so, whatever the order.
    square, sum_ = tl.sum(g * g, 0), (row + SQUARE).to(tl.pointer_type(ST))
    nothing = (tl.atomic_add(sum_, square, sem="relaxed") + square) * 0
    tl.store(header + tl.load(where + 2 * block), nothing.to(HT), mask=nothing != 0)


def compact_table(
    blocks: Blocks,
    bits: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    parts: Sequence[Tensor | None],
    header: Tensor,
    add: Sequence[Tensor | None],
) -> Table:
    """What ``compact`` wants to know of these tensors."""
    some = [g for g in grads if g is not None]
    sent = [part for part in parts if part is not None]
    gradient = some[0].dtype if some else header.dtype
    wide = torch.promote_types(gradient, torch.float32)
    # The sums of squares begin with 0, and are in the table itself.
    sums = [0] * len(grads)
    return Table(
        zip(blocks.lengths, bits, grads, add, parts, sums, strict=True),
        blocks.where.device,
        GT=TYPES[gradient],
        ST=TYPES[wide],
        OT=TYPES[sent[0].dtype if sent else header.dtype],
        HT=TYPES[header.dtype],
        ALIGN=alignment(blocks, grads),
    )


def compact_known(
    blocks: Blocks, table: Table, starts: Tensor, header: Tensor, scale: float, sign: float
) -> None:
    """``compact`` of tensors that lie where they lay when the table was made."""
    addresses = table.copy([sign, scale])
    blocks.run(_compact, addresses, starts, header, **table.constants)


def compact(
    blocks: Blocks,
    bits: Sequence[Tensor | None],
    starts: Tensor,
    grads: Sequence[Tensor | None],
    parts: Sequence[Tensor | None],
    header: Tensor,
    add: Sequence[Tensor | None],
    scale: float,
    sign: float,
) -> None:
    """``parts[t] = (sign * grads[t] + scale * add[t])[bits[t]]``; ``header[t]`` becomes NaN where
    the gradient or its squared norm is not finite, and stays as it is where they are.

    Args:
        blocks: over the tensors' lengths.
        bits: packed masks; None: all elements.
        starts: what ``count`` returned for them.
        grads: contiguous, of one dtype; None counts as zeros.
        parts: where the selected values go, of one dtype; None: nowhere.
        header: one element a tensor, of any dtype.
        add: contiguous, float32 (float64 for float64 gradients); None: nothing is added.
    """
    table = compact_table(blocks, bits, grads, parts, header, add)
    compact_known(blocks, table, starts, header, scale, sign)
