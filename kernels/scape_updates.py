"""SCAPE's commit (Algorithm 1, lines 10 to 21) in one pass over residual, gradient and weights.

References: ``moment``, ``scape_`` of ``tests/support/oracles/kernels.py``.
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
    inlined,
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


class ScapeRow(NamedTuple):
    """One tensor; all are contiguous. None: there is none.

    ``values``: the averaged gradient at ``bits`` (None: everywhere). ``old``: the momentum at
    ``held`` (None: everywhere); ``m``: memory for the new one, at ``bits``. ``update``: 0 leaves
    everything unchanged. ``x``: memory for line 10's x of the elements ``begin`` to ``end``.
    ``public``: a copy of ``w`` in lower precision. ``rounding_errors``: the rounding error of the
    payload, at ``bits``. ``ahead``, for ``moment``: how many blocks before this tensor
    ``held_starts`` has and the launch has not.
    """

    n: int
    bits: Tensor | None = None
    held: Tensor | None = None
    old: Tensor | None = None
    values: Tensor | None = None
    w: Tensor | None = None
    m: Tensor | None = None
    step: Tensor | None = None
    update: int = 0
    residual: Tensor | None = None
    grad: Tensor | None = None
    public: Tensor | None = None
    x: Tensor | None = None
    begin: int = 0
    end: int = 0
    rounding_errors: Tensor | None = None
    ahead: int = 0


# fields of tensors that are read or written whole
WHOLE = ("w", "residual", "grad", "public")
FIELDS = tl.constexpr(len(ScapeRow._fields))
BITS, HELD, OLD, VALUES, W, M, STEP, UPDATE = (tl.constexpr(f) for f in range(1, 9))
RESIDUAL, GRAD, PUBLIC, X, BEGIN, END = (tl.constexpr(f) for f in range(9, 15))
ROUNDING_ERRORS, AHEAD = (tl.constexpr(f) for f in (15, 16))


@inlined
def _x(row, table, i, in_range, old, ST: tl.constexpr, GT: tl.constexpr, ALIGN: tl.constexpr):
    """Return line 10's x = b1 m + (1 - b1) g + e."""
    beta1, sign = load_scalar(table, 1), load_scalar(table, 5)
    g = sign.to(ST) * load_field(row, GRAD, i, in_range, GT, ALIGN).to(ST)
    return (
        load_field(row, RESIDUAL, i, in_range, ST, ALIGN)
        + (1 - beta1).to(ST) * g
        + beta1.to(ST) * old
    )


