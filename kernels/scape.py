"""SCAPE's commit (Algorithm 1, lines 10 to 21) in one pass over residual, gradient and weights.

References: ``math.moment``, ``math.scape_``.
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
    inlined,
    own_block,
    rank,
    read,
    scalar,
    selected,
    write,
)


class ScapeRow(NamedTuple):
    """One tensor; all are contiguous. None: it has no such thing.

    ``values``: the averaged gradient at ``bits`` (None: everywhere). ``old``: the momentum at
    ``held`` (None: everywhere); ``m`` gets the new one, at ``bits``. ``update``: 0 leaves
    everything as it is. ``x`` gets line 10's x of the elements ``begin`` to ``end``. ``public``: a
    copy of ``w`` in lower precision. ``dropped``: what rounding took off what was sent, at
    ``bits``. ``ahead``: of ``moment``, how many blocks there are before it in ``held_starts``
    beyond those in the launch.
    """

    n: int
    bits: Tensor | None
    held: Tensor | None
    old: Tensor
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
    dropped: Tensor | None = None
    ahead: int = 0


# Read or written from one end to the other.
WHOLE = ("w", "residual", "grad", "public")
FIELDS = tl.constexpr(len(ScapeRow._fields))
(
    BITS,
    HELD,
    OLD,
    VALUES,
    W,
    M,
    STEP,
    UPDATE,
    RESIDUAL,
    GRAD,
    PUBLIC,
    X,
    BEGIN,
    END,
    DROPPED,
    AHEAD,
) = (tl.constexpr(f) for f in range(1, 17))


@inlined
def _x(row, table, i, there, old, ST: tl.constexpr, GT: tl.constexpr, ALIGN: tl.constexpr):
    """Line 10: b1 m + (1 - b1) g + e."""
    beta1, sign = scalar(table, 1), scalar(table, 5)
    g = sign.to(ST) * read(row, GRAD, i, there, GT, ALIGN).to(ST)
    return read(row, RESIDUAL, i, there, ST, ALIGN) + (1 - beta1).to(ST) * g + beta1.to(ST) * old


@triton.jit
def _moment(where, table, held_starts, ST: tl.constexpr, GT: tl.constexpr, BLOCK: tl.constexpr):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK)
    begin = tl.load(row + BEGIN)
    inside = there & (i >= begin) & (i < tl.load(row + END))
    held = selected(row, HELD, i, there)
    starts = held_starts + tl.load(row + AHEAD)
    old = read(row, OLD, rank(held, starts, block), inside & (held == 1), ST)
    write(row, X, i - begin, inside, _x(row, table, i, inside, old, ST, GT, 1), ST)


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
    ADAMS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row, i, there = own_block(where, table, FIELDS, BLOCK, ALIGN)
    lr, beta1, beta2, eps = scalar(table, 0), scalar(table, 1), scalar(table, 2), scalar(table, 3)
    decay, log1, log2, clip = scalar(table, 4), scalar(table, 6), scalar(table, 7), scalar(table, 8)
    step = tl.maximum(tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))), 1.0).to(
        tl.float64
    )
    first = 1 - tl.exp(step * log1)
    if ADAMS:
        of_old, of_new = beta2 / (first * first), 1 - beta2
    else:
        second = 1 - tl.exp(step * log2)
        of_old, of_new = beta2 / second, (1 - beta2) / second
    updates = there & given(tl.load(row + UPDATE), i)

    chosen, held = selected(row, BITS, i, there), selected(row, HELD, i, there)
    sent, at = updates & (chosen == 1), rank(chosen, starts, block)
    old = read(row, OLD, rank(held, held_starts, block), updates & (held == 1), ST)
    g = read(row, VALUES, at, there & (chosen == 1), VT).to(ST)
    w = read(row, W, i, updates, ST, ALIGN)
    denominator = tl.sqrt(
        of_old.to(ST) * old * old + (of_new * clip * clip).to(ST) * g * g
    ) + eps.to(ST)
    m = old + (1 - beta1).to(ST) * (g - old)
    change = tl.where(sent, (lr / first).to(ST) * m / denominator, 0.0)
    w = w * (1 - lr * decay).to(ST) - change
    x = _x(row, table, i, updates, old, ST, GT, ALIGN)
    if ROUNDS:
        owed = (1 - beta1).to(ST) * read(row, DROPPED, at, sent, ST)
        write(row, RESIDUAL, i, updates, tl.where(chosen == 1, owed, x), ST, ALIGN)
    else:
        write(row, RESIDUAL, i, updates, tl.where(chosen == 1, 0.0, x), ST, ALIGN)
    write(row, M, at, sent, m, ST)
    write(row, W, i, updates, w, ST, ALIGN)
    write(row, PUBLIC, i, updates, w, PT, ALIGN)


def moment_table(blocks: Blocks, rows: Sequence[ScapeRow]) -> Table:
    """These rows, for ``moment``."""
    return Table(rows, blocks.where.device, **_types(rows))


def moment(
    blocks: Blocks,
    held_starts: Tensor,
    rows: Sequence[ScapeRow] | Table,
    *,
    betas: tuple[float, float],
    maximize: bool = False,
) -> None:
    """Line 10 for what this rank selects from: x of every row that has one.

    ``held_starts``: ``count`` of ``held``.
    """
    table = rows if isinstance(rows, Table) else moment_table(blocks, rows)
    head = _head(betas=betas, maximize=maximize)
    blocks.run(_moment, table.under(head), held_starts, **table.constants)


def scape_table(blocks: Blocks, rows: Sequence[ScapeRow]) -> Table:
    """These rows, for ``scape``."""
    values = [row.values.dtype for row in rows if row.values is not None]
    public = [row.public.dtype for row in rows if row.public is not None]
    return Table(
        rows,
        blocks.where.device,
        VT=TYPES[values[0]],
        PT=TYPES[public[0] if public else torch.float32],
        ROUNDS=any(row.dropped is not None for row in rows),
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
    bias_correction: str = "scape",
    clip: float = 1.0,
    maximize: bool = False,
) -> None:
    """Lines 10, 11 and 16 to 21 for all tensors; each ``step`` is already counted up, ``values``
    already negated.

    ``clip`` multiplies the averaged gradient in v alone (line 18 as printed). ``maximize`` negates
    the own gradient.
    """
    table = rows if isinstance(rows, Table) else scape_table(blocks, rows)
    blocks.run(
        _scape,
        table.under(_head(lr, betas, eps, weight_decay, clip, maximize)),
        starts,
        held_starts,
        ADAMS=bias_correction == "adams",
        **table.constants,
    )


def _types(rows: Sequence[ScapeRow]) -> dict[str, tl.dtype]:
    """Of state and of gradients."""
    grads = [row.grad.dtype for row in rows if row.grad is not None]
    return {"ST": TYPES[rows[0].old.dtype], "GT": TYPES[grads[0] if grads else torch.float32]}


def _head(
    lr: float = 0.0,
    betas: tuple[float, float] = (0.0, 0.0),
    eps: float = 0.0,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    maximize: bool = False,
) -> list[float]:
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    return [lr, *betas, eps, weight_decay, -1.0 if maximize else 1.0, *logs, clip]
