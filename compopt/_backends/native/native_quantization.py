"""int8 and int4 by C passes (kernels/native/quantize.c), which read and write memory once: the mean
of a payload, and a single chunk; and state in 8 bits (kernels/native/blocks.c).

``native_ops`` has these codecs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..._state.blocks import BLOCK_BYTES, BlockCodec
from ..._wire.codec import QuantizedCodec, QuantizedMean, Seed
from ..._wire.payload import ROW, Payload, Scratch, packed_bytes
from ..._wire.quantization import BLOCK_ROWS, Chunk, noise_offset, noise_table, pack_int4
from .library import NUMBER, Table, address, is_plain, run_pass

# The fields of quantize.c's Piece, in their order.
CHUNKS = "values scales codes rounding_errors at row n size addend"


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
        packed = list(packed)
        unpacked = unpacked_memory(packed, chunks, self.bits, scratch)
        run_over_chunks(
            self.library.quantize,
            chunks,
            rounding_table(seed, self.bits),
            scales=scales,
            codes=unpacked,
            values=address("values", x, len(x)),
            rounding_errors=address("errors", rounding_errors, len(x)),
            addend=address("an addend", addend, len(x)),
        )
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
        values = address("values", out, len(out))
        dequantize = self.library.dequantize
        run_over_chunks(dequantize, chunks, self.bits, scales=scales, codes=packed, values=values)


class NativeMean(QuantizedMean):
    """``_wire.codec.QuantizedMean``, with the same messages, by passes; communicators call it.

    The second stage is one pass over all ranks' codes.
    """

    def __init__(self, library: ctypes.CDLL, payload: Payload, rank: int, ranks: int):
        super().__init__(payload, rank, ranks)
        self.library = library

    def round_payload(self) -> None:
        body, n = self.payload.body, len(self.payload.body)
        run_over_chunks(
            self.library.round_values,
            self.layout.chunks[:1],
            rounding_table((*self.seed, self.rank, 1), self.bits),  # stage 1, as in codec.py
            values=address("values", body, n),
            rounding_errors=address("errors", self.rounding_errors, n),
            addend=address("an addend", self.payload.addend, n),
        )

    def average_own_chunk(self, received: Tensor) -> Tensor:
        received, chunk = received.contiguous(), self.layout.chunks[self.rank]
        self._average_fields(self.to_owners.split(received)[0])
        out = torch.zeros(1, self.of_mean.nbytes, dtype=torch.uint8, device="cpu")
        _, scales, packed = self.of_mean.split(out)
        unpacked = unpacked_memory(packed, [chunk], self.bits, self.scratch)
        messages = Table(
            1,
            messages=address("messages", received, received.numel(), torch.uint8),
            stride=received.shape[1],
            scales_at=NUMBER * self.fields,
            codes_at=NUMBER * (self.fields + self.layout.max_rows),
            ranks=self.ranks,
        )
        errors = address("rounding errors", self.rounding_errors, self.payload.body.numel())
        run_over_chunks(
            self.library.mean_of_codes,
            [chunk],
            rounding_table((*self.seed, self.rank, 2), self.bits),  # stage 2
            messages,
            scales=[scales],
            codes=unpacked,
            rounding_errors=errors + NUMBER * chunk.start,
        )
        pack(unpacked, packed, self.bits)
        return out[0]


# Passes over chunks


def run_over_chunks(
    function: Callable[..., int],
    chunks: Sequence[Chunk],
    *arguments: object,
    scales: Iterable[Tensor] = (),
    codes: Iterable[Tensor] = (),
    **places: int,
) -> None:
    """Call ``function(table, first, last, *arguments)`` for all rows of a table of chunks that
    follow each other, on several threads.

    ``scales`` and ``codes``: of each chunk, if the pass uses them; ``places``: the addresses of the
    other columns at the first chunk, 0 for none. A row of the table is a part of a span: as many
    rows of values as a thread works on. Its number determines the random numbers.
    """
    spans = [(i, span) for i, chunk in enumerate(chunks) for span in chunk.spans]
    per_thread = -(-sum(span.n for _, span in spans) // torch.get_num_threads())
    step = max(ROW, -(-per_thread // ROW) * ROW)
    parts = [
        (i, span.at + a, span.row + a // ROW, min(step, span.n - a))
        for i, span in spans
        for a in range(0, span.n, step)
    ]
    first, lengths = chunks[0], [n for *_, n in parts]
    starts = [chunk.start - first.start for chunk in chunks]
    first_rows = [chunk.first_row - first.first_row for chunk in chunks]
    first_scales = [x.data_ptr() for x in scales] or [0] * len(chunks)
    first_codes = [x.data_ptr() for x in codes] or [0] * len(chunks)
    table = Table(
        len(parts),
        CHUNKS,
        scales=[first_scales[i] + NUMBER * row for i, _, row, _ in parts],
        codes=[first_codes[i] for i, *_ in parts],
        at=[at for _, at, _, _ in parts],
        row=[first_rows[i] + row for i, _, row, _ in parts],
        n=lengths,
        size=[chunks[i].stop - chunks[i].start for i, *_ in parts],
        **{
            name: [place + NUMBER * (starts[i] + at) for i, at, *_ in parts]
            for name, place in places.items()
            if place
        },
    )
    run_pass(function, table, lengths, *arguments)


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
        noise = Table(1, numbers=0, place=0) if seed is None else rounding_table(seed, 8)
        lengths, runs = make_runs(values, blocks, first)
        run_pass(self.library.encode_blocks, runs, lengths, noise)

    def decode(self, blocks: Tensor, out: Tensor) -> None:
        if not is_plain(out):
            super().decode(blocks, out)
            return
        lengths, runs = make_runs(out, blocks, 0)
        run_pass(self.library.decode_blocks, runs, lengths)


def make_runs(values: Tensor, blocks: Tensor, first: int) -> tuple[list[int], Table]:
    """Return a row of a table for each thread, as blocks.c reads it, and the values in each."""
    n, count = values.numel(), len(blocks)
    value = address("values", values, n)
    block = address("blocks", blocks, blocks.numel(), torch.int8)
    step = max(BLOCK_ROWS, -(-count // torch.get_num_threads()))
    begins = range(0, count, step)
    lengths = [min(n, ROW * (begin + step)) - ROW * begin for begin in begins]
    return lengths, Table(
        len(lengths),
        values=[value + NUMBER * ROW * begin for begin in begins],
        blocks=[block + BLOCK_BYTES * begin for begin in begins],
        n=lengths,
        row=[first + begin for begin in begins],
    )
