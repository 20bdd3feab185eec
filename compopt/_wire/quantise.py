"""Codes of flat values, of 8 bits or of 4: rows of 128 that share a scale, stochastic rounding; how
a message is cut into rows, and how codes of 4 bits lie in bytes.

Rounding x in units of scale = (largest of the row) / 127, with 4 bits / 7, is floor(x / scale + u),
u uniform in [0, 1): unbiased. A row of zeros stays one; a row whose scale is below 1.2e-38 becomes
zeros; a row that is not finite becomes NaN. u comes from a table, entered at a place that follows
from a seed, so that the same run rounds the same way on every machine.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .scratch import Scratch, at_a_time

# Values that share a scale: 4 bytes of it are 3 % of theirs, with 4 bits 6 %.
ROW = 128
LARGEST = {8: 127.0, 4: 7.0}
# Of scales: 1 / scale is finite.
SMALLEST = torch.finfo(torch.float32).tiny
# Numbers u, one of each 65536th.
TABLE = 65536
# Rows at a time: they stay in a core's cache from one pass to the next.
BLOCK = TABLE // ROW
# From one block's place in the table to the next one's.
STRIDE = 40503


class Piece(NamedTuple):
    """``n`` values without a gap between rows: ``at`` in the body or chunk, ``row`` the first of
    the rows they fill.
    """

    at: int
    row: int
    n: int


class Chunk(NamedTuple):
    """What one rank owns: values ``start`` to ``stop`` of the body, ``rows`` rows, and the pieces
    of parts in them.
    """

    start: int
    stop: int
    first_row: int
    rows: int
    pieces: tuple[Piece, ...]


class Layout(NamedTuple):
    """How a body is cut into rows and chunks; ``values`` and ``scales``: most that a chunk has,
    room in messages.
    """

    rows: int
    pieces: tuple[Piece, ...]
    chunks: tuple[Chunk, ...]
    values: int
    scales: int


def rows_of(n: int) -> int:
    return -(-n // ROW)


def code_bytes(n: int, bits: int) -> int:
    """Bytes of n codes."""
    return -(-n * bits // 8)


def wire_bytes(lengths: list[int], words: int, bits: int) -> int:
    """Bytes of a payload as codes, scales and ``words`` words of float32: what a rank sends of it
    each way.
    """
    return code_bytes(sum(lengths), bits) + 4 * (sum(map(rows_of, lengths)) + words)


@lru_cache(maxsize=256)
def layout(lengths: tuple[int, ...], ranks: int) -> Layout:
    """Rows begin anew with every part, so that no scale is shared by two tensors.

    Chunks are cut between rows.
    """
    ends, row_ends = list(accumulate(lengths)), list(accumulate(map(rows_of, lengths)))
    values, rows = (ends[-1], row_ends[-1]) if lengths else (0, 0)
    parts = (
        Piece(end - n, row - rows_of(n), n)
        for n, end, row in zip(lengths, ends, row_ends, strict=True)
        if n
    )
    whole = tuple(_joined(parts))
    cuts = [
        (0, 0),
        *(_cut(values * rank // ranks, whole) for rank in range(1, ranks)),
        (values, rows),
    ]
    chunks = tuple(
        Chunk(start, stop, first, last - first, tuple(_within(whole, start, stop, first)))
        for (start, first), (stop, last) in pairwise(cuts)
    )
    return Layout(
        rows, whole, chunks, max(c.stop - c.start for c in chunks), max(c.rows for c in chunks)
    )


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Parts that end with a row are one piece with the next."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last.n % ROW == 0:
            last = Piece(last.at, last.row, last.n + piece.n)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _cut(value: int, pieces: tuple[Piece, ...]) -> tuple[int, int]:
    """The first value at or after ``value`` that begins a row, and that row."""
    i = bisect_left([piece.at + piece.n for piece in pieces], value)
    if i == len(pieces):
        return 0, 0
    piece = pieces[i]
    row = rows_of(max(0, value - piece.at))
    return piece.at + min(ROW * row, piece.n), piece.row + row


def _within(pieces: tuple[Piece, ...], start: int, stop: int, first_row: int) -> Iterator[Piece]:
    for at, row, n in pieces:
        a, b = max(at, start), min(at + n, stop)
        if a < b:
            yield Piece(a - start, row + (a - at) // ROW - first_row, b - a)


def spread(
    values: Tensor, pieces: tuple[Piece, ...], rows: int, use: str, scratch: Scratch
) -> Tensor:
    """Flat values as (rows, 128), zeros behind a part that ends within a row.

    A view where there are none.
    """
    if len(values) == rows * ROW and values.is_contiguous():
        return values.view(rows, ROW)
    out = scratch(use, rows * ROW, values.dtype, values.device)
    for at, row, n in pieces:
        out[ROW * row : ROW * row + n] = values[at : at + n]
        out[ROW * row + n : ROW * (row + rows_of(n))] = 0
    return out.view(rows, ROW)


def join(rows: Tensor, pieces: tuple[Piece, ...], out: Tensor) -> None:
    """The other way round, into flat ``out``. Nothing to do where ``spread`` gave a view of it."""
    if rows.data_ptr() == out.data_ptr():
        return
    flat = rows.view(-1)
    for at, row, n in pieces:
        out[at : at + n] = flat[ROW * row : ROW * row + n]


def quantise(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    dropped: Tensor,
    seed: tuple[int, ...],
    scratch: Scratch,
    bits: int,
) -> None:
    """Round (rows, 128) values to ``codes`` of so many bits, each in an int8, in units of
    ``scales``, float32; ``dropped`` (x itself, or of its shape) gets what rounding took off.
    """
    place, noise, most = place_of(seed), numbers(x.dtype, x.device), LARGEST[bits]
    block = at_a_time(BLOCK, x)
    for number, a in enumerate(range(0, len(x), block)):
        x_, scale, drop = x[a : a + block], scales[a : a + block], dropped[a : a + block]
        t = scratch("block", x_.numel(), x.dtype, x.device).view(x_.shape)
        nearest = torch.abs(x_, out=t).amax(1).div_(most)
        scale.copy_(nearest.masked_fill_(nearest < SMALLEST, 0))
        # inf becomes NaN.
        scale.add_(scale - scale)
        unit = scale.to(x.dtype).unsqueeze(1)
        torch.mul(x_, torch.where(unit > 0, 1 / unit, 0), out=t)
        u = _numbers(noise, place + STRIDE * number, x_.numel())
        t.add_(u.view(x_.shape)).floor_().clamp_(-most, most)
        codes[a : a + block].copy_(t)
        torch.sub(x_, t.mul_(unit), out=drop)


def dequantise(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Values of ``codes`` in units of ``scales``."""
    return out.copy_(codes).mul_(scales.unsqueeze(1))


