"""AdamW on an averaged gradient that is a product of two narrow matrices, and the residual, in one
pass (SEPARATE, lines 4 and 5). The product itself is never in memory.

Reference: ``update_tensors`` in ``compopt/separate/separate.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import (
    HEAD_,
    INTERPRETED,
    TYPES,
    Table,
    alignment_of,
    load_field,
    load_options,
    load_scalar,
    load_step,
    log_decays,
    on,
    store_field,
    upload,
)

# rows and columns a program: each program reads the factors, so more columns are fewer reads
ROWS, COLUMNS = (64, 256) if INTERPRETED else (4, 128)


class FactoredRow(NamedTuple):
    """One tensor, as a contiguous matrix; tensors, or their addresses, 0 for none.

    The averaged gradient is ``R p^T``: R of shape (rows, r), whose elements lie ``down`` apart
    along a column and ``across`` along a row; p column by column. ``sent_p`` is what this rank
    sent of p. ``public``: a copy of ``w`` in lower precision.
    """

    rows: int
    columns: int
    r: int
    R: Tensor | int
    down: int
    across: int
    p: Tensor | int
    sent_p: Tensor | int
    w: Tensor | int
    m: Tensor | int
    v: Tensor | int
    step: Tensor | int
    residual: Tensor | int
    grad: Tensor | int = 0
    public: Tensor | int = 0


class FactoredTypes(NamedTuple):
    """The dtypes of all rows: of p and ``sent_p``, of state, of gradients, of ``public``."""

    p: torch.dtype = torch.float32
    w: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    public: torch.dtype = torch.float32


FIELDS = tl.constexpr(len(FactoredRow._fields))
COLUMNS_, RANK, R, DOWN, ACROSS, P, SENT_P = (tl.constexpr(f) for f in range(1, 8))
W, M, V, STEP, RESIDUAL, GRAD, PUBLIC = (tl.constexpr(f) for f in range(8, 15))


@triton.jit
def _factored(
    tiles,
    table,
    ST: tl.constexpr,
    VT: tl.constexpr,
    GT: tl.constexpr,
    PT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + tl.load(tile) * FIELDS
    i = tl.load(tile + 1) + tl.arange(0, ROWS)
    j = tl.multiple_of(tl.load(tile + 2), ALIGN) + tl.arange(0, COLUMNS)
    columns = tl.multiple_of(tl.load(row + COLUMNS_), ALIGN)
    down, across = tl.load(row + DOWN), tl.load(row + ACROSS)
    above, left = i < tl.load(row), j < columns
    average, sent = tl.zeros([ROWS, COLUMNS], ST), tl.zeros([ROWS, COLUMNS], ST)
    for k in range(tl.load(row + RANK)):
        a = load_field(row, R, i * down + k * across, above, ST)[:, None]
        p = load_field(row, P, k * columns + j, left, VT).to(ST)[None, :]
        sent_p = load_field(row, SENT_P, k * columns + j, left, VT).to(ST)[None, :]
        # one rounding a term, whatever is compiled: all ranks compute the same bits
        average = tl.fma(a, p, average)
        sent = tl.fma(a, sent_p, sent)

    lr, beta1, beta2, eps, decay = load_options(table)
    log1, log2 = load_scalar(table, 5), load_scalar(table, 6)
    of_average, of_sent, of_grad = (
        load_scalar(table, 7),
        load_scalar(table, 8),
        load_scalar(table, 9),
    )
    step = load_step(row, STEP)
    first = (1 - tl.exp(step * log1)).to(ST)
    second = tl.sqrt(1 - tl.exp(step * log2)).to(ST)
    at, in_range = i[:, None] * columns + j[None, :], above[:, None] & left[None, :]
    g, m = of_average.to(ST) * average, load_field(row, M, at, in_range, ST, ALIGN)
    m += (1 - beta1).to(ST) * (g - m)
    store_field(row, M, at, in_range, m, ST, ALIGN)
    v = beta2.to(ST) * load_field(row, V, at, in_range, ST, ALIGN) + (1 - beta2).to(ST) * g * g
    store_field(row, V, at, in_range, v, ST, ALIGN)
    ratio = m / (tl.sqrt(v) / second + eps.to(ST)) / first
    w = load_field(row, W, at, in_range, ST, ALIGN) * (1 - lr * decay).to(ST) - lr.to(ST) * ratio
    store_field(row, W, at, in_range, w, ST, ALIGN)
    store_field(row, PUBLIC, at, in_range, w, PT, ALIGN)
    e = load_field(row, RESIDUAL, at, in_range, ST, ALIGN) - of_sent.to(ST) * sent
    e += of_grad.to(ST) * load_field(row, GRAD, at, in_range, GT, ALIGN).to(ST)
    store_field(row, RESIDUAL, at, in_range, e, ST, ALIGN)


@lru_cache(maxsize=256)
def tiles_of(
    shapes: tuple[tuple[int, int], ...], device: torch.device, rows: int, columns: int
) -> Tensor:
    """Return a row for each tile of these matrices: matrix number, first row, first column."""
    offsets = []
    for number, (height, width) in enumerate(shapes):
        tops = torch.arange(0, height, rows, dtype=torch.int64, device="cpu")
        lefts = torch.arange(0, width, columns, dtype=torch.int64, device="cpu")
        corners = torch.cartesian_prod(tops, lefts).view(-1, 2)
        offsets.append(torch.nn.functional.pad(corners, (1, 0), value=number))
    return upload(torch.cat(offsets), device)


def factored_table(
    rows: Sequence[FactoredRow], types: FactoredTypes, device: torch.device
) -> Table:
    """Return a table of these tensors, for ``factored``."""
    columns = zip(
        *((row.w, row.m, row.v, row.residual, row.grad, row.public) for row in rows), strict=True
    )
    return Table(
        rows,
        device,
        ST=TYPES[types.w],
        VT=TYPES[types.p],
        GT=TYPES[types.grad],
        PT=TYPES[types.public],
        ALIGN=alignment_of([row.columns for row in rows], *columns),
    )


def factored(
    shapes: tuple[tuple[int, int], ...],
    table: Table,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    of_average: float,
    of_sent: float,
    of_grad: float,
    tile: tuple[int, int] = (ROWS, COLUMNS),
) -> None:
    """Do one AdamW step of all tensors, of these rows and columns, on ``of_average R p^T``; each
    ``step`` already counts it.

    ``of_grad grad - of_sent R sent_p^T`` is added to ``residual``.
    """
    tiles = tiles_of(shapes, table.device, *tile)
    head = [lr, *betas, eps, weight_decay, *log_decays(betas), of_average, of_sent, of_grad]
    if len(tiles):
        with on(table.device):
            _factored[(len(tiles),)](
                tiles,
                table.with_head(head),
                **table.constants,
                ROWS=tile[0],
                COLUMNS=tile[1],
                enable_fp_fusion=False,
                num_warps=2,
            )
