"""int8 and int4 by C passes (kernels/native/quantize.c), which read and write memory once: the mean
of a payload, and a chunk alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._wire import quantization
from ..._wire.payload import ROW, Payload, Scratch, packed_bytes
from ..._wire.quantization import Chunk, noise_offset, noise_table, pack_int4
from ..._wire.quantized_mean import QuantizedMean
from .passes import Table, address, is_plain, run_over_rows


class ChunkAddresses(NamedTuple):
    """Where in memory a chunk begins: its values, scales and codes, and its rounding errors.

    ``row`` is the number of its first row, which determines the random numbers.
    """

    values: int
    scales: int
    codes: int
    dropped: int = 0
    row: int = 0


class NativeMean(QuantizedMean):
    """The reference's stages, with the same messages; int2 and values in float64 are left to it."""

    def __init__(self, library: ctypes.CDLL, payload: Payload, rank: int, ranks: int):
        super().__init__(payload, rank, ranks)
        self.library = library
        self.fits = can_quantize(self.bits, payload.flat)

    def encode_for_owners(self) -> Tensor:
        if not self.fits:
            return super().encode_for_owners()
        body, dropped, chunks = self._body_address(), self._dropped_address(), self.layout.chunks
        out, words, scales, codes = self._empty_messages(chunks, self.fields)
        words.copy_(self.payload.flat[: self.fields])
        own = code_memory(list(codes), chunks, self.bits, self.scratch)
        parts = []
        for chunk, scale, code in zip(chunks, scales, own, strict=True):
            values, rest = body + 4 * chunk.start, dropped + 4 * chunk.start
            where = ChunkAddresses(values, scale.data_ptr(), code.data_ptr(), rest, chunk.first_row)
            parts.append((chunk, where))
        table, lengths = chunk_table(parts)
        rounding = rounding_table((*self.seed, self.rank, 1), self.bits)
        run_over_rows(lengths, lambda a, b, _: self.library.quantize(table, a, b, rounding))
        pack_codes(own, list(codes), self.bits)
        return out

    def average_own_chunk(self, received: Tensor) -> Tensor:
        if not self.fits:
            return super().average_own_chunk(received)
        received, chunk = received.contiguous(), self.layout.chunks[self.rank]
        self._average_fields(self._split_messages(received, self.fields)[0])
        out, _, scales, codes = self._empty_messages([chunk], 0)
        own = code_memory(list(codes), [chunk], self.bits, self.scratch)
        rest = self._dropped_address() + 4 * chunk.start
        where = ChunkAddresses(0, scales.data_ptr(), own[0].data_ptr(), rest)
        table, lengths = chunk_table([(chunk, where)])
        messages = Table(
            1,
            messages=address("messages", received, received.numel(), torch.uint8),
            stride=received.shape[1],
            scales_at=4 * self.fields,
            codes_at=4 * (self.fields + self.layout.max_rows),
            ranks=self.ranks,
        )
        rounding = rounding_table((*self.seed, self.rank, 2), self.bits)
        mean = self.library.mean_of_codes
        run_over_rows(lengths, lambda a, b, _: mean(table, a, b, rounding, messages))
        pack_codes(own, list(codes), self.bits)
        return out[0]

    def decode_mean(self, gathered: Tensor) -> None:
        if not self.fits:
            return super().decode_mean(gathered)
        gathered, body = gathered.contiguous(), self._body_address()
        _, scales, codes = self._split_messages(gathered, 0)
        rows = zip(self.layout.chunks, scales, codes, strict=True)
        table, lengths = chunk_table(
            (chunk, ChunkAddresses(body + 4 * chunk.start, scale.data_ptr(), code.data_ptr()))
            for chunk, scale, code in rows
        )
        run_over_rows(lengths, lambda a, b, _: self.library.dequantize(table, a, b, self.bits))

    def _empty_messages(
        self, chunks: Sequence[Chunk], words: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return one message for each chunk, and its fields. The rest of a short chunk is zero: old
        contents of that memory are never sent.
        """
        out = torch.empty(len(chunks), self._message_bytes(words), dtype=torch.uint8)
        first, scales, codes = self._split_messages(out, words)
        for chunk, scale, code in zip(chunks, scales, codes, strict=True):
            ends = chunk.rows, packed_bytes(chunk.stop - chunk.start, self.bits)
            for part, end in zip((scale, code), ends, strict=True):
                if end < len(part):
                    part[end:] = 0
        return out, first, scales, codes

    def _body_address(self) -> int:
        return address("a message", self.payload.body, self.payload.body.numel())

    def _dropped_address(self) -> int:
        return address("rounding errors", self.dropped, self.payload.body.numel())


def can_quantize(bits: int, values: Tensor) -> bool:
    """Whether the passes support these codes and values."""
    return bits in (8, 4) and is_plain(values)


def quantize(
    library: ctypes.CDLL,
    x: Tensor,
    chunk: Chunk,
    scales: Tensor,
    out: Tensor,
    seed: tuple[int, ...],
    scratch: Scratch,
    bits: int,
) -> None:
    """The counterpart of ``quantization.quantize_chunk``."""
    if not can_quantize(bits, x):
        return quantization.quantize_chunk(x, chunk, scales, out, seed, scratch, bits)
    (own,) = code_memory([out], [chunk], bits, scratch)
    values = address("values", x, chunk.stop - chunk.start)
    scale = address("scales", scales, chunk.rows)
    where = ChunkAddresses(values, scale, own.data_ptr(), values)
    table, lengths = chunk_table([(chunk, where)])
    rounding = rounding_table(seed, bits)
    run_over_rows(lengths, lambda a, b, _: library.quantize(table, a, b, rounding))
    pack_codes([own], [out], bits)


def dequantize(
    library: ctypes.CDLL,
    scales: Tensor,
    message: Tensor,
    chunk: Chunk,
    out: Tensor,
    scratch: Scratch,
    bits: int,
) -> None:
    """The counterpart of ``quantization.dequantize_chunk``."""
    if not can_quantize(bits, out):
        return quantization.dequantize_chunk(scales, message, chunk, out, scratch, bits)
    size = chunk.stop - chunk.start
    where = ChunkAddresses(
        address("values", out, size),
        address("scales", scales, chunk.rows),
        address("codes", message, packed_bytes(size, bits), torch.int8),
    )
    table, lengths = chunk_table([(chunk, where)])
    run_over_rows(lengths, lambda a, b, _: library.dequantize(table, a, b, bits))


def rounding_table(seed: tuple[int, ...], bits: int) -> Table:
    """Return how the values of a message are rounded, as quantize.c reads it."""
    u = noise_table(torch.float32, torch.device("cpu"))
    return Table(
        1, numbers=address("random numbers", u, len(u)), place=noise_offset(seed), bits=bits
    )


def code_memory(
    messages: list[Tensor], chunks: Sequence[Chunk], bits: int, scratch: Scratch
) -> list[Tensor]:
    """Return where the codes of chunks are written, one a byte: int8 in their messages, int4 in
    scratch memory, for ``pack_codes``.
    """
    if bits == 8:
        return messages
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    return list(scratch("codes", sum(sizes), torch.int8, torch.device("cpu")).split(sizes))


def pack_codes(own: list[Tensor], messages: list[Tensor], bits: int) -> None:
    """Pack int4 codes, one a byte, into their messages."""
    if bits == 4:
        for codes, out in zip(own, messages, strict=True):
            pack_int4(codes, out[: packed_bytes(len(codes), 4)])


def chunk_table(chunks: Iterable[tuple[Chunk, ChunkAddresses]]) -> tuple[Table, list[int]]:
    """Return the table of these chunks, some rows for each thread, and how many values each row
    has.
    """
    cuts = [(chunk, where, piece) for chunk, where in chunks for piece in chunk.spans]
    per_thread = -(-sum(piece.n for _, _, piece in cuts) // torch.get_num_threads())
    step = max(ROW, -(-per_thread // ROW) * ROW)
    rows = [
        (chunk, where, piece.at + a, piece.row + a // ROW, min(step, piece.n - a))
        for chunk, where, piece in cuts
        for a in range(0, piece.n, step)
    ]
    lengths = [n for *_, n in rows]
    table = Table(
        len(rows),
        values=[where.values + 4 * first for _, where, first, _, _ in rows],
        scales=[where.scales + 4 * row for _, where, _, row, _ in rows],
        codes=[where.codes for _, where, *_ in rows],
        dropped=[where.dropped + 4 * first for _, where, first, _, _ in rows],
        at=[first for _, _, first, _, _ in rows],
        row=[where.row + row for _, where, _, row, _ in rows],
        n=lengths,
        size=[chunk.stop - chunk.start for chunk, *_ in rows],
    )
    return table, lengths
