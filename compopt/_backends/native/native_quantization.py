"""int8 and int4 by C passes (kernels/native/quantize.c), which read and write memory once: the mean
of a payload, and a single chunk; and state in 8 bits (kernels/native/blocks.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._state.blocks import BLOCK_BYTES, BlockCodec
from ..._wire.codec import QuantizedCodec, QuantizedMean, Seed
from ..._wire.payload import ROW, Payload, Scratch, packed_bytes
from ..._wire.quantization import BLOCK_ROWS, Chunk, noise_offset, noise_table, pack_int4
from .passes import Table, address, is_plain, run_over_rows

FLOAT = 4  # bytes of a number: passes are given addresses, and their numbers are float32


def can_quantize(bits: int, values: Tensor) -> bool:
    """True if the passes support this quantization; int2 and float64 are left to the reference."""
    return bits in (8, 4) and is_plain(values)


class NativeCodec(QuantizedCodec):
    """``_wire.codec.QuantizedCodec`` by passes, where they support the values; payloads call it."""

    def __init__(self, library: ctypes.CDLL, bits: int):
        super().__init__(bits)
        self.library = library

    def make_mean(self, payload: Payload, rank: int, ranks: int) -> QuantizedMean:
        if can_quantize(self.bits, payload.flat):
            return NativeMean(self.library, payload, rank, ranks)
        return super().make_mean(payload, rank, ranks)

    def quantize(
        self,
        x: Tensor,
        chunks: Sequence[Chunk],
        scales: Iterable[Tensor],
        packed: Iterable[Tensor],
        rounding_errors: Tensor,
        seed: Seed,
        scratch: Scratch,
        addend: Tensor | None = None,
    ) -> None:
        if not can_quantize(self.bits, x):
            return super().quantize(
                x, chunks, scales, packed, rounding_errors, seed, scratch, addend
            )
        library, first = self.library, chunks[0]
        values, errors = address("values", x, len(x)), address("errors", rounding_errors, len(x))
        added = address("an addend", addend, len(x))
        packed = list(packed)
        unpacked = unpacked_memory(packed, chunks, self.bits, scratch)
        parts = [
            ChunkMemory(
                chunk,
                values + FLOAT * (chunk.start - first.start),
                scale.data_ptr(),
                out.data_ptr(),
                errors + FLOAT * (chunk.start - first.start),
                chunk.first_row - first.first_row,
                added and added + FLOAT * (chunk.start - first.start),
            )
            for chunk, scale, out in zip(chunks, scales, unpacked, strict=True)
        ]
        rounding = rounding_table(seed, self.bits)
        run_over_chunks(parts, lambda table, a, b: library.quantize(table, a, b, rounding))
        pack(unpacked, packed, self.bits)

    def dequantize(
        self,
        scales: Iterable[Tensor],
        packed: Iterable[Tensor],
        chunks: Sequence[Chunk],
        out: Tensor,
        scratch: Scratch,
    ) -> None:
        if not can_quantize(self.bits, out):
            return super().dequantize(scales, packed, chunks, out, scratch)
        values, start, library = address("values", out, len(out)), chunks[0].start, self.library
        parts = [
            ChunkMemory(
                chunk, values + FLOAT * (chunk.start - start), scale.data_ptr(), x.data_ptr()
            )
            for chunk, scale, x in zip(chunks, scales, packed, strict=True)
        ]
        run_over_chunks(parts, lambda table, a, b: library.dequantize(table, a, b, self.bits))


class NativeMean(QuantizedMean):
    """``_wire.codec.QuantizedMean``, with the same messages, by passes; communicators call it.

    The second stage is one pass over all ranks' codes.
    """

    def __init__(self, library: ctypes.CDLL, payload: Payload, rank: int, ranks: int):
        super().__init__(payload, rank, ranks)
        self.library = library

    def round_payload(self) -> None:
        chunk = self.layout.chunks[0]
        body, errors = self.payload.body, self.rounding_errors
        values, to = address("values", body, len(body)), address("errors", errors, len(body))
        added = address("an addend", self.payload.addend, len(body))
        rounding = rounding_table((*self.seed, self.rank, 1), self.bits)  # stage 1, as in codec.py
        round_values = self.library.round_values
        run_over_chunks(
            [ChunkMemory(chunk, values, 0, 0, to, 0, added)],
            lambda table, a, b: round_values(table, a, b, rounding),
        )

    def average_own_chunk(self, received: Tensor) -> Tensor:
        received, chunk = received.contiguous(), self.layout.chunks[self.rank]
        self._average_fields(self.to_owners.split(received)[0])
        out = torch.zeros(1, self.of_mean.nbytes, dtype=torch.uint8, device="cpu")
        _, scales, packed = self.of_mean.split(out)
        unpacked = unpacked_memory(packed, [chunk], self.bits, self.scratch)
        rounding_errors = address(
            "rounding errors", self.rounding_errors, self.payload.body.numel()
        )
        places = scales.data_ptr(), unpacked[0].data_ptr(), rounding_errors + FLOAT * chunk.start
        messages = Table(
            1,
            messages=address("messages", received, received.numel(), torch.uint8),
            stride=received.shape[1],
            scales_at=FLOAT * self.fields,
            codes_at=FLOAT * (self.fields + self.layout.max_rows),
            ranks=self.ranks,
        )
        rounding = rounding_table((*self.seed, self.rank, 2), self.bits)  # stage 2
        mean = self.library.mean_of_codes
        run_over_chunks(
            [ChunkMemory(chunk, 0, *places)],
            lambda table, a, b: mean(table, a, b, rounding, messages),
        )
        pack(unpacked, packed, self.bits)
        return out[0]


# Passes over chunks


class ChunkMemory(NamedTuple):
    """A chunk, and the addresses of its first value, scale, quantized value, rounding error and
    addend; 0 for what a pass does not use.

    ``first_row`` is the number of its first row, which determines the random numbers.
    """

    chunk: Chunk
    values: int
    scales: int
    quantized: int
    rounding_errors: int = 0
    first_row: int = 0
    addend: int = 0


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
        values=[memory.values + FLOAT * at for memory, at, _, _ in parts],
        scales=[memory.scales + FLOAT * row for memory, _, row, _ in parts],
        codes=[memory.quantized for memory, *_ in parts],
        rounding_errors=[memory.rounding_errors + FLOAT * at for memory, at, _, _ in parts],
        at=[at for _, at, _, _ in parts],
        row=[memory.first_row + row for memory, _, row, _ in parts],
        n=lengths,
        size=[memory.chunk.stop - memory.chunk.start for memory, *_ in parts],
        addend=[memory.addend and memory.addend + FLOAT * at for memory, at, _, _ in parts],
    )
    run_over_rows(lengths, lambda first, last, _: run(table, first, last))


def rounding_table(seed: Seed, bits: int) -> Table:
    """Return how the values of a message are rounded, as quantize.c reads it."""
    noise = noise_table(torch.float32, torch.device("cpu"), seed is not None)
    numbers = address("random numbers", noise, len(noise))
    return Table(1, numbers=numbers, place=noise_offset(seed), bits=bits)


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


# State in 8 bits (kernels/native/blocks.c)


class NativeBlocks(BlockCodec):
    """``_state.blocks.BlockCodec``, with the same blocks, by passes; residuals call it.

    float64 is left to the reference.
    """

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def encode(
        self, values: Tensor, blocks: Tensor, seed: tuple[int, ...] | None = None, first: int = 0
    ) -> None:
        if not is_plain(values):
            super().encode(values, blocks, seed, first)
            return
        noise = Table(1, numbers=0, place=0)
        if seed is not None:
            table = noise_table(torch.float32, torch.device("cpu"))
            numbers = address("random numbers", table, len(table))
            noise = Table(1, numbers=numbers, place=noise_offset(seed))
        lengths, runs = make_runs(values, blocks, first)
        run_over_rows(lengths, lambda a, b, _: self.library.encode_blocks(runs, a, b, noise))

    def decode(self, blocks: Tensor, out: Tensor) -> None:
        if not is_plain(out):
            super().decode(blocks, out)
            return
        lengths, runs = make_runs(out, blocks, 0)
        run_over_rows(lengths, lambda a, b, _: self.library.decode_blocks(runs, a, b))


def make_runs(values: Tensor, blocks: Tensor, first: int) -> tuple[list[int], Table]:
    """Return a row of a table for each thread, as blocks.c reads it, and the values in each."""
    n, count = values.numel(), len(blocks)
    value, block = (
        address("values", values, n),
        address("blocks", blocks, blocks.numel(), torch.int8),
    )
    step = max(BLOCK_ROWS, -(-count // torch.get_num_threads()))
    begins = range(0, count, step)
    lengths = [min(n, ROW * (begin + step)) - ROW * begin for begin in begins]
    return lengths, Table(
        len(lengths),
        values=[value + FLOAT * ROW * begin for begin in begins],
        blocks=[block + BLOCK_BYTES * begin for begin in begins],
        n=lengths,
        row=[first + begin for begin in begins],
    )
