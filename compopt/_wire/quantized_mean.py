"""The mean over ranks of a quantized payload, between the collectives that carry it.

Two stages. The rows of a payload are divided among the N ranks in chunks. Every rank quantizes its
payload and sends each chunk to the rank that owns it. The owner adds the N chunks in floating point
and quantizes their mean; then all ranks gather the means. So 1 byte a value (int8), half of one
(int4) or a quarter (int2), and the scales, travel each way, and all ranks hold the same bits.

Rounding errors are kept for error feedback: ``Payload.dropped`` holds, on every rank, the payload
less what the others received of it. The owner of a chunk also holds there N times the rounding
error of the mean, so that over all ranks::

    mean of the payloads = the result + mean of the rounding errors

Header and control fields travel to every rank as float32 in the messages of the first stage; each
rank averages them in the order of ranks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .payload import ROW, Payload, packed_bytes
from .quantization import (
    RowSpan,
    dequantize_chunk,
    dequantize_rows,
    quantize_rows,
    read_chunk,
    row_layout,
    rows_to_values,
    values_to_rows,
    write_chunk,
)


def make_quantized_mean(payload: Payload, rank: int, ranks: int) -> QuantizedMean:
    """Return this rank's part in the mean of a payload, as the payload's back end computes it."""
    mean: QuantizedMean = (payload.make_mean or QuantizedMean)(payload, rank, ranks)
    return mean


class QuantizedMean:
    """One rank's part in the mean of one payload. Messages are bytes.

    ``encode_for_owners`` makes a message for every rank, shape (ranks, bytes).
    ``average_own_chunk`` takes the messages that all ranks sent to this one, of the same shape, and
    makes one message for all. ``decode_mean`` takes those of all ranks, shape (ranks, bytes), and
    leaves the mean in the payload. A single process calls ``round_payload`` instead.
    """

    def __init__(self, payload: Payload, rank: int, ranks: int):
        if payload.seed is None or payload.dropped is None:
            raise ValueError("payload has no seed, or no memory for the rounding error: give both.")
        self.payload, self.rank, self.ranks, self.scratch = payload, rank, ranks, payload.scratch
        self.seed, self.dropped, self.bits = payload.seed, payload.dropped, payload.bits
        self.layout = row_layout(tuple(payload.lengths), ranks)
        self.fields = len(payload.header) + len(payload.control)

    def round_payload(self) -> None:
        """Leave the payload as one rank would receive it."""
        self._quantize_body()
        self.payload.body.sub_(self.dropped)

    def encode_for_owners(self) -> Tensor:
        quantized, scales = self._quantize_body()
        size = self._message_bytes(self.fields)
        out = torch.zeros(self.ranks, size, dtype=torch.uint8, device=quantized.device)
        fields, own_scales, own_values = self._split_messages(out, self.fields)
        fields.copy_(self.payload.flat[: self.fields])
        for number, chunk in enumerate(self.layout.chunks):
            rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
            own_scales[number, : chunk.rows] = scales[rows]
            write_chunk(quantized[rows], chunk, own_values[number], self.scratch, self.bits)
        return out

    def average_own_chunk(self, received: Tensor) -> Tensor:
        payload, chunk = self.payload, self.layout.chunks[self.rank]
        fields, scales, values = self._split_messages(received, self.fields)
        self._average_fields(fields)
        total, value = (
            self.scratch(use, chunk.rows * ROW, payload.flat.dtype, received.device).view(-1, ROW)
            for use in ("total", "value")
        )
        total.zero_()
        for rank in range(self.ranks):
            rows = read_chunk(values[rank], chunk, self.scratch, self.bits)
            total.add_(dequantize_rows(rows, scales[rank, : chunk.rows], value))
        total.div_(self.ranks)

        out = torch.zeros(1, self._message_bytes(0), dtype=torch.uint8, device=received.device)
        _, scales, values = self._split_messages(out, 0)
        rows = self.scratch("quantized", chunk.rows * ROW, torch.int8, received.device)
        rows = rows.view(-1, ROW)
        self._quantize(total, chunk.spans, rows, scales[0, : chunk.rows], total, stage=2)
        write_chunk(rows, chunk, values[0], self.scratch, self.bits)
        dropped = self.dropped[chunk.start : chunk.stop]
        for at, row, n in chunk.spans:
            dropped[at : at + n].add_(total.view(-1)[ROW * row : ROW * row + n], alpha=self.ranks)
        return out[0]

    def decode_mean(self, gathered: Tensor) -> None:
        body = self.payload.body
        _, scales, values = self._split_messages(gathered, 0)
        for number, chunk in enumerate(self.layout.chunks):
            own_scales, out = scales[number, : chunk.rows], body[chunk.start : chunk.stop]
            dequantize_chunk(own_scales, values[number], chunk, out, self.scratch, self.bits)

    def _average_fields(self, fields: Tensor) -> None:
        """Average the header and control fields of all ranks' messages."""
        # One after the other: the order in which sum() adds depends on the processor.
        total = functools.reduce(torch.add, fields.to(self.payload.flat.dtype))
        self.payload.flat[: self.fields] = total / self.ranks

    def _quantize_body(self) -> tuple[Tensor, Tensor]:
        body, rows, spans = self.payload.body, self.layout.rows, self.layout.spans
        x = values_to_rows(body, spans, rows, "value", self.scratch)
        # Rows that are a view of the body must stay as they are.
        dropped = self.dropped.view(-1, ROW) if x.data_ptr() == body.data_ptr() else x
        quantized = self.scratch("quantized", rows * ROW, torch.int8, body.device).view(-1, ROW)
        scales = self.scratch("scales", rows, torch.float32, body.device)
        self._quantize(x, spans, quantized, scales, dropped, stage=1)
        rows_to_values(dropped, spans, self.dropped)
        return quantized, scales

    def _quantize(
        self,
        x: Tensor,
        spans: tuple[RowSpan, ...],
        quantized: Tensor,
        scales: Tensor,
        dropped: Tensor,
        stage: int,
    ) -> None:
        seed = (*self.seed, self.rank, stage)
        quantize_rows(x, spans, quantized, scales, dropped, seed, self.scratch, self.bits)

    def _message_bytes(self, fields: int) -> int:
        """Return a multiple of 4, and at least 4: a message without bytes could not be viewed as
        float32.
        """
        values = packed_bytes(self.layout.max_values, self.bits)
        return max(4, 4 * (fields + self.layout.max_rows) + values + -values % 4)

    def _split_messages(self, messages: Tensor, fields: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split messages of shape (any, bytes) into fields, scales and packed values."""
        a, b = 4 * fields, 4 * (fields + self.layout.max_rows)
        return (
            messages[:, :a].view(torch.float32),
            messages[:, a:b].view(torch.float32),
            messages[:, b:].view(torch.int8),
        )
