"""int8 and int4 payloads: rounding into messages, the mean of all ranks' messages, and back.

References: ``quantize_rows``, ``dequantize_rows``, ``pack_int4`` of
``compopt/_wire/quantization.py``, between which ``QuantizedMean`` of ``_wire/codec.py`` moves rows.
The bits are the same, except where the reference adds ranks * x in one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import INTERPRETED, inlined, on, upload

ROW = 128  # values that share a scale
ROWS = 64 if INTERPRETED else 8  # rows a program
# as in the reference: rows of a block, random numbers u, from one block's place to the next
BLOCK_ROWS, TABLE, STRIDE = 512, 65536, 40503
BYTES = 4096 if INTERPRETED else 1024  # that a program packs
ROW_, BLOCK_ROWS_, TABLE_, STRIDE_ = (tl.constexpr(n) for n in (ROW, BLOCK_ROWS, TABLE, STRIDE))
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)

# a chunk: start in the body, first row, values; pieces (value, row, values), from the chunk's start
Cut = tuple[int, int, int, tuple[tuple[int, int, int], ...]]


class Programs:
    """Chunks of a body, cut into programs of some rows; none spans two chunks or two pieces.

    ``where``: for each program its first value and row in its chunk, the number of its values, and
    the chunk. ``chunks``: for each chunk its start, first row and values. ``first[c]``: the first
    program of chunk c.
    """

    def __init__(self, cuts: Sequence[Cut], device: torch.device):
        tables, counts = [], []
        for number, (_, _, _, pieces) in enumerate(cuts):
            counts.append(0)
            for at, row, n in pieces:
                begin = torch.arange(0, n, ROWS * ROW, dtype=torch.int64, device="cpu")
                counts[-1] += len(begin)
                columns = [at + begin, row + begin // ROW, (n - begin).clamp(max=ROWS * ROW)]
                tables.append(torch.stack([*columns, torch.full_like(begin, number)], 1))
        table = torch.cat(tables) if tables else torch.empty(0, 4, dtype=torch.int64, device="cpu")
        self.device = device
        self.where = upload(table.to(torch.int32), device)
        heads = torch.tensor([cut[:3] for cut in cuts], dtype=torch.int32, device="cpu")
        self.chunks = upload(heads, device)
        self.first = [0, *torch.tensor(counts, dtype=torch.int64, device="cpu").cumsum(0).tolist()]
        self.largest = max((cut[2] for cut in cuts), default=0)

    def launch(
        self, kernel: triton.JITFunction, *arguments: object, chunk: int | None, bits: int
    ) -> None:
        """Launch the kernel on one chunk (None: on all)."""
        first, last = (0, len(self.where)) if chunk is None else self.first[chunk : chunk + 2]
        if last > first:
            with on(self.device):
                kernel[(last - first,)](
                    self.where[first:],
                    self.chunks,
                    *arguments,
                    BITS=bits,
                    ROWS=ROWS,
                    enable_fp_fusion=False,
                )


@lru_cache(maxsize=256)
def make_programs(cuts: tuple[Cut, ...], device: torch.device) -> Programs:
    """Return the programs of these chunks; cached."""
    return Programs(cuts, device)


@inlined
def _load_chunk(rows_of, chunks, ROWS: tl.constexpr):
    """Return this program's first value and row in its chunk, its elements, which of them are in
    range, their number, its chunk, and where that begins.
    """
    program = rows_of + 4 * tl.program_id(0)
    at, row, n, chunk = (
        tl.load(program),
        tl.load(program + 1),
        tl.load(program + 2),
        tl.load(program + 3),
    )
    i = tl.arange(0, ROWS)[:, None] * ROW_ + tl.arange(0, ROW_)[None, :]
    return at, row, i, i < n, n, chunk, chunks + 3 * chunk


@inlined
def _round(x, noise, place, row, in_range, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Return codes, as whole float32, and the scale of each row; NaN where one is not finite."""
    most = 127.0 if BITS == 8 else 7.0
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, tl.full([ROWS], most, tl.float32))
    scale = tl.where(scale < SMALLEST, 0.0, scale)  # 1 / scale is finite
    scale = tl.where(tl.sum((x - x != 0).to(tl.int32), 1) > 0, float("nan"), scale)
    safe = tl.where(scale > 0, scale, 1.0)
    per = tl.where(scale > 0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), safe), 0.0)
    r = row + tl.arange(0, ROWS)
    entered = (place + STRIDE_ * (r // BLOCK_ROWS_)) % TABLE_ + (r % BLOCK_ROWS_) * ROW_
    u = tl.load(noise + entered[:, None] + tl.arange(0, ROW_)[None, :], mask=in_range, other=0)
    t = tl.floor(x * per[:, None] + u)
    return tl.minimum(tl.maximum(t, -most), most), scale


@inlined
def _store_codes(
    message,
    codes,
    scales_at,
    codes_at,
    start,
    at,
    row,
    i,
    in_range,
    n,
    t,
    scale,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store scales in a message, and codes: int8 in the message, int4 apart, to be packed."""
    r = tl.arange(0, ROWS)
    scales = (message + scales_at).to(tl.pointer_type(tl.float32))
    tl.store(scales + row + r, scale, mask=r * ROW_ < n)
    if BITS == 8:
        target = (message + codes_at).to(tl.pointer_type(tl.int8))
        tl.store(target + at + i, t.to(tl.int8), mask=in_range)
    else:
        tl.store(codes + start + at + i, t.to(tl.int8), mask=in_range)


@inlined
def _load_code(codes, j, in_range, size, BITS: tl.constexpr):
    """Load code j of a message, as float32."""
    bytes_ = codes.to(tl.pointer_type(tl.int8))
    if BITS == 8:
        return tl.load(bytes_ + j, mask=in_range, other=0).to(tl.float32)
    half = (size + 1) // 2
    byte = tl.load(bytes_ + tl.where(j < half, j, j - half), mask=in_range, other=0).to(tl.int32)
    second = (byte + 8) >> 4
    return tl.where(j < half, byte - 16 * second, second).to(tl.float32)


@triton.jit
def _quantize(
    rows_of,
    chunks,
    body,
    rounding_errors,
    noise,
    message,
    codes,
    place,
    stride,
    scales_at,
    codes_at,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    at, row, i, in_range, n, chunk, head = _load_chunk(rows_of, chunks, ROWS)
    start = tl.load(head)
    x = tl.load(body + start + at + i, mask=in_range, other=0)
    t, scale = _round(x, noise, place, tl.load(head + 1) + row, in_range, BITS, ROWS)
    target = message + chunk.to(tl.int64) * stride
    _store_codes(
        target, codes, scales_at, codes_at, start, at, row, i, in_range, n, t, scale, BITS, ROWS
    )
    tl.store(rounding_errors + start + at + i, x - t * scale[:, None], mask=in_range)


@triton.jit
def _mean(
    rows_of,
    chunks,
    received,
    rounding_errors,
    noise,
    message,
    codes,
    place,
    stride,
    scales_at,
    codes_at,
    own_codes_at,
    ranks,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    at, row, i, in_range, n, _, head = _load_chunk(rows_of, chunks, ROWS)
    start, size, r = tl.load(head), tl.load(head + 2), tl.arange(0, ROWS)
    total = tl.zeros([ROWS, ROW_], tl.float32)
    for rank in range(ranks):
        source = received + tl.full([], rank, tl.int64) * stride
        scales = (source + scales_at).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + row + r, mask=r * ROW_ < n, other=0)
        total += _load_code(source + codes_at, at + i, in_range, size, BITS) * scale[:, None]
    total = tl.div_rn(total, tl.full([ROWS, ROW_], 1.0, tl.float32) * ranks)
    t, scale = _round(total, noise, place, row, in_range, BITS, ROWS)
    _store_codes(
        message, codes, 0, own_codes_at, start, at, row, i, in_range, n, t, scale, BITS, ROWS
    )
    errors = rounding_errors + start + at + i
    rest = total - t * scale[:, None]
    tl.store(errors, tl.load(errors, mask=in_range, other=0) + rest * ranks, mask=in_range)


@triton.jit
def _dequantize(
    rows_of, chunks, gathered, body, stride, codes_at, BITS: tl.constexpr, ROWS: tl.constexpr
):
    at, row, i, in_range, n, chunk, head = _load_chunk(rows_of, chunks, ROWS)
    source, r = gathered + chunk.to(tl.int64) * stride, tl.arange(0, ROWS)
    scale = tl.load(source.to(tl.pointer_type(tl.float32)) + row + r, mask=r * ROW_ < n, other=0)
    code = _load_code(source + codes_at, at + i, in_range, tl.load(head + 2), BITS)
    tl.store(body + tl.load(head) + at + i, code * scale[:, None], mask=in_range)


@triton.jit
def _pack4(chunks, codes, message, stride, codes_at, BYTES: tl.constexpr):
    """Pack a code of the chunk's first half + 16 times one of the second into each byte."""
    chunk = tl.program_id(1).to(tl.int64)
    start, size = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 2)
    half, i = (size + 1) // 2, tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    first = tl.load(codes + start + i, mask=i < half, other=0).to(tl.int32)
    second = tl.load(codes + start + half + i, mask=half + i < size, other=0).to(tl.int32)
    target = (message + chunk * stride + codes_at).to(tl.pointer_type(tl.int8))
    tl.store(target + i, (first + 16 * second).to(tl.int8), mask=i < half)


@triton.jit
def _words(received, out, count, stride, ranks, BLOCK: tl.constexpr):
    """Average the float32 words in front of messages, in the order of ranks."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(received.to(tl.pointer_type(tl.float32)) + i, mask=i < count, other=0)
    for rank in range(1, ranks):
        source = (received + tl.full([], rank, tl.int64) * stride).to(tl.pointer_type(tl.float32))
        total += tl.load(source + i, mask=i < count, other=0)
    tl.store(out + i, tl.div_rn(total, tl.full([BLOCK], 1.0, tl.float32) * ranks), mask=i < count)


def quantize(
    cut: Programs,
    body: Tensor,
    rounding_errors: Tensor,
    noise: Tensor,
    place: int,
    messages: Tensor,
    scales_at: int,
    codes_at: int,
    bits: int,
) -> None:
    """Round all of ``body`` into the ranks' ``messages``, shape (ranks, bytes); write the rounding
    errors to ``rounding_errors``.

    ``noise``: the table of numbers u, twice; ``place``: where it is entered. ``scales_at``,
    ``codes_at``: bytes of a message in front of scales and codes.
    """
    codes, stride = _code_memory(body, bits), messages.stride(0)
    cut.launch(
        _quantize,
        body,
        rounding_errors,
        noise,
        messages,
        codes,
        place,
        stride,
        scales_at,
        codes_at,
        chunk=None,
        bits=bits,
    )
    _pack(cut, 0, len(messages), codes, messages, stride, codes_at, bits)


def mean_of_codes(
    cut: Programs,
    rank: int,
    received: Tensor,
    rounding_errors: Tensor,
    noise: Tensor,
    place: int,
    message: Tensor,
    scales_at: int,
    codes_at: int,
    own_codes_at: int,
    bits: int,
) -> None:
    """Average all ranks' codes of chunk ``rank`` and round the mean into one ``message`` for all;
    add ranks times the rounding error to its part of ``rounding_errors``.
    """
    codes, stride = _code_memory(rounding_errors, bits), received.stride(0)
    cut.launch(
        _mean,
        received,
        rounding_errors,
        noise,
        message,
        codes,
        place,
        stride,
        scales_at,
        codes_at,
        own_codes_at,
        len(received),
        chunk=rank,
        bits=bits,
    )
    _pack(cut, rank, 1, codes, message, 0, own_codes_at, bits)


def dequantize(cut: Programs, gathered: Tensor, body: Tensor, codes_at: int, bits: int) -> None:
    """Write what chunks' owners sent, shape (ranks, bytes), to ``body``."""
    cut.launch(_dequantize, gathered, body, gathered.stride(0), codes_at, chunk=None, bits=bits)


def mean_of_headers(received: Tensor, out: Tensor) -> None:
    """Average over ranks the float32 words in front of messages, shape (ranks, bytes)."""
    if len(out):
        with on(out.device):
            _words[(triton.cdiv(len(out), 256),)](
                received, out, len(out), received.stride(0), len(received), BLOCK=256
            )


def _code_memory(like: Tensor, bits: int) -> Tensor:
    """Return memory for int4 codes before they are packed; int8 codes go into messages."""
    return torch.empty(len(like) if bits == 4 else 0, dtype=torch.int8, device=like.device)


def _pack(
    cut: Programs,
    first: int,
    count: int,
    codes: Tensor,
    out: Tensor,
    stride: int,
    codes_at: int,
    bits: int,
) -> None:
    if bits == 4 and cut.largest:
        grid = (triton.cdiv((cut.largest + 1) // 2, BYTES), count)
        with on(cut.device):
            _pack4[grid](cut.chunks[first:], codes, out, stride, codes_at, BYTES=BYTES)
