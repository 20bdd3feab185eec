"""Codes of 8, 4 or 2 bits: rows of values rounded to them, and a chunk of rows in a message."""

from __future__ import annotations

import torch
from torch import Tensor

from . import two_bits
from .quantise import Chunk, Piece, code_bytes, join, pack, quantise, spread, unpack
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
