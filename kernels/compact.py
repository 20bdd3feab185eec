"""Payloads: gradients plus residuals at a packed mask, and whether gradients are finite, in one
pass (stream compaction).

Reference: ``compact`` of ``tests/support/oracles/kernels.py``.
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
    load_block,
    load_field,
    load_mask,
    load_scalar,
    selected_before,
    store_field,
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
    AT: tl.constexpr,
    SQT: tl.constexpr,
    ST: tl.constexpr,
    OT: tl.constexpr,
    HT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK, ALIGN)
    sign, scale = load_scalar(table, 0).to(ST), load_scalar(table, 1).to(ST)
    g = load_field(row, G, i, in_range, GT, ALIGN).to(SQT)
    chosen = load_mask(row, BITS, i, in_range)
    sum_ = sign * g.to(ST) + scale * load_field(row, ADD, i, chosen == 1, AT).to(ST)
    store_field(row, OUT, selected_before(chosen, starts, block), chosen == 1, sum_, OT)
    # The tensor's |g|^2 so far; the program that adds the last block sees all of it. It never
    # falls, so a value that is not finite stays so in any order.
    square, so_far = tl.sum(g * g, 0), (row + SQUARE).to(tl.pointer_type(SQT))
    nothing = (tl.atomic_add(so_far, square, sem="relaxed") + square) * 0
    tl.store(header + tl.load(where + 2 * block), nothing.to(HT), mask=nothing != 0)


def compact_table(
    blocks: Blocks,
    bits: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    parts: Sequence[Tensor | None],
    header: Tensor,
    add: Sequence[Tensor | None],
) -> Table:
    """Return a table of these tensors, for ``compact``."""
    gradient, added = find_dtype(grads, torch.float32), find_dtype(add, torch.float32)
    # a gradient's square is of its dtype, at least float32, whatever is added to the gradient
    of_square = torch.promote_types(gradient, torch.float32)
    # the sums of squares are in the table itself, and begin with 0
    sums = [0] * len(grads)
    return Table(
        zip(blocks.lengths, bits, grads, add, parts, sums, strict=True),
        blocks.where.device,
        GT=TYPES[gradient],
        AT=TYPES[added],
        SQT=TYPES[of_square],
        ST=TYPES[torch.promote_types(of_square, added)],
        OT=TYPES[find_dtype(parts, header.dtype)],
        HT=TYPES[header.dtype],
        ALIGN=alignment(blocks, grads),
    )


def find_dtype(tensors: Sequence[Tensor | None], default: torch.dtype) -> torch.dtype:
    """Return the dtype of these tensors, which all have; the default if there is none."""
    return next((x.dtype for x in tensors if x is not None), default)


def compact_with_table(
    blocks: Blocks, table: Table, starts: Tensor, header: Tensor, scale: float, sign: float
) -> None:
    """Do ``compact`` with a table that was made for it."""
    addresses = table.writable_copy([sign, scale])
    blocks.launch(_compact, addresses, starts, header, **table.constants)


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
    """Write ``(sign * grads[t] + scale * add[t])[bits[t]]`` to ``parts[t]``; write NaN to
    ``header[t]`` where the gradient or its squared norm is not finite.

    Args:
        blocks: over the tensors' lengths.
        bits: packed masks; None: all elements.
        starts: the ``block_offsets`` of these masks.
        grads: contiguous, of one dtype; None: zeros.
        parts: memory for the selected values, of one dtype; None: not written.
        header: one element a tensor, of any dtype.
        add: contiguous, float32 or float64; None: nothing is added.
    """
    table = compact_table(blocks, bits, grads, parts, header, add)
    compact_with_table(blocks, table, starts, header, scale, sign)
