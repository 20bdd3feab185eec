"""Codecs: how flat values are rounded, sent and averaged. They know neither bucket nor optimizer.
That of floating-point numbers is ``payload.Codec``.

``PAYLOAD_CODECS`` has those of PyTorch's operators, by what users write: a torch.dtype or its name.
A backend has a table of its own, ``Ops.codecs``, whose quantizing codecs use its passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .payload import (
    ROW,
    Codec,
    Payload,
    Scratch,
    count_rows,
    packed_bytes,
)
from .quantization import (
    Chunk,
    dequantize_rows,
    divide_,
    join_chunks,
    quantize_rows,
    read_chunk,
    row_layout,
    rows_to_values,
    values_to_rows,
    write_chunk,
)

Seed = tuple[int, ...] | None  # None: values are rounded to the nearest


class QuantizedCodec(Codec):
    """Sends values in ``bits`` bits, with a scale for each 128 of them (see ``quantization``).

    ``make_mean`` makes a rank's part in the exchange of a payload. ``quantize`` and ``dequantize``
    work on chunks of flat values.
    """

    bits: int

    def __init__(self, bits: int):
        super().__init__(None)
        self.bits = bits

    def bytes_per_value(self, gradient_dtype: torch.dtype) -> float:
        return self.bits / 8 + 4 / ROW

    def count_bytes(self, flat: Tensor, fields: int, lengths: list[int]) -> int:
        # quantized values, and in float32 a scale for each row, header and control fields
        numbers = fields + sum(map(count_rows, lengths))
        return packed_bytes(sum(lengths), self.bits) + 4 * numbers

    def make_mean(self, payload: Payload, rank: int, ranks: int) -> QuantizedMean:
        """Return this rank's part in the mean of a payload."""
        return QuantizedMean(payload, rank, ranks)

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
        """Quantize flat values plus ``addend``, of chunks that follow each other, to the scales and
        packed values of each chunk. x is undefined afterwards; ``rounding_errors`` may be x itself.
        """
        if addend is not None:
            x.add_(addend)
        spans, rows = join_chunks(chunks)
        x_rows = values_to_rows(x, spans, rows, "value", scratch)
        # rows that are a view of x must stay as they are
        is_view = x_rows.data_ptr() == x.data_ptr()
        errors = rounding_errors.view(-1, ROW) if is_view else x_rows
        quantized = scratch("quantized", rows * ROW, torch.int8, x.device).view(-1, ROW)
        all_scales = scratch("scales", rows, torch.float32, x.device)
        quantize_rows(x_rows, spans, quantized, all_scales, errors, seed, scratch, self.bits)
        rows_to_values(errors, spans, rounding_errors)
        for chunk, own_scales, out in zip(chunks, scales, packed, strict=True):
            first = chunk.first_row - chunks[0].first_row
            own_scales[: chunk.rows] = all_scales[first : first + chunk.rows]
            write_chunk(quantized[first : first + chunk.rows], chunk, out, scratch, self.bits)

    def dequantize(
        self,
        scales: Iterable[Tensor],
        packed: Iterable[Tensor],
        chunks: Sequence[Chunk],
        out: Tensor,
        scratch: Scratch,
    ) -> None:
        """Read chunks that follow each other into flat values."""
        for chunk, own_scales, values in zip(chunks, scales, packed, strict=True):
            part = out[chunk.start - chunks[0].start : chunk.stop - chunks[0].start]
            quantized, size = read_chunk(values, chunk, scratch, self.bits), chunk.rows * ROW
            is_full = len(part) == size
            value = part if is_full else scratch("value", size, out.dtype, out.device)
            value = value.view(-1, ROW)
            value = dequantize_rows(quantized, own_scales[: chunk.rows], value, self.bits)
            rows_to_values(value, chunk.spans, part)


# Messages of quantized values: bytes


