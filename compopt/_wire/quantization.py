"""Quantization of flat values to 8, 4 or 2 bits: rows of 128 values share a scale.

With 8 and 4 bits the unit is the largest magnitude of the row / 127 or / 7, and x becomes
floor(x / unit + u), u uniform in [0, 1): stochastic rounding, which is unbiased. u is read from a
fixed table, from a position that hashes the seed, so a run rounds the same way on every machine.

Without a seed u is 1/2: rounding to the nearest, where no error feedback needs an unbiased error.

With 2 bits the levels are -3, -1, 1 and 3 times the scale. There is no room for unbiased rounding,
so a value takes the level beside it: 3 where it is at least the root mean square of its row, else
1. For normally distributed values no four levels have a much smaller error (Max, 1960: 0.1175 of
their square; evenly spaced ones 0.1188). There is no level for 0, and what has no gradient on any
rank must not move. So a row that holds a 0 takes the levels -2, 0 and 2 (0.19 of the square), and
its scale is sent negative. The scale minimizes the squared error of the row, so the norm of the
error is below that of the row, and error feedback makes it decay. Without error feedback the result
is biased. Sums over a row depend in their last bit on the processor; all ranks read the same
quantized values and scales.

With any number of bits zeros stay zeros. Rows whose scale (of 2 bits: whose largest value) is below
1.2e-38 become zeros. Rows with a value that is not finite become NaN.

``codec`` rounds payloads by it, ``blocks`` residuals; backends have the same in C and Triton.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .payload import ROW, Scratch, choose_block_size, count_rows, packed_bytes

LARGEST = {8: 127.0, 4: 7.0}
# Of scales: 1 / scale is finite.
SMALLEST = torch.finfo(torch.float32).tiny
# With 2 bits, in a row with zeros: from which share of the others' root mean square on a value is
# not rounded to 0. That of the least error of normally distributed values (Max, 1960).
EDGE_BESIDE_ZERO = 0.612
# Length of the table of u: the 65536 midpoints of equal parts of [0, 1).
NOISE_TABLE = 65536
# Rows at a time: they stay in a core's cache from one pass to the next.
BLOCK_ROWS = NOISE_TABLE // ROW
# From the table offset of one block to that of the next.
NOISE_STRIDE = 40503


# How a message is cut into rows, and rows into chunks


class RowSpan(NamedTuple):
    """A run of ``n`` consecutive values. It starts at element ``at`` of the body or chunk, and
    fills rows from number ``row`` on.
    """

    at: int
    row: int
    n: int


class Chunk(NamedTuple):
    """The part of a body that one rank averages: values ``start`` to ``stop``, ``rows`` rows."""

    start: int
    stop: int
    first_row: int
    rows: int
    spans: tuple[RowSpan, ...]


class RowLayout(NamedTuple):
    """Rows and chunks of a body; ``max_values`` and ``max_rows`` are those of the largest chunk."""

    rows: int
    spans: tuple[RowSpan, ...]
    chunks: tuple[Chunk, ...]
    max_values: int
    max_rows: int


@lru_cache(maxsize=256)
def row_layout(lengths: tuple[int, ...], ranks: int) -> RowLayout:
    """Cut a body of tensors with these lengths into rows, and the rows into a chunk for each rank.

    Every tensor begins a new row, so that no two tensors share a scale. Chunks are cut between
    rows.
    """
    values = rows = 0
    spans: list[RowSpan] = []
    for n in filter(None, lengths):
        if spans and spans[-1].n % ROW == 0:  # it ends with a full row, so this tensor follows
            at, row, before = spans.pop()
            spans.append(RowSpan(at, row, before + n))
        else:
            spans.append(RowSpan(values, rows, n))
        values, rows = values + n, rows + count_rows(n)
    ends, cuts = [at + n for at, _, n in spans], [(0, 0)]
    for rank in range(1, ranks):  # its chunk begins with the first row from an equal share on
        share = values * rank // ranks
        at, row, n = spans[bisect_left(ends, share)] if spans else (0, 0, 0)
        full_rows = count_rows(max(0, share - at))
        cuts.append((at + min(ROW * full_rows, n), row + full_rows))
    cuts.append((values, rows))
    chunks: list[Chunk] = []
    for (start, first), (stop, last) in pairwise(cuts):
        parts: list[RowSpan] = []
        for at, row, n in spans:
            a, b = max(at, start), min(at + n, stop)
            if a < b:
                parts.append(RowSpan(a - start, row + (a - at) // ROW - first, b - a))
        chunks.append(Chunk(start, stop, first, last - first, tuple(parts)))
    max_values = max(chunk.stop - chunk.start for chunk in chunks)
    max_rows = max(chunk.rows for chunk in chunks)
    return RowLayout(rows, tuple(spans), tuple(chunks), max_values, max_rows)


def join_chunks(chunks: Sequence[Chunk]) -> tuple[tuple[RowSpan, ...], int]:
    """Return the spans of chunks that follow each other, from the first one on, and their rows."""
    start, first = chunks[0].start, chunks[0].first_row
    spans = (
        RowSpan(chunk.start - start + at, chunk.first_row - first + row, n)
        for chunk in chunks
        for at, row, n in chunk.spans
    )
    return tuple(spans), sum(chunk.rows for chunk in chunks)


def values_to_rows(
    values: Tensor, spans: tuple[RowSpan, ...], rows: int, use: str, scratch: Scratch
) -> Tensor:
    """Return flat values as (rows, 128), with zeros behind a tensor that ends within a row.

    The result is a view of ``values`` where all rows are full.
    """
    if len(values) == rows * ROW and values.is_contiguous():
        return values.view(rows, ROW)
    out = scratch(use, rows * ROW, values.dtype, values.device)
    for at, row, n in spans:
        out[ROW * row : ROW * row + n] = values[at : at + n]
        out[ROW * row + n : ROW * (row + count_rows(n))] = 0
    return out.view(rows, ROW)


def rows_to_values(rows: Tensor, spans: tuple[RowSpan, ...], out: Tensor) -> None:
    """Copy rows to flat ``out``, without the padding after each tensor.

    Nothing is copied where ``rows`` is a view of ``out``.
    """
    if rows.data_ptr() == out.data_ptr():
        return
    flat = rows.view(-1)
    for at, row, n in spans:
        out[at : at + n] = flat[ROW * row : ROW * row + n]


# Rounding rows


def quantize_rows(
    x: Tensor,
    spans: tuple[RowSpan, ...],
    quantized: Tensor,
    scales: Tensor,
    rounding_errors: Tensor,
    seed: tuple[int, ...] | None,
    scratch: Scratch,
    bits: int,
) -> None:
    """Quantize (rows, 128) values, which ``spans`` fill, to ``quantized`` (int8, one value each) in
    units of ``scales`` (float32).

    ``rounding_errors``, which may be x itself, gets the rounding error x - quantized * scale.
    Rounding to 2 bits is not random and ignores ``seed``.
    """
    if bits == 2:
        _round_to_four_levels(x, spans, quantized, scales, rounding_errors, scratch)
        return
    offset, most = noise_offset(seed), LARGEST[bits]
    noise = noise_table(x.dtype, x.device, seed is not None)
    block = choose_block_size(x, on_cpu=BLOCK_ROWS)
    for number, a in enumerate(range(0, len(x), block)):
        x_, scale, drop = x[a : a + block], scales[a : a + block], rounding_errors[a : a + block]
        t = scratch("block", x_.numel(), x.dtype, x.device).view(x_.shape)
        unit = divide_(torch.abs(x_, out=t).amax(1), most)
        scale.copy_(unit.masked_fill_(unit < SMALLEST, 0))
        # inf becomes NaN.
        scale.add_(scale - scale)
        unit = scale.to(x.dtype).unsqueeze(1)
        torch.mul(x_, torch.where(unit > 0, 1 / unit, 0), out=t)
        u = select_noise(noise, offset + NOISE_STRIDE * number, x_.numel())
        t.add_(u.view(x_.shape)).floor_().clamp_(-most, most)
        quantized[a : a + block].copy_(t)
        torch.sub(x_, t.mul_(unit), out=drop)


def _round_to_four_levels(
    x: Tensor,
    spans: tuple[RowSpan, ...],
    quantized: Tensor,
    scales: Tensor,
    rounding_errors: Tensor,
    scratch: Scratch,
) -> None:
    """Quantize rows to 2 bits: each value to the level q beside it, -3, -1, 1 or 3, with the scale
    <x, q> / <q, q>, which minimizes the squared error of the row.

    In a row with zeros q is -2, 0 or 2, written as q - 1 beside a negative scale.
    """
    values = x.new_full((len(x),), ROW)  # in each row: fewer if a tensor ends within it
    for _, row, length in spans:
        if length % ROW:
            values[row + count_rows(length) - 1] = length % ROW
    block = choose_block_size(x, on_cpu=BLOCK_ROWS)
    for a in range(0, len(x), block):
        x_, n, level, scale, drop = (
            rows[a : a + block] for rows in (x, values, quantized, scales, rounding_errors)
        )
        t, q = (
            scratch(use, x_.numel(), x.dtype, x.device).view(x_.shape) for use in ("block", "level")
        )
        largest = torch.abs(x_, out=t).amax(1)
        has_zeros, lowest, count = find_zeros(t, n)
        inverse = torch.where(largest >= SMALLEST, 1 / largest, largest - largest)
        torch.mul(x_, inverse.unsqueeze(1), out=t)  # squares of values up to 1 are finite
        square = torch.mul(t, t, out=q).sum(1)
        edge = (square / count).sqrt_().unsqueeze(1)
        torch.abs(t, out=q).ge_(edge).mul_(2).add_(lowest)
        q.copysign_(t)
        level.copy_(q)
        x_dot_q = t.mul_(q).sum(1)
        q_dot_q = q.mul_(q).sum(1).sub_((ROW - n) * lowest.view(-1))  # zeros behind the values
        scale.copy_(x_dot_q.div_(q_dot_q).mul_(largest))
        scale.masked_fill_(scale < SMALLEST, 0)
        # inf becomes NaN.
        scale.add_(scale - scale)
        if has_zeros is not None:
            level.sub_(has_zeros.to(level.dtype))
            scale.copysign_(lowest.view(-1) - 0.5)
        torch.sub(x_, dequantize_rows(level, scale, t, bits=2), out=drop)


def find_zeros(magnitudes: Tensor, lengths: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return which rows of these lengths have zeros, and not only zeros (None: no row); the lowest
    level of each row; and by what to divide the sum of its squares for the square of the edge
    between two levels.
    """
    if not is_any(magnitudes.amin() == 0):  # a look at the smallest is cheaper than to count
        return None, lengths.new_ones(1), lengths
    nonzero = torch.count_nonzero(magnitudes, 1)
    has_zeros = (nonzero < lengths) & (nonzero > 0)
    count = torch.where(has_zeros, nonzero / EDGE_BESIDE_ZERO**2, lengths)
    return has_zeros.unsqueeze(1), (~has_zeros).to(lengths.dtype).unsqueeze(1), count


