"""int8 and int4 by C passes (kernels/native/quantize.c), which read and write memory once: the mean
of a payload, and a single chunk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._wire import quantization
from ..._wire.payload import ROW, Payload, Scratch, packed_bytes
from ..._wire.quantization import Chunk, QuantizedMean, noise_offset, noise_table, pack_int4
from .passes import Table, address, is_plain, run_over_rows


def can_quantize(bits: int, values: Tensor) -> bool:
    """True if the passes support this quantization; int2 and float64 are left to the reference."""
    return bits in (8, 4) and is_plain(values)


def make_mean(library: ctypes.CDLL, payload: Payload, rank: int, ranks: int) -> QuantizedMean:
    """Return this rank's part in the mean of a payload."""
    if can_quantize(payload.bits, payload.flat):
        return NativeMean(library, payload, rank, ranks)
    return QuantizedMean(payload, rank, ranks)


class NativeMean(QuantizedMean):
    """The reference's stages, with the same messages."""

    def __init__(self, library: ctypes.CDLL, payload: Payload, rank: int, ranks: int):
        super().__init__(payload, rank, ranks)
        self.library = library

    def round_payload(self) -> None:
        self.encode_for_owners(rounds=True)

    def encode_for_owners(self, rounds: bool = False) -> Tensor:
        chunks, size = self.layout.chunks, self.payload.body.numel()
        body = address("a payload", self.payload.body, size)
        rounding_errors = address("rounding errors", self.rounding_errors, size)
        out, fields, scales, packed = self._empty_messages(chunks, self.fields)
        fields.copy_(self.payload.flat[: self.fields])
        unpacked = unpacked_memory(packed, chunks, self.bits, self.scratch)
        parts = [
            ChunkMemory(
                chunk,
                body + 4 * chunk.start,
                scale.data_ptr(),
                values.data_ptr(),
                rounding_errors + 4 * chunk.start,
                chunk.first_row,
            )
            for chunk, scale, values in zip(chunks, scales, unpacked, strict=True)
        ]
        rounding = rounding_table((*self.seed, self.rank, 1), self.bits, rounds)
        run_over_chunks(parts, lambda table, a, b: self.library.quantize(table, a, b, rounding))
        if not rounds:  # a single process sends nothing
            pack(unpacked, packed, self.bits)
        return out

    def average_own_chunk(self, received: Tensor) -> Tensor:
        received, chunk = received.contiguous(), self.layout.chunks[self.rank]
        self._average_fields(self._split_messages(received, self.fields)[0])
        out, _, scales, packed = self._empty_messages([chunk], 0)
        unpacked = unpacked_memory(packed, [chunk], self.bits, self.scratch)
        rounding_errors = address(
            "rounding errors", self.rounding_errors, self.payload.body.numel()
        )
        places = scales.data_ptr(), unpacked[0].data_ptr(), rounding_errors + 4 * chunk.start
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
        run_over_chunks(
            [ChunkMemory(chunk, 0, *places)],
            lambda table, a, b: mean(table, a, b, rounding, messages),
        )
        pack(unpacked, packed, self.bits)
        return out[0]

    def decode_mean(self, gathered: Tensor) -> None:
        gathered, body = gathered.contiguous(), self.payload.body
        first = address("a payload", body, body.numel())
        _, scales, packed = self._split_messages(gathered, 0)
        parts = [
            ChunkMemory(chunk, first + 4 * chunk.start, scale.data_ptr(), values.data_ptr())
            for chunk, scale, values in zip(self.layout.chunks, scales, packed, strict=True)
        ]
        dequantize = self.library.dequantize
        run_over_chunks(parts, lambda table, a, b: dequantize(table, a, b, self.bits))

    def _empty_messages(
        self, chunks: Sequence[Chunk], fields: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return one message for each chunk, and its fields, scales and packed values. The rest of
        a short chunk is zero: old contents of that memory are never sent.
        """
        out = torch.empty(len(chunks), self._message_bytes(fields), dtype=torch.uint8, device="cpu")
        first, scales, packed = self._split_messages(out, fields)
        for chunk, scale, values in zip(chunks, scales, packed, strict=True):
            ends = chunk.rows, packed_bytes(chunk.stop - chunk.start, self.bits)
            for part, end in zip((scale, values), ends, strict=True):
                if end < len(part):
                    part[end:] = 0
        return out, first, scales, packed


def quantize(
    library: ctypes.CDLL,
    x: Tensor,
    chunk: Chunk,
    scales: Tensor,
    out: Tensor,
    seed: tuple[int, ...] | None,
    scratch: Scratch,
    bits: int,
) -> None:
    """The counterpart of ``quantization.quantize_chunk``."""
    if not can_quantize(bits, x):
        return quantization.quantize_chunk(x, chunk, scales, out, seed, scratch, bits)
    unpacked = unpacked_memory([out], [chunk], bits, scratch)
    values = address("values", x, chunk.stop - chunk.start)
    places = values, address("scales", scales, chunk.rows), unpacked[0].data_ptr(), values
    rounding = rounding_table(seed, bits)
    run_over_chunks(
        [ChunkMemory(chunk, *places)], lambda table, a, b: library.quantize(table, a, b, rounding)
    )
    pack(unpacked, [out], bits)


def dequantize(
    library: ctypes.CDLL,
    scales: Tensor,
    packed: Tensor,
    chunk: Chunk,
    out: Tensor,
    scratch: Scratch,
    bits: int,
) -> None:
    """The counterpart of ``quantization.dequantize_chunk``."""
    if not can_quantize(bits, out):
        return quantization.dequantize_chunk(scales, packed, chunk, out, scratch, bits)
    size = chunk.stop - chunk.start
    values, scale = address("values", out, size), address("scales", scales, chunk.rows)
    code = address("quantized values", packed, packed_bytes(size, bits), torch.int8)
    run_over_chunks(
        [ChunkMemory(chunk, values, scale, code)],
        lambda table, a, b: library.dequantize(table, a, b, bits),
    )


# Passes over chunks


class ChunkMemory(NamedTuple):
    """A chunk, and the addresses of its first value, scale, quantized value and rounding error; 0
    for what a pass does not use.

    ``first_row`` is the number of its first row, which determines the random numbers.
    """

    chunk: Chunk
    values: int
    scales: int
    quantized: int
    rounding_errors: int = 0
    first_row: int = 0


def run_over_chunks(chunks: Iterable[ChunkMemory], run: Callable[[Table, int, int], int]) -> None:
    """Call ``run(table, first, last)`` for all rows of a table of these chunks, on several threads.

    A row of the table is a part of a span: as many rows of values as a thread works on.
    """
    spans = [(memory, span) for memory in chunks for span in memory.chunk.spans]
    per_thread = -(-sum(span.n for _, span in spans) // torch.get_num_threads())
    step = max(ROW, -(-per_thread // ROW) * ROW)
    parts = [
        (memory, span.at + a, span.row + a // ROW, min(step, span.n - a))
        for memory, span in spans
        for a in range(0, span.n, step)
    ]
    lengths = [n for *_, n in parts]
    table = Table(
        len(parts),
        values=[memory.values + 4 * at for memory, at, _, _ in parts],
        scales=[memory.scales + 4 * row for memory, _, row, _ in parts],
        codes=[memory.quantized for memory, *_ in parts],
        rounding_errors=[memory.rounding_errors + 4 * at for memory, at, _, _ in parts],
        at=[at for _, at, _, _ in parts],
        row=[memory.first_row + row for memory, _, row, _ in parts],
        n=lengths,
        size=[memory.chunk.stop - memory.chunk.start for memory, *_ in parts],
    )
    run_over_rows(lengths, lambda first, last, _: run(table, first, last))


def rounding_table(seed: tuple[int, ...] | None, bits: int, rounds: bool = False) -> Table:
    """Return how the values of a message are rounded, as quantize.c reads it; ``rounds``: the
    values too become what other ranks receive.
    """
    noise = noise_table(torch.float32, torch.device("cpu"), seed is not None)
    numbers = address("random numbers", noise, len(noise))
    return Table(1, numbers=numbers, place=noise_offset(seed), bits=bits, rounds=rounds)


def unpacked_memory(
    packed: Iterable[Tensor], chunks: Sequence[Chunk], bits: int, scratch: Scratch
) -> list[Tensor]:
    """Return where chunks are quantized, one value a byte: int8 in their messages, int4 in scratch
    memory, for ``pack``.
    """
    if bits == 8:
        return list(packed)
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    return list(scratch("quantized", sum(sizes), torch.int8, torch.device("cpu")).split(sizes))


def pack(unpacked: list[Tensor], packed: Iterable[Tensor], bits: int) -> None:
    """Pack int4 values, one a byte, into their messages."""
    if bits == 4:
        for values, out in zip(unpacked, packed, strict=True):
            pack_int4(values, out[: packed_bytes(len(values), 4)])