class MessageLayout(NamedTuple):
    """``fields`` numbers, then ``scales`` of them, all float32, then packed ``values``."""

    fields: int
    scales: int
    values: int
    bits: int

    @property
    def nbytes(self) -> int:
        """A multiple of 4, and at least 4: a message without bytes could not be viewed as
        float32.
        """
        values = packed_bytes(self.values, self.bits)
        return max(4, 4 * (self.fields + self.scales) + values + -values % 4)

    def split(self, messages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split one or several messages into fields, scales and packed values."""
        a, b = 4 * self.fields, 4 * (self.fields + self.scales)
        fields, scales = messages[..., :a], messages[..., a:b]
        return (
            fields.view(torch.float32),
            scales.view(torch.float32),
            messages[..., b:].view(torch.int8),
        )


class GatherCodec:
    """Encodes the values of every rank to a message of scales, then quantized values.

    ``lengths[rank]``: the lengths of that rank's tensors, no two of which share a scale. All
    messages have ``nbytes`` bytes.
    """

    def __init__(self, codec: QuantizedCodec, lengths: Sequence[tuple[int, ...]], scratch: Scratch):
        self.codec, self.scratch = codec, scratch
        self.chunks = [row_layout(parts, 1).chunks[0] for parts in lengths]
        rows = max(chunk.rows for chunk in self.chunks)
        values = max(chunk.stop for chunk in self.chunks)
        self.layout = MessageLayout(0, rows, values, codec.bits)
        self.nbytes = self.layout.nbytes

    def encode(self, values: Tensor, rank: int, out: Tensor, seed: Seed) -> None:
        """Write a rank's message to ``out``; its ``values`` become the rounding error.

        ``seed`` None: rounded to the nearest.
        """
        _, scales, packed = self.layout.split(out.unsqueeze(0))
        chunks, scratch = [self.chunks[rank]], self.scratch
        self.codec.quantize(values, chunks, scales, packed, values, seed, scratch)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the values of all ranks to the rows of ``out``, as long as the longest."""
        for message, chunk, row in zip(messages, self.chunks, out, strict=True):
            _, scales, packed = self.layout.split(message.unsqueeze(0))
            self.codec.dequantize(scales, packed, [chunk], row[: chunk.stop], self.scratch)


class QuantizedMean:
    """One rank's part in the mean over ranks of one payload, in two stages.

    The rows of a payload are divided among the N ranks in chunks. Every rank quantizes its payload
    and sends each chunk to the rank that owns it (``encode_for_owners``: a message for every rank,
    shape (ranks, bytes)). The owner adds the N chunks in floating point and quantizes their mean
    (``average_own_chunk``: from the messages of all ranks to this one, to one for all). Then all
    ranks gather the means (``decode_mean``: from those of all ranks, into the payload). So 1 byte a
    value (int8), half of one (int4) or a quarter (int2), and the scales, travel each way, and all
    ranks hold the same bits. A single process calls ``round_payload`` instead.

    ``Payload.rounding_errors`` holds, on every rank, the payload less what the others received of
    it. The owner of a chunk also holds there N times the rounding error of the mean, so that over
    all ranks::

        mean of the payloads = the result + mean of the rounding errors

    Header and control fields travel to every rank as float32 in the messages of the first stage;
    each rank averages them in the order of ranks.
    """

    def __init__(self, payload: Payload, rank: int, ranks: int):
        if not isinstance(payload.codec, QuantizedCodec) or payload.rounding_errors is None:
            raise ValueError("payload is not quantized, or has no memory for the rounding error.")
        self.payload, self.rank, self.ranks, self.scratch = payload, rank, ranks, payload.scratch
        self.codec, self.bits, self.seed = payload.codec, payload.codec.bits, payload.seed
        self.rounding_errors = payload.rounding_errors
        self.layout = row_layout(tuple(payload.lengths), ranks)
        self.fields = len(payload.header) + len(payload.control)
        sizes = self.layout.max_rows, self.layout.max_values, self.bits
        self.to_owners, self.of_mean = MessageLayout(self.fields, *sizes), MessageLayout(0, *sizes)

    def round_payload(self) -> None:
        """Leave the payload as one rank would receive it."""
        self.encode_for_owners()
        self.payload.body.sub_(self.rounding_errors)

    def encode_for_owners(self) -> Tensor:
        shape, body = (self.ranks, self.to_owners.nbytes), self.payload.body
        out = torch.zeros(shape, dtype=torch.uint8, device=body.device)
        fields, scales, packed = self.to_owners.split(out)
        fields.copy_(self.payload.flat[: self.fields])
        seed = (*self.seed, self.rank, 1)  # stage 1
        chunks, errors = self.layout.chunks, self.rounding_errors
        memory, addend = self.scratch, self.payload.addend
        self.codec.quantize(body, chunks, scales, packed, errors, seed, memory, addend)
        return out

    def average_own_chunk(self, received: Tensor) -> Tensor:
        chunk, dtype = self.layout.chunks[self.rank], self.payload.flat.dtype
        fields, scales, values = self.to_owners.split(received)
        self._average_fields(fields)
        size = chunk.stop - chunk.start
        total, value = (
            self.scratch(use, size, dtype, received.device) for use in ("total", "part")
        )
        total.zero_()
        for rank in range(self.ranks):
            self.codec.dequantize([scales[rank]], [values[rank]], [chunk], value, self.scratch)
            total.add_(value)
        divide_(total, self.ranks)

        out = torch.zeros(1, self.of_mean.nbytes, dtype=torch.uint8, device=received.device)
        _, scales, values = self.of_mean.split(out)
        seed = (*self.seed, self.rank, 2)  # stage 2
        self.codec.quantize(total, [chunk], scales, values, total, seed, self.scratch)
        self.rounding_errors[chunk.start : chunk.stop].add_(total, alpha=self.ranks)
        return out[0]

    def decode_mean(self, gathered: Tensor) -> None:
        _, scales, values = self.of_mean.split(gathered)
        chunks, body = self.layout.chunks, self.payload.body
        self.codec.dequantize(scales, values, chunks, body, self.scratch)

    def _average_fields(self, fields: Tensor) -> None:
        """Average the header and control fields of all ranks' messages."""
        # One after the other: the order in which sum() adds depends on the processor.
        total = functools.reduce(torch.add, fields.to(self.payload.flat.dtype))
        self.payload.flat[: self.fields] = divide_(total, self.ranks)


# The table


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: object) -> object:
    """Return the name of a torch.dtype; anything else is returned unchanged."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def make_codecs(make: Callable[[int], QuantizedCodec]) -> dict[object, Codec]:
    """Return the codec of every dtype of payloads, by its torch.dtype and by its name; None is the
    dtype of the gradients. ``make`` makes those that quantize.
    """
    table: dict[object, Codec] = {None: Codec(None)}
    names: dict[str, Codec] = {f"int{bits}": make(bits) for bits in (8, 4, 2)}
    names |= {str(dtype_name(dtype)): Codec(dtype) for dtype in FLOATS}
    for name, codec in names.items():
        table[name] = table[getattr(torch, name, name)] = codec
    return table


PAYLOAD_CODECS = make_codecs(QuantizedCodec)
CODEC_NAMES = ", ".join(repr(dtype) for dtype in PAYLOAD_CODECS if isinstance(dtype, str))


def find_codec(dtype: object) -> Codec | None:
    """Return the codec of a payload's dtype; None if there is none."""
    return PAYLOAD_CODECS.get(dtype) if isinstance(dtype, Hashable) else None
