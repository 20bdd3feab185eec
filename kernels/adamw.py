"""AdamW on an averaged gradient that is given at a packed mask, and Radius's residual, in one pass.

No dense gradient is made in between. Reference: ``step_adamw`` of ``compopt/_engine/reducer.py``;
``radius_`` of ``tests/support/oracles/kernels.py``.
"""

from __future__ import annotations

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
    is_set,
    load_block,
    load_field,
    load_mask,
    load_options,
    load_scalar,
    load_step,
    log_decays,
    selected_before,
    store_field,
)


class AdamWRow(NamedTuple):
    """One tensor; all are contiguous tensors, or their addresses. None or 0: there is none.

    ``values``: the averaged gradient at ``bits`` (None: everywhere). ``residual`` becomes 0 on the
    mask; ``grad`` is added off it. ``update``: 0 leaves w, m, v and the residual unchanged.
    ``public``: a copy of ``w`` in lower precision. ``rounding_errors``: what the residual becomes
    on the mask in place of 0.
    """

    n: int
    bits: Tensor | int | None
    values: Tensor | int
    w: Tensor | int
    m: Tensor | int
    v: Tensor | int
    step: Tensor | int
    update: int
    residual: Tensor | int | None = None
    grad: Tensor | int | None = None
    public: Tensor | int | None = None
    rounding_errors: Tensor | int | None = None


class AdamWTypes(NamedTuple):
    """The dtypes of all rows: of w and state, of the average, of gradients, of ``public``."""

    w: torch.dtype
    values: torch.dtype
    grad: torch.dtype = torch.float32
    public: torch.dtype = torch.float32

    @classmethod
    def of(cls, rows: Sequence[AdamWRow]) -> AdamWTypes:
        """Return the dtypes of rows of tensors."""
        columns = ([getattr(row, name) for row in rows] for name in cls._fields)
        dtypes = ([x.dtype for x in column if isinstance(x, Tensor)] for column in columns)
        return cls(*(column[0] if column else torch.float32 for column in dtypes))


# fields of tensors that are read or written whole
WHOLE = ("w", "m", "v", "residual", "grad", "public")
FIELDS = tl.constexpr(len(AdamWRow._fields))
BITS, VALUES, W, M, V, STEP, UPDATE, RESIDUAL, GRAD, PUBLIC, ROUNDING_ERRORS = (
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
    ROUNDS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK, ALIGN)
    lr, beta1, beta2, eps, decay = load_options(table)
    scale, log1, log2 = load_scalar(table, 5), load_scalar(table, 6), load_scalar(table, 7)
    step = load_step(row, STEP)
    first = (1 - tl.exp(step * log1)).to(ST)
    second = tl.sqrt(1 - tl.exp(step * log2)).to(ST)
    updates = in_range & is_set(tl.load(row + UPDATE), i)

    chosen = load_mask(row, BITS, i, in_range)
    at = selected_before(chosen, starts, block)
    g = scale.to(ST) * load_field(row, VALUES, at, chosen == 1, VT).to(ST)
    held = load_field(row, RESIDUAL, i, updates, ST, ALIGN) + load_field(
        row, GRAD, i, updates, GT, ALIGN
    ).to(ST)
    held = tl.where(chosen == 1, 0.0, held)
    if ROUNDS:
        held += load_field(row, ROUNDING_ERRORS, at, updates & (chosen == 1), ST)
    store_field(row, RESIDUAL, i, updates, held, ST, ALIGN)
    w, m = load_field(row, W, i, in_range, ST, ALIGN), load_field(row, M, i, in_range, ST, ALIGN)
    v = load_field(row, V, i, in_range, ST, ALIGN)
    m = tl.where(updates, m + (1 - beta1).to(ST) * (g - m), m)
    v = tl.where(updates, beta2.to(ST) * v + (1 - beta2).to(ST) * g * g, v)
    ratio = m / (tl.sqrt(v) / second + eps.to(ST)) / first
    w = w * (1 - lr * decay).to(ST) - lr.to(ST) * ratio
    store_field(row, W, i, updates, w, ST, ALIGN)
    store_field(row, M, i, updates, m, ST, ALIGN)
    store_field(row, V, i, updates, v, ST, ALIGN)
    store_field(row, PUBLIC, i, updates, w, PT, ALIGN)


def adamw_table(blocks: Blocks, rows: Sequence[AdamWRow], types: AdamWTypes | None = None) -> Table:
    """Return a table of these rows, for ``adamw``; addresses need their ``types``."""
    types = types or AdamWTypes.of(rows)
    return Table(
        rows,
        blocks.where.device,
        ST=TYPES[types.w],
        VT=TYPES[types.values],
        GT=TYPES[types.grad],
        PT=TYPES[types.public],
        ROUNDS=any(row.rounding_errors is not None for row in rows),
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
    scale: float = 1.0,
) -> None:
    """Do one AdamW step of all tensors, on ``scale`` times the average; each ``step`` already
    counts it.

    ``starts``: the ``block_offsets`` of the rows' bits.
    """
    table = rows if isinstance(rows, Table) else adamw_table(blocks, rows)
    scale = -scale if maximize else scale
    head = [lr, *betas, eps, weight_decay, scale, *log_decays(betas)]
    blocks.launch(_adamw, table.with_head(head), starts, **table.constants)
