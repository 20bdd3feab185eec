"""AdamW from an averaged gradient that is only known at a packed mask, and Radius's residual, in
one pass over all.

No dense gradient is made in between. Reference: ``math.radius_``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import (
    TYPES,
    Blocks,
    Table,
    alignment,
    given,
    own_block,
    rank,
    read,
    scalar,
    selected,
    write,
)


class AdamWRow(NamedTuple):
    """One tensor; all are contiguous. None: it has no such thing.

    ``values``: the averaged gradient at ``bits`` (None: everywhere). ``residual``: 0 on the mask,
    plus ``grad`` off it. ``update``: 0 leaves w, m, v and the residual as they are. ``score``: gets
    |what AdamW subtracts, over lr|. ``public``: a copy of ``w`` in lower precision.
    """

    n: int
    bits: Tensor | None
    values: Tensor
    w: Tensor
    m: Tensor
    v: Tensor
    step: Tensor
    update: int
    residual: Tensor | None = None
    grad: Tensor | None = None
    score: Tensor | None = None
    public: Tensor | None = None


# Read or written from one end to the other.
WHOLE = ("w", "m", "v", "residual", "grad", "score", "public")
FIELDS = tl.constexpr(len(AdamWRow._fields))
BITS, VALUES, W, M, V, STEP, UPDATE, RESIDUAL, GRAD, SCORE, PUBLIC = (
    tl.constexpr(f) for f in range(1, 12)
)


@triton.jit
def _adamw(
    where,
    table,
    starts,
    ST: tl.constexpr,
    VT: tl.constexpr,
    GT: tl.constexpr,
    PT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK, ALIGN)
    lr, beta1, beta2, eps = scalar(table, 0), scalar(table, 1), scalar(table, 2), scalar(table, 3)
    decay, sign, log1, log2 = scalar(table, 4), scalar(table, 5), scalar(table, 6), scalar(table, 7)
    step = tl.maximum(tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))), 1.0).to(
        tl.float64
    )
    first = (1 - tl.exp(step * log1)).to(ST)
    second = tl.sqrt(1 - tl.exp(step * log2)).to(ST)
    updates = there & given(tl.load(row + UPDATE), i)

    chosen = selected(row, BITS, i, there)
    g = sign.to(ST) * read(row, VALUES, rank(chosen, starts, block), chosen == 1, VT).to(ST)
    w, m = read(row, W, i, there, ST, ALIGN), read(row, M, i, there, ST, ALIGN)
    v = read(row, V, i, there, ST, ALIGN)
    m = tl.where(updates, m + (1 - beta1).to(ST) * (g - m), m)
    v = tl.where(updates, beta2.to(ST) * v + (1 - beta2).to(ST) * g * g, v)
    ratio = m / (tl.sqrt(v) / second + eps.to(ST)) / first
    write(row, SCORE, i, there, tl.abs(ratio + decay.to(ST) * w), ST, ALIGN)
    w = w * (1 - lr * decay).to(ST) - lr.to(ST) * ratio
    write(row, W, i, updates, w, ST, ALIGN)
    write(row, M, i, updates, m, ST, ALIGN)
    write(row, V, i, updates, v, ST, ALIGN)
    write(row, PUBLIC, i, updates, w, PT, ALIGN)
    held = read(row, RESIDUAL, i, updates, ST, ALIGN) + read(row, GRAD, i, updates, GT, ALIGN).to(
        ST
    )
    write(row, RESIDUAL, i, updates, tl.where(chosen == 1, 0.0, held), ST, ALIGN)


def adamw_table(blocks: Blocks, rows: Sequence[AdamWRow]) -> Table:
    """These rows, for ``adamw``."""
    grads = [row.grad.dtype for row in rows if row.grad is not None]
    public = [row.public.dtype for row in rows if row.public is not None]
    return Table(
        rows,
        blocks.where.device,
        ST=TYPES[rows[0].w.dtype],
        VT=TYPES[rows[0].values.dtype],
        GT=TYPES[grads[0] if grads else torch.float32],
        PT=TYPES[public[0] if public else torch.float32],
        ALIGN=alignment(blocks, *([getattr(row, name) for row in rows] for name in WHOLE)),
    )


def adamw(
    blocks: Blocks,
    starts: Tensor,
    rows: Sequence[AdamWRow] | Table,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """One AdamW step of all tensors; each ``step`` is already counted up.

    ``starts``: ``count`` of the rows' bits.
    """
    table = rows if isinstance(rows, Table) else adamw_table(blocks, rows)
    head = [
        lr,
        *betas,
        eps,
        weight_decay,
        -1.0 if maximize else 1.0,
        *(math.log(b) if b else -math.inf for b in betas),
    ]
    blocks.run(_adamw, table.under(head), starts, **table.constants)
