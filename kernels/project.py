"""Products of gradients plus residuals with narrow matrices, and whether gradients are finite, in
one pass: lines 1, 2a and 2c of ``compopt/separate/stacks.py``.

Reference: ``multiply`` in ``compopt/separate/stacks.py``.
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
    inlined,
    load_field,
    load_tile,
    on,
    store_field,
    upload,
)

# outputs and inner elements of a step of a program, and inner elements a program
OUTPUTS, DEPTH = (256, 256) if INTERPRETED else (64, 64)
CHUNK = 1024
MAX_NARROW = 128  # columns of a narrow matrix, of which a program holds DEPTH rows: 64 KiB at most
# of the products of float32: as exact as its sums, on NVIDIA's tensor cores
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
PART = 1024  # elements of an output that one program adds up


class ProjectRow(NamedTuple):
    """One tensor, as a contiguous matrix; tensors, or their addresses.

    ``narrow``: (columns, r), or (rows, r) for the transposed product; its elements lie ``down``
    apart along a column and ``across`` along a row. ``out``: the product, column by column.
    ``place``: the tensor's flag in the header. ``g`` None: zeros.
    """

    rows: int
    columns: int
    r: int
    down: int
    across: int
    place: int
    narrow: Tensor | int
    out: Tensor | int
    e: Tensor | int
    g: Tensor | int | None


class ProjectTypes(NamedTuple):
    """The dtypes of all rows, and of the header; ``e`` and sums are float32."""

    narrow: torch.dtype
    out: torch.dtype
    g: torch.dtype = torch.float32
    header: torch.dtype = torch.float32


# after a row: the sum of |g|^2, and where the partial products are, -1 without any
FIELDS = tl.constexpr(len(ProjectRow._fields) + 2)
COLUMNS, RANK, DOWN, ACROSS, PLACE, NARROW, OUT, E, G = (tl.constexpr(f) for f in range(1, 10))
SQUARE, PARTIAL = tl.constexpr(10), tl.constexpr(11)


@triton.jit
def _project(
    tiles,
    table,
    partial,
    header,
    GT: tl.constexpr,
    ST: tl.constexpr,
    NT: tl.constexpr,
    OT: tl.constexpr,
    HT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MARKS: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + tl.load(tile) * FIELDS
    first, chunk = tl.load(tile + 1), tl.load(tile + 2)
    columns, r = tl.multiple_of(tl.load(row + COLUMNS), ALIGN), tl.load(row + RANK)
    down, across = tl.load(row + DOWN), tl.load(row + ACROSS)
    outputs, depth = tl.load(row), columns
    if TRANSPOSED:
        outputs, depth, first = depth, outputs, tl.multiple_of(first, ALIGN)
    wide = columns.to(tl.int32)  # offsets inside a tile fit 32 bits
    i, k = first + tl.arange(0, OUTPUTS), tl.arange(0, R)
    local_i, local_j = tl.arange(0, OUTPUTS)[:, None], tl.arange(0, DEPTH)[None, :]
    product, square = tl.zeros([OUTPUTS, R], ST), tl.zeros([OUTPUTS], ST)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, depth), DEPTH):
        start = tl.multiple_of(start, ALIGN)
        j = start + tl.arange(0, DEPTH)
        in_range = (i < outputs)[:, None] & (j < depth)[None, :]
        if TRANSPOSED:
            begin, at = tl.multiple_of(start * columns + first, ALIGN), local_j * wide + local_i
        else:
            begin, at = tl.multiple_of(first * columns + start, ALIGN), local_i * wide + local_j
        g = load_tile(row, G, begin, at, in_range, GT, ALIGN).to(ST)
        h = g + load_tile(row, E, begin, at, in_range, ST, ALIGN)
        where, given = (
            j[:, None] * down + k[None, :] * across,
            (j < depth)[:, None] & (k < r)[None, :],
        )
        narrow = load_field(row, NARROW, where, given, NT).to(ST)
        product = tl.dot(h, narrow, product, input_precision=PRECISION)
        if MARKS:
            square += tl.sum(g * g, 1)
    to, in_out = k[None, :] * outputs + i[:, None], (i < outputs)[:, None] & (k < r)[None, :]
    place = tl.load(row + PARTIAL)
    if place < 0:
        store_field(row, OUT, to, in_out, product, OT)
    else:
        tl.store(partial + place + chunk * r * outputs + to, product, mask=in_out)
    if MARKS:
        _mark(row, header, tl.sum(square, 0), ST, HT)


@inlined
def _mark(row, header, square, ST: tl.constexpr, HT: tl.constexpr):
    """Add to the tensor's |g|^2; write NaN to its flag where the sum is not finite."""
    sum_ = (row + SQUARE).to(tl.pointer_type(ST))
    nothing = (tl.atomic_add(sum_, square, sem="relaxed") + square) * 0
    tl.store(header + tl.load(row + PLACE), nothing.to(HT), mask=nothing != 0)


