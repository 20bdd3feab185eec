"""int8 and int4 payloads: rounding into messages, the mean of what ranks sent, and back.

References: ``quantise``, ``dequantise``, ``pack``, ``unpack`` of ``compopt/_wire/quantise.py``,
between which ``quantised_mean.QuantisedMean`` moves rows. The same bits, but where the reference
adds ranks * x in one rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import INTERPRETED, inlined, on
from ._programs import ROW, Programs

# As in the reference: rows of a block, numbers u, from one block's place to the next one's.
BLOCK_ROWS, TABLE, STRIDE = 512, 65536, 40503
# Bytes that a program packs.
BYTES = 4096 if INTERPRETED else 1024
ROW_, BLOCK_ROWS_, TABLE_, STRIDE_ = (tl.constexpr(n) for n in (ROW, BLOCK_ROWS, TABLE, STRIDE))
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


@inlined
def _own(rows_of, chunks, ROWS: tl.constexpr):
    """This program's first value and row in its chunk, its elements, which there are, its chunk and
    where that begins.
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
def _rounded(x, noise, place, row, there, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Codes, as whole float32, and the scale of each row; NaN where one is not finite."""
    most = 127.0 if BITS == 8 else 7.0
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, tl.full([ROWS], most, tl.float32))
    scale = tl.where(scale < SMALLEST, 0.0, scale)  # 1 / scale is finite
    scale = tl.where(tl.sum((x - x != 0).to(tl.int32), 1) > 0, float("nan"), scale)
    safe = tl.where(scale > 0, scale, 1.0)
    per = tl.where(scale > 0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), safe), 0.0)
    r = row + tl.arange(0, ROWS)
    entered = (place + STRIDE_ * (r // BLOCK_ROWS_)) % TABLE_ + (r % BLOCK_ROWS_) * ROW_
    u = tl.load(noise + entered[:, None] + tl.arange(0, ROW_)[None, :], mask=there, other=0)
    t = tl.floor(x * per[:, None] + u)
    return tl.minimum(tl.maximum(t, -most), most), scale


@inlined
def _store(
    message,
    codes,
    scales_at,
    codes_at,
    start,
    at,
    row,
    i,
    there,
    n,
    t,
    scale,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scales into a message; codes too, but of 4 bits they are kept apart to be packed."""
    r = tl.arange(0, ROWS)
    scales = (message + scales_at).to(tl.pointer_type(tl.float32))
    tl.store(scales + row + r, scale, mask=r * ROW_ < n)
    if BITS == 8:
        own = (message + codes_at).to(tl.pointer_type(tl.int8))
        tl.store(own + at + i, t.to(tl.int8), mask=there)
    else:
        tl.store(codes + start + at + i, t.to(tl.int8), mask=there)


@inlined
def _code(codes, j, there, size, BITS: tl.constexpr):
    """Code j of a message's, as float32."""
    bytes_ = codes.to(tl.pointer_type(tl.int8))
    if BITS == 8:
        return tl.load(bytes_ + j, mask=there, other=0).to(tl.float32)
    half = (size + 1) // 2
    byte = tl.load(bytes_ + tl.where(j < half, j, j - half), mask=there, other=0).to(tl.int32)
    second = (byte + 8) >> 4
    return tl.where(j < half, byte - 16 * second, second).to(tl.float32)


@triton.jit
def _quantise(
    rows_of,
    chunks,
    body,
    dropped,
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
    at, row, i, there, n, chunk, head = _own(rows_of, chunks, ROWS)
    start = tl.load(head)
    x = tl.load(body + start + at + i, mask=there, other=0)
    t, scale = _rounded(x, noise, place, tl.load(head + 1) + row, there, BITS, ROWS)
    own = message + chunk.to(tl.int64) * stride
    _store(own, codes, scales_at, codes_at, start, at, row, i, there, n, t, scale, BITS, ROWS)
    tl.store(dropped + start + at + i, x - t * scale[:, None], mask=there)


@triton.jit
def _mean(
    rows_of,
    chunks,
    received,
    dropped,
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
    at, row, i, there, n, _, head = _own(rows_of, chunks, ROWS)
    start, size, r = tl.load(head), tl.load(head + 2), tl.arange(0, ROWS)
    total = tl.zeros([ROWS, ROW_], tl.float32)
    for rank in range(ranks):
        theirs = received + tl.full([], rank, tl.int64) * stride
        scales = (theirs + scales_at).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + row + r, mask=r * ROW_ < n, other=0)
        total += _code(theirs + codes_at, at + i, there, size, BITS) * scale[:, None]
    total = tl.div_rn(total, tl.full([ROWS, ROW_], 1.0, tl.float32) * ranks)
    t, scale = _rounded(total, noise, place, row, there, BITS, ROWS)
    _store(message, codes, 0, own_codes_at, start, at, row, i, there, n, t, scale, BITS, ROWS)
    mine = dropped + start + at + i
    rest = total - t * scale[:, None]
    tl.store(mine, tl.load(mine, mask=there, other=0) + rest * ranks, mask=there)


@triton.jit
def _dequantise(
    rows_of, chunks, gathered, body, stride, codes_at, BITS: tl.constexpr, ROWS: tl.constexpr
):
    at, row, i, there, n, chunk, head = _own(rows_of, chunks, ROWS)
    theirs, r = gathered + chunk.to(tl.int64) * stride, tl.arange(0, ROWS)
    scale = tl.load(theirs.to(tl.pointer_type(tl.float32)) + row + r, mask=r * ROW_ < n, other=0)
    code = _code(theirs + codes_at, at + i, there, tl.load(head + 2), BITS)
    tl.store(body + tl.load(head) + at + i, code * scale[:, None], mask=there)


@triton.jit
def _pack4(chunks, codes, message, stride, codes_at, BYTES: tl.constexpr):
    """A byte is a code of the chunk's first half + 16 times one of the second."""
    chunk = tl.program_id(1).to(tl.int64)
    start, size = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 2)
    half, i = (size + 1) // 2, tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    first = tl.load(codes + start + i, mask=i < half, other=0).to(tl.int32)
    second = tl.load(codes + start + half + i, mask=half + i < size, other=0).to(tl.int32)
    own = (message + chunk * stride + codes_at).to(tl.pointer_type(tl.int8))
    tl.store(own + i, (first + 16 * second).to(tl.int8), mask=i < half)


@triton.jit
def _words(received, out, count, stride, ranks, BLOCK: tl.constexpr):
    """The mean of float32 words in front of messages, added up in the order of ranks."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(received.to(tl.pointer_type(tl.float32)) + i, mask=i < count, other=0)
    for rank in range(1, ranks):
        theirs = (received + tl.full([], rank, tl.int64) * stride).to(tl.pointer_type(tl.float32))
        total += tl.load(theirs + i, mask=i < count, other=0)
    tl.store(out + i, tl.div_rn(total, tl.full([BLOCK], 1.0, tl.float32) * ranks), mask=i < count)


def quantise(
    cut: Programs,
    body: Tensor,
    dropped: Tensor,
    noise: Tensor,
    place: int,
    messages: Tensor,
    scales_at: int,
    codes_at: int,
    bits: int,
) -> None:
    """Round all of ``body`` into the ranks' ``messages``, shape (ranks, bytes); ``dropped`` gets
    what that took off.

    ``noise``: the table of numbers u, twice; ``place``: where it is entered. ``scales_at``,
    ``codes_at``: bytes of a message in front of scales and codes.
    """
    codes, stride = _room(body, bits), messages.stride(0)
    cut.run(
        _quantise,
        body,
        dropped,
        noise,
        messages,
        codes,
        place,
        stride,
        scales_at,
        codes_at,
        own=None,
        bits=bits,
    )
    _pack(cut, 0, len(messages), codes, messages, stride, codes_at, bits)


def mean(
    cut: Programs,
    rank: int,
    received: Tensor,
    dropped: Tensor,
    noise: Tensor,
    place: int,
    message: Tensor,
    scales_at: int,
    codes_at: int,
    own_codes_at: int,
    bits: int,
) -> None:
    """The mean of what ranks sent of chunk ``rank``, rounded into one ``message`` for all; its
    share of ``dropped`` gets ranks times what that took off.
    """
    codes, stride = _room(dropped, bits), received.stride(0)
    cut.run(
        _mean,
        received,
        dropped,
        noise,
        message,
        codes,
        place,
        stride,
        scales_at,
        codes_at,
        own_codes_at,
        len(received),
        own=rank,
        bits=bits,
    )
    _pack(cut, rank, 1, codes, message, 0, own_codes_at, bits)


def dequantise(cut: Programs, gathered: Tensor, body: Tensor, codes_at: int, bits: int) -> None:
    """What chunks' owners sent, shape (ranks, bytes), into ``body``."""
    cut.run(_dequantise, gathered, body, gathered.stride(0), codes_at, own=None, bits=bits)


def mean_of_words(received: Tensor, out: Tensor) -> None:
    """The mean over ranks of the float32 words in front of messages, shape (ranks, bytes)."""
    if len(out):
        with on(out.device):
            _words[(triton.cdiv(len(out), 256),)](
                received, out, len(out), received.stride(0), len(received), BLOCK=256
            )


def _room(like: Tensor, bits: int) -> Tensor:
    """For codes that are packed afterwards; others go into messages at once."""
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
