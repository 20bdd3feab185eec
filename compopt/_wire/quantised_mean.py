"""The mean of a payload over ranks, with codes on the wire, between the collectives that carry it.

Two stages. The rows of a payload are dealt to the N ranks in chunks. Every rank rounds its payload
to codes and sends each chunk to the rank that owns it, which adds the N up in floating point and
rounds their mean; then all gather the chunks. So 1 byte a value (int8), half of one (int4) or a
quarter (int2), and the scales, travel each way, and all ranks hold the same bits.

What rounding takes off is not lost: ``Payload.dropped`` holds, on every rank, what it meant to send
less what the others got of it. A chunk's owner also holds there N times what rounding the mean took
off, so that over all ranks::

    mean of what was to be sent = the result + mean of what was dropped

The header and the control words travel as float32 beside the codes of the first stage, to every
rank, and each averages them in the order of ranks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .coded import codes_of, decode, read, write
from .quantise import ROW, Chunk, Piece, code_bytes, dequantise, join, layout, spread
from .requests import Payload


def job_of(payload: Payload, rank: int, ranks: int) -> QuantisedMean:
    """This rank's part in the mean of a payload: the back end's, where it has one."""
    job: QuantisedMean = (payload.job or QuantisedMean)(payload, rank, ranks)
    return job


class QuantisedMean:
    """The mean of one payload over all ranks, as one rank takes part in it. The messages between
    the stages are bytes.

    ``first`` makes a message for every rank, shape (ranks, bytes). ``second`` takes what all ranks
    sent to this one, of the same shape, and makes one message for all. ``finish`` takes all of
    those, shape (ranks, bytes), and leaves the mean in the payload. A single rank calls ``alone``
    instead.
    """

    def __init__(self, payload: Payload, rank: int, ranks: int):
        if payload.seed is None or payload.dropped is None:
            raise ValueError(
                "payload has no seed, or nowhere to put what rounding drops: give both."
            )
        self.payload, self.rank, self.ranks, self.scratch = payload, rank, ranks, payload.scratch
        self.seed, self.dropped, self.bits = payload.seed, payload.dropped, payload.bits
        self.layout = layout(tuple(payload.lengths), ranks)
        self.words = len(payload.header) + len(payload.control)

    def alone(self) -> None:
        self._quantise_body()
        self.payload.body.sub_(self.dropped)

    def first(self) -> Tensor:
        codes, scales = self._quantise_body()
        out = torch.zeros(
            self.ranks, self._size(self.words), dtype=torch.uint8, device=codes.device
        )
        words, own_scales, own_codes = self._fields(out, self.words)
        words.copy_(self.payload.flat[: self.words])
        for number, chunk in enumerate(self.layout.chunks):
            own_scales[number, : chunk.rows] = scales[
                chunk.first_row : chunk.first_row + chunk.rows
            ]
            rows = codes[chunk.first_row : chunk.first_row + chunk.rows]
            self._write(rows, chunk, own_codes[number])
        return out

    def second(self, received: Tensor) -> Tensor:
        payload, chunk = self.payload, self.layout.chunks[self.rank]
        words, scales, codes = self._fields(received, self.words)
        self._average_words(words)
        total, value = (
            self.scratch(use, chunk.rows * ROW, payload.flat.dtype, received.device).view(-1, ROW)
            for use in ("total", "value")
        )
        total.zero_()
        for rank in range(self.ranks):
            rows = self._read(codes[rank], chunk)
            total.add_(dequantise(rows, scales[rank, : chunk.rows], value))
        total.div_(self.ranks)

        out = torch.zeros(1, self._size(0), dtype=torch.uint8, device=received.device)
        _, scales, codes = self._fields(out, 0)
        rows = self.scratch("codes", chunk.rows * ROW, torch.int8, received.device).view(-1, ROW)
        self._quantise(total, chunk.pieces, rows, scales[0, : chunk.rows], total, stage=2)
        self._write(rows, chunk, codes[0])
        mine = self.dropped[chunk.start : chunk.stop]
        for at, row, n in chunk.pieces:
            mine[at : at + n].add_(total.view(-1)[ROW * row : ROW * row + n], alpha=self.ranks)
        return out[0]

    def finish(self, gathered: Tensor) -> None:
        body = self.payload.body
        _, scales, codes = self._fields(gathered, 0)
        for number, chunk in enumerate(self.layout.chunks):
            own, out = scales[number, : chunk.rows], body[chunk.start : chunk.stop]
            decode(own, codes[number], chunk, out, self.scratch, self.bits)

    def _average_words(self, words: Tensor) -> None:
        """Header and control words, of all ranks' messages."""
        # One after the other: the order in which sum() adds is the processor's.
        added = functools.reduce(torch.add, words.to(self.payload.flat.dtype))
        self.payload.flat[: self.words] = added / self.ranks

    def _quantise_body(self) -> tuple[Tensor, Tensor]:
        body, rows = self.payload.body, self.layout.rows
        x = spread(body, self.layout.pieces, rows, "value", self.scratch)
        rest = self.dropped.view(-1, ROW) if x.data_ptr() == body.data_ptr() else x
        codes = self.scratch("codes", rows * ROW, torch.int8, body.device).view(-1, ROW)
        scales = self.scratch("scales", rows, torch.float32, body.device)
        self._quantise(x, self.layout.pieces, codes, scales, rest, stage=1)
        join(rest, self.layout.pieces, self.dropped)
        return codes, scales

    def _quantise(
        self,
        x: Tensor,
        pieces: tuple[Piece, ...],
        codes: Tensor,
        scales: Tensor,
        rest: Tensor,
        stage: int,
    ) -> None:
        seed = (*self.seed, self.rank, stage)
        codes_of(x, pieces, codes, scales, rest, seed, self.scratch, self.bits)

    def _write(self, rows: Tensor, chunk: Chunk, out: Tensor) -> None:
        write(rows, chunk, out, self.scratch, self.bits)

    def _read(self, message: Tensor, chunk: Chunk) -> Tensor:
        return read(message, chunk, self.scratch, self.bits)

    def _size(self, words: int) -> int:
        """Whole words, and at least one: a message without bytes could not be viewed as words and
        codes.
        """
        codes = code_bytes(self.layout.values, self.bits)
        return max(4, 4 * (words + self.layout.scales) + codes + -codes % 4)

    def _fields(self, message: Tensor, words: int) -> tuple[Tensor, Tensor, Tensor]:
        """Words, scales and codes of messages of shape (any, bytes)."""
        a, b = 4 * words, 4 * (words + self.layout.scales)
        return (
            message[:, :a].view(torch.float32),
            message[:, a:b].view(torch.float32),
            message[:, b:].view(torch.int8),
        )
