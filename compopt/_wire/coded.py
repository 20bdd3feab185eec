"""Codes of 8, 4 or 2 bits: rows of values rounded to them, and a chunk of rows in a message."""

from __future__ import annotations

import torch
from torch import Tensor

from . import two_bits
from .quantise import (
    ROW,
    Chunk,
    Piece,
    code_bytes,
    dequantise,
    join,
    pack,
    quantise,
    spread,
    unpack,
)
from .scratch import Scratch


def codes_of(
    x: Tensor,
    pieces: tuple[Piece, ...],
    codes: Tensor,
    scales: Tensor,
    rest: Tensor,
    seed: tuple[int, ...],
    scratch: Scratch,
    bits: int,
) -> None:
    """Round (rows, 128) values, which the ``pieces`` fill, to ``codes``, each in an int8, in units
    of ``scales``, float32; ``rest`` (x itself, or of its shape) gets what that takes off.

    Codes of 2 bits are not drawn, so they take no ``seed``.
    """
    if bits == 2:
        values = two_bits.filled(len(x), pieces, x)
        two_bits.quantise(x, values, codes, scales, rest, scratch)
    else:
        quantise(x, codes, scales, rest, seed, scratch, bits)


def write(rows: Tensor, chunk: Chunk, out: Tensor, scratch: Scratch, bits: int) -> None:
    """A chunk's codes into its place in a message, int8."""
    if bits == 8:
        join(rows, chunk.pieces, out)
        return
    n = chunk.stop - chunk.start
    codes = rows.view(-1)[:n]
    if len(chunk.pieces) > 1:  # with gaps between them
        codes = scratch("codes of a chunk", n, torch.int8, rows.device)
        join(rows, chunk.pieces, codes)
    packed = out[: code_bytes(n, bits)]
    if bits == 4:
        pack(codes, packed)
    else:
        two_bits.pack(codes, packed)


def read(message: Tensor, chunk: Chunk, scratch: Scratch, bits: int) -> Tensor:
    """The other way round: rows of codes, until the next are read."""
    n = chunk.stop - chunk.start
    codes = message[: code_bytes(n, bits)]
    if bits < 8:
        out = scratch("codes of a chunk", n, torch.int8, message.device)
        codes = unpack(codes, out) if bits == 4 else two_bits.unpack(codes, out)
    return spread(codes, chunk.pieces, chunk.rows, "codes", scratch)


def encode(
    x: Tensor,
    chunk: Chunk,
    scales: Tensor,
    out: Tensor,
    seed: tuple[int, ...],
    scratch: Scratch,
    bits: int,
) -> None:
    """A chunk of flat values into its scales and codes in a message; x is left with what rounding
    took off.
    """
    rows = spread(x, chunk.pieces, chunk.rows, "value", scratch)
    codes = scratch("codes", chunk.rows * ROW, torch.int8, x.device).view(-1, ROW)
    codes_of(rows, chunk.pieces, codes, scales, rows, seed, scratch, bits)
    join(rows, chunk.pieces, x)
    write(codes, chunk, out, scratch, bits)


def decode(
    scales: Tensor, message: Tensor, chunk: Chunk, out: Tensor, scratch: Scratch, bits: int
) -> None:
    """The other way round, into the chunk's flat values."""
    codes = read(message, chunk, scratch, bits)
    whole = len(out) == chunk.rows * ROW
    value = out if whole else scratch("value", chunk.rows * ROW, out.dtype, out.device)
    join(dequantise(codes, scales, value.view(-1, ROW)), chunk.pieces, out)
