"""Orthonormal columns of narrow matrices by Cholesky-QR, run twice, in float64, in five launches.

Reference: ``orthonormalize_by_cholesky`` in ``compopt/_lowrank/projections.py``::

    Y <- X D^-1 + s E         D: the columns' lengths; E: the identity on top of zeros
    L L^T <- Y^T Y;           Y <- Y L^-T
    L L^T <- Y^T Y;           Q <- Y L^-T

Y is never in memory: a row of it is computed from the row of X by products with matrices of r x r.
Y^T Y of the first line follows from X^T X and the first r rows of X.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import HEAD_, INTERPRETED, TYPES, Table, inlined, load_field, load_scalar, on, upload

MAX_RANK = 16  # a program holds ROWS x r x r numbers
ROWS = 512 if INTERPRETED else 16  # of a matrix, at a time
CHUNK = 512  # rows a program
SHIFT = 1e-6  # as in the reference


class ColumnsRow(NamedTuple):
    """One matrix X of ``rows`` rows and r columns; its elements lie ``down`` apart along a column
    and ``across`` along a row, those of the result Q ``q_down`` and ``q_across``. ``begin`` and
    ``chunks``: the numbers of its programs.
    """

    rows: int
    r: int
    down: int
    across: int
    q_down: int
    q_across: int
    begin: int
    chunks: int
    x: Tensor
    q: Tensor


FIELDS = tl.constexpr(len(ColumnsRow._fields))
RANK, DOWN, ACROSS, Q_DOWN, Q_ACROSS, BEGIN, CHUNKS, X, Q = (tl.constexpr(f) for f in range(1, 10))


@inlined
def _times(left, right):
    """Return the product of (n, r) and (r, r)."""
    return tl.sum(left[:, :, None] * right[None, :, :], 1)


@inlined
def _square_at(start, R: tl.constexpr):
    """Return where the elements of a matrix of R x R are."""
    i = tl.arange(0, R)
    return start * R * R + i[:, None] * R + i[None, :]


@inlined
def _load_rows(row, triangles, number, i, STAGE: tl.constexpr, XT: tl.constexpr, R: tl.constexpr):
    """Load rows i of X, or compute those of Y after the first or the second factorization."""
    j = tl.arange(0, R)
    in_range = (i < tl.load(row))[:, None] & (j < tl.load(row + RANK))[None, :]
    at = i[:, None] * tl.load(row + DOWN) + j[None, :] * tl.load(row + ACROSS)
    y = load_field(row, X, at, in_range, XT).to(tl.float64)
    if STAGE > 0:
        place = 3 * number
        of_x = tl.load(triangles + _square_at(place, R))
        top = triangles + (place + 1) * R * R + i[:, None] * R + j[None, :]
        y = _times(y, of_x) + tl.load(top, mask=(i < R)[:, None] & (j < R)[None, :], other=0)
    if STAGE > 1:
        y = _times(y, tl.load(triangles + _square_at(3 * number + 2, R)))
    return y


@triton.jit
def _gram(
    chunks,
    table,
    triangles,
    grams,
    STAGE: tl.constexpr,
    XT: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute X^T X, or Y^T Y, of some rows of a matrix."""
    number, first = (
        tl.load(chunks + 2 * tl.program_id(0)),
        tl.load(chunks + 2 * tl.program_id(0) + 1),
    )
    row, gram = table + HEAD_ + number * FIELDS, tl.zeros([R, R], tl.float64)
    for start in range(first, tl.minimum(first + CHUNK, tl.load(row)), ROWS):
        y = _load_rows(row, triangles, number, start + tl.arange(0, ROWS), STAGE, XT, R)
        gram += tl.sum(y[:, :, None] * y[:, None, :], 0)
    tl.store(grams + _square_at(tl.program_id(0), R), gram)


@triton.jit
def _factorize(table, triangles, grams, STAGE: tl.constexpr, XT: tl.constexpr, R: tl.constexpr):
    """Compute L^-T of one matrix, and what X and E are multiplied by."""
    number = tl.program_id(0).to(tl.int64)
    row, begin = table + HEAD_ + number * FIELDS, tl.load(table + HEAD_ + number * FIELDS + BEGIN)
    gram = tl.zeros([R, R], tl.float64)
    for chunk in range(tl.load(row + CHUNKS)):
        gram += tl.load(grams + _square_at(begin + chunk, R))
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    one = tl.full([R, R], 1, tl.float64)
    identity = tl.where(i == j, one, 0.0)
    scale = identity
    shift = load_scalar(table, 0)
    if STAGE == 0:
        squares = gram * identity
        down, across = tl.sum(squares, 1)[:, None], tl.sum(squares, 0)[None, :]
        down, across = (
            tl.where(down > 0, 1 / tl.sqrt(down), down),
            tl.where(across > 0, 1 / tl.sqrt(across), across),
        )
        in_x = (
            (i < tl.load(row))
            & (i < tl.load(row + RANK))
            & (j < tl.load(row))
            & (j < tl.load(row + RANK))
        )
        x_down, x_across = tl.load(row + DOWN), tl.load(row + ACROSS)
        top = load_field(row, X, i * x_down + j * x_across, in_x, XT).to(tl.float64) * across
        flipped = load_field(row, X, j * x_down + i * x_across, in_x, XT).to(tl.float64) * down
        gram = gram * down * across + shift * (top + flipped) + shift * shift * identity
        scale = identity * across
    # columns that a smaller matrix does not have
    gram = tl.where((i == j) & (i >= tl.load(row + RANK)), one, gram)
    lower, upper = tl.zeros([R, R], tl.float64), tl.zeros([R, R], tl.float64)
    for k in range(R):
        of_k = tl.sum(tl.where(j == k, gram, 0.0), 1)[:, None]
        as_row = tl.sum(tl.where(i == k, gram, 0.0), 0)[None, :]
        pivot = tl.sqrt(tl.sum(tl.sum(tl.where((i == k) & (j == k), gram, 0.0), 1), 0))
        of_k, as_row = tl.where(i >= k, of_k / pivot, 0.0), tl.where(j >= k, as_row / pivot, 0.0)
        lower += tl.where(j == k, of_k, 0.0)
        upper += tl.where(i == k, as_row, 0.0)
        gram -= of_k * as_row
    inverse = tl.zeros([R, R], tl.float64)  # L^-1, row by row; transposed beside it
    transposed = tl.zeros([R, R], tl.float64)
    for k in range(R):
        pivot = tl.sum(tl.sum(tl.where((i == k) & (j == k), lower, 0.0), 1), 0)
        of_k = tl.sum(tl.where(j == k, upper, 0.0), 1)[:, None]
        as_row = tl.sum(tl.where(i == k, lower, 0.0), 0)[None, :]
        above = tl.sum(of_k * inverse, 0)[None, :]
        left = tl.sum(as_row * transposed, 1)[:, None]
        inverse += tl.where(i == k, (tl.where(j == k, one, 0.0) - above) / pivot, 0.0)
        transposed += tl.where(j == k, (tl.where(i == k, one, 0.0) - left) / pivot, 0.0)
    if STAGE == 0:
        tl.store(triangles + _square_at(3 * number, R), tl.sum(scale, 1)[:, None] * transposed)
        tl.store(triangles + _square_at(3 * number + 1, R), shift * transposed)
    else:
        tl.store(triangles + _square_at(3 * number + 2, R), transposed)


