"""Orthonormal columns of narrow matrices by Cholesky-QR, run twice, in six launches.

Reference: ``orthonormalize_by_cholesky`` in ``compopt/separate/projections.py``::

    C <- X D^-1 + s E         D: the columns' lengths; E: the identity on top of zeros
    L L^T <- C^T C;           Q <- C L^-T
    L L^T <- Q^T Q;           Q <- Q L^-T, 0 in rows where X is 0, unless all of X is

C is never in memory: C^T C follows from X^T X and the first r rows of X, and C L^-T is X times one
r x r matrix plus another on top. Sums are in float64; Q is float32 between the two passes, since
the second makes of any nearly orthonormal columns orthonormal ones. Below the first r rows zeros
stay zeros by themselves.
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
    addresses_in_turn,
    inlined,
    load_field,
    load_scalar,
    on,
    upload,
)

MAX_RANK = 16  # a program holds r x r numbers
CHUNK = 256 if INTERPRETED else 128  # rows a program
ROWS = CHUNK if INTERPRETED else 1  # rows that are reduced; one at a time is no reduction
SHIFT = 1e-6  # as in the reference


class ColumnsRow(NamedTuple):
    """One matrix X of ``rows`` rows and r columns; its elements lie ``down`` apart along a column
    and ``across`` along a row. Q is stored by rows. ``begin`` and ``chunks``: the numbers of its
    programs.
    """

    rows: int
    r: int
    down: int
    across: int
    begin: int
    chunks: int
    x: int
    q: int


FIELDS = tl.constexpr(len(ColumnsRow._fields))
RANK, DOWN, ACROSS, BEGIN, CHUNKS, X, Q = (tl.constexpr(f) for f in range(1, 8))


@inlined
def _square(number, R: tl.constexpr):
    """Return where the elements of matrix ``number`` of R x R are."""
    i = tl.arange(0, R)
    return number * R * R + i[:, None] * R + i[None, :]


@inlined
def _locate_input(row, FIRST: tl.constexpr):
    """Return the address of the matrix that a pass reads, X or Q, the distances between rows and
    between columns, and r.
    """
    r = tl.load(row + RANK)
    if FIRST:
        return tl.load(row + X), tl.load(row + DOWN), tl.load(row + ACROSS), r
    return tl.load(row + Q), r, r * 0 + 1, r


@triton.jit
def _gram(
    chunks,
    table,
    grams,
    XT: tl.constexpr,
    FIRST: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute X^T X of some rows of a matrix, or Q^T Q."""
    number, first = (
        tl.load(chunks + 2 * tl.program_id(0)),
        tl.load(chunks + 2 * tl.program_id(0) + 1),
    )
    row, gram = table + HEAD_ + number * FIELDS, tl.zeros([R, R], tl.float64)
    address, down, across, r = _locate_input(row, FIRST)
    x, j, last = address.to(tl.pointer_type(XT)), tl.arange(0, R), tl.load(row)
    for start in range(first, tl.minimum(first + CHUNK, last), ROWS):
        i = (start + tl.arange(0, ROWS))[:, None, None]
        left, right = j[None, :, None], j[None, None, :]
        x_left = tl.load(x + i * down + left * across, mask=(i < last) & (left < r), other=0)
        x_right = tl.load(x + i * down + right * across, mask=(i < last) & (right < r), other=0)
        gram += tl.sum(x_left.to(tl.float64) * x_right.to(tl.float64), 0)
    tl.store(grams + _square(tl.program_id(0).to(tl.int64), R), gram)