def is_any(flags: Tensor) -> bool:
    """Return False if none is set; on a device, whose answer the host would wait for, True."""
    return flags.device.type != "cpu" or bool(flags.any())


def divide_(x: Tensor, number: float) -> Tensor:
    """Divide by a number, with the same bits on all devices: by one that the host holds CUDA does
    not divide, it multiplies by the inverse.
    """
    return x.div_(x.new_full((), number))


def dequantize_rows(quantized: Tensor, scales: Tensor, out: Tensor, bits: int) -> Tensor:
    """Return quantized * scale of each row, in ``out``."""
    by_row = scales.unsqueeze(1)
    if bits == 2 and is_any(is_less_by_one := by_row < 0):
        return out.copy_(quantized).add_(is_less_by_one).mul_(by_row.abs())
    return out.copy_(quantized).mul_(by_row)


def noise_offset(seed: tuple[int, ...] | None) -> int:
    """Return the position in the table of u from which a seed's numbers are read."""
    if seed is None:
        return 0
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % NOISE_TABLE


def select_noise(table: Tensor, offset: int, n: int) -> Tensor:
    """Return the numbers u of n values; the first block begins at ``offset``."""
    offset %= NOISE_TABLE
    if n <= NOISE_TABLE:
        return table[offset : offset + n]
    offsets = torch.arange(count_rows(n) // BLOCK_ROWS + 1, dtype=torch.int64, device=table.device)
    offsets.mul_(NOISE_STRIDE).add_(offset).remainder_(NOISE_TABLE)
    return table.unfold(0, NOISE_TABLE, 1).index_select(0, offsets).view(-1)[:n]


@lru_cache(maxsize=16)
def noise_table(dtype: torch.dtype, device: torch.device, is_random: bool = True) -> Tensor:
    """Return the numbers u in a random order, twice: NOISE_TABLE of them follow any offset.

    If not ``is_random``, they are all 1/2.
    """
    if not is_random:
        return torch.full((2 * NOISE_TABLE,), 0.5, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(NOISE_TABLE, dtype=torch.int64, generator=generator, device="cpu")
    return torch.cat([order, order]).add(0.5).div_(NOISE_TABLE).to(device, dtype)


# Packing quantized values into bytes


def pack_int4(values: Tensor, out: Tensor) -> None:
    """Pack values of 4 bits, each in an int8, into half as many bytes: a value of the first half
    + 16 times one of the second.
    """
    half = len(out)
    out.copy_(values[:half])
    out[: len(values) - half].add_(values[half:], alpha=16)


def unpack_int4(packed: Tensor, out: Tensor) -> Tensor:
    """Invert ``pack_int4``. Values are in -7 to 7, so that rounding a 16th of a byte gives the one
    of the second half.
    """
    half = len(packed)
    first, second = out[:half].copy_(packed), out[half:]
    torch.add(packed[: len(second)], 8, out=second).bitwise_right_shift_(4)
    first[: len(second)].sub_(second, alpha=16)
    return out


def pack_int2(levels: Tensor, out: Tensor) -> None:
    """Pack levels, each in an int8, into a quarter as many bytes: the lowest two bits of a byte are
    a level of the first quarter, the next two one of the second.
    """
    quarter = len(out)
    out.zero_()
    for number, part in enumerate(levels.split(quarter) if quarter else ()):
        index = (part + 3).bitwise_right_shift_(1)  # 0 to 3
        out[: len(part)].add_(index, alpha=(1, 4, 16, 64)[number])


def unpack_int2(packed: Tensor, out: Tensor) -> Tensor:
    """Invert ``pack_int2``."""
    quarter = len(packed)
    for number, part in enumerate(out.split(quarter) if quarter else ()):
        torch.bitwise_right_shift(packed[: len(part)], 2 * number, out=part)
        part.bitwise_and_(3).mul_(2).sub_(3)
    return out


# how values of fewer than 8 bits are packed and unpacked
PACKING = {4: (pack_int4, unpack_int4), 2: (pack_int2, unpack_int2)}


# A chunk of rows in a message


def write_chunk(rows: Tensor, chunk: Chunk, out: Tensor, scratch: Scratch, bits: int) -> None:
    """Write quantized rows of a chunk to its place in a message, int8."""
    if bits == 8:
        rows_to_values(rows, chunk.spans, out)
        return
    n = chunk.stop - chunk.start
    values = rows.view(-1)[:n]
    if len(chunk.spans) > 1:  # with gaps between them
        values = scratch("quantized chunk", n, torch.int8, rows.device)
        rows_to_values(rows, chunk.spans, values)
    pack, _ = PACKING[bits]
    pack(values, out[: packed_bytes(n, bits)])


def read_chunk(message: Tensor, chunk: Chunk, scratch: Scratch, bits: int) -> Tensor:
    """Return the quantized rows of a chunk in a message; they are valid until the next call."""
    n = chunk.stop - chunk.start
    values = message[: packed_bytes(n, bits)]
    if bits < 8:
        out = scratch("quantized chunk", n, torch.int8, message.device)
        _, unpack = PACKING[bits]
        values = unpack(values, out)
    return values_to_rows(values, chunk.spans, chunk.rows, "quantized", scratch)