@triton.jit
def _apply(
    chunks,
    table,
    triangles,
    XT: tl.constexpr,
    QT: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write some rows of Q."""
    number, first = (
        tl.load(chunks + 2 * tl.program_id(0)),
        tl.load(chunks + 2 * tl.program_id(0) + 1),
    )
    row, j = table + HEAD_ + number * FIELDS, tl.arange(0, R)
    for start in range(first, tl.minimum(first + CHUNK, tl.load(row)), ROWS):
        i = start + tl.arange(0, ROWS)
        q = _load_rows(row, triangles, number, i, 2, XT, R)
        at = i[:, None] * tl.load(row + Q_DOWN) + j[None, :] * tl.load(row + Q_ACROSS)
        in_range = (i < tl.load(row))[:, None] & (j < tl.load(row + RANK))[None, :]
        address = tl.load(row + Q).to(tl.pointer_type(QT))
        tl.store(address + at, q.to(QT), mask=in_range)


@lru_cache(maxsize=256)
def chunks_of(rows: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the programs of matrices of so many rows: matrix number and first row of each; and the
    number of programs of each matrix.
    """
    programs, counts = [], []
    for number, height in enumerate(rows):
        firsts = torch.arange(0, height, CHUNK, dtype=torch.int64, device="cpu").view(-1, 1)
        programs.append(torch.nn.functional.pad(firsts, (1, 0), value=number))
        counts.append(len(firsts))
    return upload(torch.cat(programs), device), counts


class Orthonormalization(NamedTuple):
    """The launches on matrices that lie in these places: ``programs`` as of ``chunks_of``."""

    programs: Tensor
    matrices: int
    R: int
    table: Table


def prepare_orthonormalize(
    stacks: Sequence[Tensor], results: Sequence[Tensor]
) -> Orthonormalization:
    """Return the launches that write orthonormal columns of each stack to a result of its shape."""
    device = stacks[0].device
    pairs = zip(stacks, results, strict=True)
    matrices = [pair for x, q in pairs for pair in zip(x.unbind(), q.unbind(), strict=True)]
    programs, counts = chunks_of(tuple(len(x) for x, _ in matrices), device)
    rows, begin = [], 0
    for (x, q), count in zip(matrices, counts, strict=True):
        (down, across), (q_down, q_across) = x.stride(), q.stride()
        sizes = len(x), x.shape[1], down, across, q_down, q_across
        rows.append(ColumnsRow(*sizes, begin, count, x, q))
        begin += count
    R = max(2, triton.next_power_of_2(max(row.r for row in rows)))
    table = Table(rows, device, XT=TYPES[stacks[0].dtype], QT=TYPES[results[0].dtype])
    return Orthonormalization(programs, len(rows), R, table)


def orthonormalize(prepared: Orthonormalization, shift: float = SHIFT) -> None:
    """Write orthonormal columns that span those of the matrices of each stack, at most
    ``MAX_RANK``.

    A column of zeros or a dependent one becomes a unit vector: ``shift`` is added to element (i, i)
    of each matrix of columns of length 1.
    """
    programs, matrices, R, table = prepared
    device = table.device
    options = dict(R=R, XT=table.constants["XT"])
    cut = dict(ROWS=max(ROWS, R), CHUNK=CHUNK)
    triangles = torch.empty(matrices, 3, R, R, dtype=torch.float64, device=device)
    grams = torch.empty(len(programs), R, R, dtype=torch.float64, device=device)
    rows, last = table.with_head([shift]), table.constants["QT"]
    with on(device):
        for stage in range(2):
            _gram[(len(programs),)](programs, rows, triangles, grams, STAGE=stage, **options, **cut)
            _factorize[(matrices,)](rows, triangles, grams, STAGE=stage, **options)
        _apply[(len(programs),)](programs, rows, triangles, QT=last, **options, **cut)