@triton.jit
def _factorize(
    table,
    grams,
    triangles,
    XT: tl.constexpr,
    FIRST: tl.constexpr,
    R: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute L^-T of one matrix; in the first pass what X and E are multiplied by, and which of
    the first r rows are not set to zero in the end.
    """
    number = tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + number * FIELDS
    begin, count, r = tl.load(row + BEGIN), tl.load(row + CHUNKS), tl.load(row + RANK)
    some, gram = tl.arange(0, PART), tl.zeros([R, R], tl.float64)
    for chunk in range(0, count, PART):
        places = _square(begin + chunk, R)[None, :, :] + (some * R * R)[:, None, None]
        gram += tl.sum(
            tl.load(grams + places, mask=(chunk + some < count)[:, None, None], other=0), 0
        )
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    one = tl.full([R, R], 1, tl.float64)
    identity = tl.where(i == j, one, 0.0)
    shift, scale = load_scalar(table, 0), one
    if FIRST:
        squares = gram * identity
        down, across = tl.sum(squares, 1)[:, None], tl.sum(squares, 0)[None, :]
        down = tl.where(down > 0, 1 / tl.sqrt(down), down)
        across = tl.where(across > 0, 1 / tl.sqrt(across), across)
        x_down, x_across, in_x = tl.load(row + DOWN), tl.load(row + ACROSS), (i < r) & (j < r)
        top = load_field(row, X, i * x_down + j * x_across, in_x, XT).to(tl.float64) * across
        flipped = load_field(row, X, j * x_down + i * x_across, in_x, XT).to(tl.float64) * down
        kept = tl.sum((top != 0).to(tl.float64), 1)[:, None]
        kept += tl.where(tl.sum(tl.sum(squares, 1), 0) > 0, 0.0, one)
        tl.store(triangles + _square(3 * number + 2, R), kept)
        gram = gram * down * across + shift * (top + flipped) + shift * shift * identity
        scale = down * one
    # columns that a smaller matrix does not have
    gram = tl.where((i == j) & (i >= r), one, gram)
    # column by column: L, and L^T beside it
    lower, upper = tl.zeros([R, R], tl.float64), tl.zeros([R, R], tl.float64)
    for k in range(R):
        of_k = tl.sum(tl.where(j == k, gram, 0.0), 1)[:, None]
        as_row = tl.sum(tl.where(i == k, gram, 0.0), 0)[None, :]
        pivot = tl.sqrt(tl.sum(tl.sum(tl.where((i == k) & (j == k), gram, 0.0), 1), 0))
        of_k, as_row = tl.where(i >= k, of_k / pivot, 0.0), tl.where(j >= k, as_row / pivot, 0.0)
        lower += tl.where(j == k, of_k, 0.0)
        upper += tl.where(i == k, as_row, 0.0)
        gram -= of_k * as_row
    inverse = tl.zeros([R, R], tl.float64)  # L^-T, column by column
    for k in range(R):
        pivot = tl.sum(tl.sum(tl.where((i == k) & (j == k), lower, 0.0), 1), 0)
        of_row = tl.sum(tl.where(i == k, lower, 0.0), 0)[None, :]
        before = tl.sum(of_row * inverse, 1)[:, None]
        inverse += tl.where(j == k, (tl.where(i == k, one, 0.0) - before) / pivot, 0.0)
    tl.store(triangles + _square(3 * number, R), scale * inverse)
    if FIRST:
        tl.store(triangles + _square(3 * number + 1, R), shift * inverse)


@triton.jit
def _apply(
    chunks,
    table,
    triangles,
    XT: tl.constexpr,
    FIRST: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write some rows of Q: C L^-T, or Q L^-T in place."""
    number, first = (
        tl.load(chunks + 2 * tl.program_id(0)),
        tl.load(chunks + 2 * tl.program_id(0) + 1),
    )
    row, j = table + HEAD_ + number * FIELDS, tl.arange(0, R)
    address, down, across, r = _locate_input(row, FIRST)
    x, i = address.to(tl.pointer_type(XT)), first + tl.arange(0, CHUNK)
    triangle, in_range = triangles + 3 * number * R * R, i < tl.load(row)
    q = tl.zeros([CHUNK, R], tl.float64)
    if FIRST:
        top = triangle + R * R + i[:, None] * R + j[None, :]
        q += tl.load(top, mask=(i < R)[:, None] & (j < R)[None, :], other=0)
    for k in range(r):
        column = tl.load(x + i * down + k * across, mask=in_range, other=0).to(tl.float64)
        q += column[:, None] * tl.load(triangle + k * R + j)[None, :]
    if not FIRST:
        kept = tl.load(triangle + 2 * R * R + i * R, mask=i < r, other=1)
        q = tl.where(kept[:, None] != 0, q, 0.0)
    out = tl.load(row + Q).to(tl.pointer_type(tl.float32))
    at, given = i[:, None] * r + j[None, :], in_range[:, None] & (j < r)[None, :]
    tl.store(out + at, q.to(tl.float32), mask=given)


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
    """Return the launches that write orthonormal columns of each stack to a result of its shape,
    float32 and contiguous.
    """
    device = stacks[0].device
    heights = tuple(stack.shape[1] for stack in stacks for _ in range(len(stack)))
    programs, counts = chunks_of(heights, device)
    rows: list[ColumnsRow] = []
    begin, count = 0, iter(counts)
    for stack, result in zip(stacks, results, strict=True):
        _, n, r = stack.shape
        _, down, across = stack.stride()
        for x, q in zip(addresses_in_turn(stack), addresses_in_turn(result), strict=True):
            rows.append(ColumnsRow(n, r, down, across, begin, chunks := next(count), x, q))
            begin += chunks
    R = max(2, triton.next_power_of_2(max(row.r for row in rows)))
    return Orthonormalization(
        programs, len(rows), R, Table(rows, device, XT=TYPES[stacks[0].dtype])
    )


def orthonormalize(prepared: Orthonormalization, shift: float = SHIFT) -> None:
    """Write orthonormal columns that span those of the matrices of each stack, at most
    ``MAX_RANK``.

    A column of zeros or a dependent one becomes a unit vector: ``shift`` is added to element (i, i)
    of each matrix of columns of length 1. A row of zeros stays one, unless all rows are zeros.
    """
    programs, matrices, R, table = prepared
    device, count = table.device, len(programs)
    triangles = torch.empty(matrices, 3, R, R, dtype=torch.float64, device=device)
    grams = torch.empty(count, R, R, dtype=torch.float64, device=device)
    rows = table.with_head([shift])
    with on(device):
        for is_first in (True, False):
            options = dict(
                XT=table.constants["XT"] if is_first else tl.float32, FIRST=is_first, R=R
            )
            _gram[(count,)](programs, rows, grams, **options, CHUNK=CHUNK, ROWS=ROWS, num_warps=1)
            _factorize[(matrices,)](rows, grams, triangles, **options, PART=8)
            _apply[(count,)](programs, rows, triangles, **options, CHUNK=CHUNK)