@triton.jit
def _add_up(
    tiles,
    table,
    partial,
    ST: tl.constexpr,
    OT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Add up the partial products of some elements of one output, in the order of the chunks."""
    tile = tiles + 2 * tl.program_id(0).to(tl.int64)
    row = table + HEAD_ + tl.load(tile) * FIELDS
    outputs, depth = tl.load(row), tl.load(row + COLUMNS)
    if TRANSPOSED:
        outputs, depth = depth, outputs
    size = outputs * tl.load(row + RANK)
    i = tl.load(tile + 1) + tl.arange(0, PART)
    product, begin = tl.zeros([PART], ST), partial + tl.load(row + PARTIAL)
    for chunk in range(tl.cdiv(depth, CHUNK)):
        product += tl.load(begin + chunk * size + i, mask=i < size, other=0)
    store_field(row, OUT, i, i < size, product, OT)


class Tiles(NamedTuple):
    """The programs of these shapes: matrix number, first output and chunk of each; those that add
    up partial products: matrix number and first element; and where a matrix' partial products are.
    """

    products: Tensor
    sums: Tensor
    partial: tuple[int, ...]
    partial_size: int


@lru_cache(maxsize=256)
def project_tiles(
    shapes: tuple[tuple[int, int, int], ...], transposed: bool, device: torch.device
) -> Tiles:
    """Return the programs of matrices of these rows and columns, with narrow ones of r columns."""
    products, sums, partial, size = [], [torch.empty(0, 2, dtype=torch.int64, device="cpu")], [], 0
    for number, (rows, columns, r) in enumerate(shapes):
        outputs, depth = (columns, rows) if transposed else (rows, columns)
        firsts = torch.arange(0, outputs, OUTPUTS, dtype=torch.int64, device="cpu")
        chunks = torch.arange(-(-depth // CHUNK), dtype=torch.int64, device="cpu")
        corners = torch.cartesian_prod(firsts, chunks).view(-1, 2)
        products.append(torch.nn.functional.pad(corners, (1, 0), value=number))
        partial.append(size if len(chunks) > 1 else -1)
        if len(chunks) > 1:
            size += len(chunks) * outputs * r
            parts = torch.arange(0, outputs * r, PART, dtype=torch.int64, device="cpu").view(-1, 1)
            sums.append(torch.nn.functional.pad(parts, (1, 0), value=number))
    uploaded = upload(torch.cat(products), device), upload(torch.cat(sums), device)
    return Tiles(*uploaded, tuple(partial), size)


def project_table(
    rows: Sequence[ProjectRow], tiles: Tiles, types: ProjectTypes, transposed: bool
) -> Table:
    """Return a table of these tensors, for ``project``."""
    lengths = [row.columns for row in rows]
    given = zip(rows, tiles.partial, strict=True)
    return Table(
        [(*row, 0, partial) for row, partial in given],
        tiles.products.device,
        GT=TYPES[types.g],
        ST=tl.float32,
        NT=TYPES[types.narrow],
        OT=TYPES[types.out],
        HT=TYPES[types.header],
        TRANSPOSED=transposed,
        ALIGN=alignment_of(lengths, [row.g for row in rows], [row.e for row in rows]),
        R=max(16, triton.next_power_of_2(max(row.r for row in rows))),
    )


def project(table: Table, tiles: Tiles, header: Tensor | None) -> None:
    """Write ``(g + e) narrow`` of each row to its ``out``, or the product of the
    transposed matrix; with a header, write NaN to the flags of gradients that are not finite.

    A product of more than ``CHUNK`` inner elements is added up from parts, in the same order in
    every run.
    """
    constants = table.constants
    device = table.device
    partial = torch.empty(tiles.partial_size, dtype=torch.float32, device=device)
    if header is None:
        addresses, flags = table.with_head(), partial
    else:
        addresses, flags = table.writable_copy(), header
    if not len(tiles.products):
        return
    with on(device):
        sizes = dict(OUTPUTS=OUTPUTS, DEPTH=DEPTH, CHUNK=CHUNK)
        _project[(len(tiles.products),)](
            tiles.products,
            addresses,
            partial,
            flags,
            **constants,
            **sizes,
            MARKS=header is not None,
            PRECISION=PRECISION,
            num_stages=1,
        )
        if len(tiles.sums):
            names = ("ST", "OT", "TRANSPOSED")
            _add_up[(len(tiles.sums),)](
                tiles.sums,
                addresses,
                partial,
                **{name: constants[name] for name in names},
                CHUNK=CHUNK,
                PART=PART,
            )