@triton.jit
def _moment(where, table, held_starts, ST: tl.constexpr, GT: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, in_range = load_block(where, table, FIELDS, BLOCK)
    begin = tl.load(row + BEGIN)
    inside = in_range & (i >= begin) & (i < tl.load(row + END))
    held = load_mask(row, HELD, i, in_range)
    starts = held_starts + tl.load(row + AHEAD)
    old = load_field(row, OLD, selected_before(held, starts, block), inside & (held == 1), ST)
    store_field(row, X, i - begin, inside, _x(row, table, i, inside, old, ST, GT, 1), ST)


@triton.jit
def _scape(
    where,
    table,
    starts,
    held_starts,
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
    log1, log2, clip = load_scalar(table, 6), load_scalar(table, 7), load_scalar(table, 8)
    step = load_step(row, STEP)
    first = 1 - tl.exp(step * log1)
    second = 1 - tl.exp(step * log2)
    of_old, of_new = beta2 / second, (1 - beta2) / second
    updates = in_range & is_set(tl.load(row + UPDATE), i)

    chosen, held = load_mask(row, BITS, i, in_range), load_mask(row, HELD, i, in_range)
    sent, at = updates & (chosen == 1), selected_before(chosen, starts, block)
    old = load_field(row, OLD, selected_before(held, held_starts, block), updates & (held == 1), ST)
    g = load_field(row, VALUES, at, in_range & (chosen == 1), VT).to(ST)
    w = load_field(row, W, i, updates, ST, ALIGN)
    denominator = tl.sqrt(
        of_old.to(ST) * old * old + (of_new * clip * clip).to(ST) * g * g
    ) + eps.to(ST)
    m = old + (1 - beta1).to(ST) * (g - old)
    change = tl.where(sent, (lr / first).to(ST) * m / denominator, 0.0)
    w = w * (1 - lr * decay).to(ST) - change
    x = _x(row, table, i, updates, old, ST, GT, ALIGN)
    if ROUNDS:
        rounding = (1 - beta1).to(ST) * load_field(row, ROUNDING_ERRORS, at, sent, ST)
        store_field(row, RESIDUAL, i, updates, tl.where(chosen == 1, rounding, x), ST, ALIGN)
    else:
        store_field(row, RESIDUAL, i, updates, tl.where(chosen == 1, 0.0, x), ST, ALIGN)
    store_field(row, M, at, sent, m, ST)
    store_field(row, W, i, updates, w, ST, ALIGN)
    store_field(row, PUBLIC, i, updates, w, PT, ALIGN)


def moment_table(blocks: Blocks, rows: Sequence[ScapeRow]) -> Table:
    """Return a table of these rows, for ``moment``."""
    return Table(rows, blocks.where.device, **_types(rows))


def moment(
    blocks: Blocks,
    held_starts: Tensor,
    rows: Sequence[ScapeRow] | Table,
    *,
    betas: tuple[float, float],
    maximize: bool = False,
) -> None:
    """Write line 10's x for every row that has memory for it.

    ``held_starts``: the ``block_offsets`` of ``held``.
    """
    table = rows if isinstance(rows, Table) else moment_table(blocks, rows)
    head = _head(betas=betas, maximize=maximize)
    blocks.launch(_moment, table.with_head(head), held_starts, **table.constants)


def scape_table(blocks: Blocks, rows: Sequence[ScapeRow]) -> Table:
    """Return a table of these rows, for ``scape``."""
    values = [row.values.dtype for row in rows if row.values is not None]
    public = [row.public.dtype for row in rows if row.public is not None]
    return Table(
        rows,
        blocks.where.device,
        VT=TYPES[values[0]],
        PT=TYPES[public[0] if public else torch.float32],
        ROUNDS=any(row.rounding_errors is not None for row in rows),
        ALIGN=alignment(blocks, *([getattr(row, name) for row in rows] for name in WHOLE)),
        **_types(rows),
    )


def scape(
    blocks: Blocks,
    starts: Tensor,
    held_starts: Tensor,
    rows: Sequence[ScapeRow] | Table,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float = 1.0,
    maximize: bool = False,
) -> None:
    """Do lines 10, 11 and 16 to 21 for all tensors; each ``step`` already counts this one, and
    ``values`` are already negated when maximizing.

    ``clip`` multiplies the averaged gradient in v alone (line 18 as printed). ``maximize`` negates
    the own gradient.
    """
    table = rows if isinstance(rows, Table) else scape_table(blocks, rows)
    blocks.launch(
        _scape,
        table.with_head(_head(lr, betas, eps, weight_decay, clip, maximize)),
        starts,
        held_starts,
        **table.constants,
    )


def _types(rows: Sequence[ScapeRow]) -> dict[str, tl.dtype]:
    """Return the dtypes of state and of gradients."""
    grads = [row.grad.dtype for row in rows if row.grad is not None]
    (state,) = {row.old.dtype for row in rows if row.old is not None}
    return {"ST": TYPES[state], "GT": TYPES[grads[0] if grads else torch.float32]}


def _head(
    lr: float = 0.0,
    betas: tuple[float, float] = (0.0, 0.0),
    eps: float = 0.0,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    maximize: bool = False,
) -> list[float]:
    sign = -1.0 if maximize else 1.0
    return [lr, *betas, eps, weight_decay, sign, *log_decays(betas), clip]