def pack(codes: Tensor, out: Tensor) -> None:
    """Codes of 4 bits, each in an int8, into half as many bytes: a byte is a code of the first half
    + 16 times one of the second.
    """
    half = len(out)
    out.copy_(codes[:half])
    out[: len(codes) - half].add_(codes[half:], alpha=16)


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """The other way round: codes are in -7 to 7, so that rounding a 16th of a byte tells the second
    half.
    """
    half = len(packed)
    first, second = out[:half].copy_(packed), out[half:]
    torch.add(packed[: len(second)], 8, out=second).bitwise_right_shift_(4)
    first[: len(second)].sub_(second, alpha=16)
    return out


def place_of(seed: tuple[int, ...]) -> int:
    """Where the table of numbers u is entered."""
    return (
        int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=4).digest(), "little")
        % TABLE
    )


def _numbers(table: Tensor, place: int, n: int) -> Tensor:
    """The numbers u of n values; the first of a block has that at ``place``."""
    place %= TABLE
    if n <= TABLE:
        return table[place : place + n]
    places = torch.arange(rows_of(n) // BLOCK + 1, dtype=torch.int64, device=table.device)
    places.mul_(STRIDE).add_(place).remainder_(TABLE)
    return table.unfold(0, TABLE, 1).index_select(0, places).view(-1)[:n]


@lru_cache(maxsize=8)
def numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers u in a random order, twice, so that TABLE of them follow on any place."""
    order = torch.randperm(TABLE, dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    return torch.cat([order, order]).add(0.5).div_(TABLE).to(device, dtype)
