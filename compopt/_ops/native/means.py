"""The mean of an int8 or int4 payload by C passes (kernels/native/quantise.c): each of its stages
reads and writes its memory once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._wire.quantise import ROW, Chunk, code_bytes, numbers, pack, place_of
from ..._wire.quantised_mean import QuantisedMean
from ..._wire.requests import Payload
from .tables import Table, at, over_rows


class Places(NamedTuple):
    """Where in memory a chunk begins: its values, their scales and codes, and what rounding drops.

    ``row`` is the number of its first row, from which random numbers follow.
    """

    values: int
    scales: int
    codes: int
    dropped: int = 0
    row: int = 0


class NativeMean(QuantisedMean):
    """As the reference, in the same messages; codes of 2 bits, and values in float64, are left to
    it.
    """

    def __init__(self, library: ctypes.CDLL, payload: Payload, rank: int, ranks: int):
        super().__init__(payload, rank, ranks)
        self.library = library
        self.fits = self.bits in (8, 4) and payload.flat.dtype == torch.float32

    def first(self) -> Tensor:
        if not self.fits:
            return super().first()
        out = torch.empty(self.ranks, self._size(self.words), dtype=torch.uint8)
        words, scales, codes = self._fields(out, self.words)
        words.copy_(self.payload.flat[: self.words])
        body, dropped, chunks = self._body(), self._dropped(), self.layout.chunks
        one_a_byte = self._one_a_byte(codes, [chunk.stop - chunk.start for chunk in chunks])
        parts = [
            (
                chunk,
                Places(
                    body + 4 * chunk.start,
                    scale.data_ptr(),
                    code.data_ptr(),
                    dropped + 4 * chunk.start,
                    chunk.first_row,
                ),
            )
            for chunk, scale, code in zip(chunks, scales, one_a_byte, strict=True)
        ]
        table, lengths = table_of(parts)
        rounding = self._rounding(stage=1)
        over_rows(lengths, lambda a, b, _: self.library.quantise(table, a, b, rounding))
        self._pack(one_a_byte, codes)
        return out

    def second(self, received: Tensor) -> Tensor:
        if not self.fits:
            return super().second(received)
        received, chunk = received.contiguous(), self.layout.chunks[self.rank]
        self._average_words(self._fields(received, self.words)[0])
        out = torch.empty(1, self._size(0), dtype=torch.uint8)
        _, scales, codes = self._fields(out, 0)
        one_a_byte = self._one_a_byte(codes, [chunk.stop - chunk.start])
        dropped = self._dropped() + 4 * chunk.start
        places = Places(0, scales.data_ptr(), one_a_byte[0].data_ptr(), dropped)
        table, lengths = table_of([(chunk, places)])
        scales_at = 4 * self.words
        came = Table(
            1,
            messages=at("messages", received, received.numel(), torch.uint8),
            stride=received.shape[1],
            scales_at=scales_at,
            codes_at=scales_at + 4 * self.layout.scales,
            ranks=self.ranks,
        )
        rounding = self._rounding(stage=2)
        over_rows(lengths, lambda a, b, _: self.library.mean_of_codes(table, a, b, rounding, came))
        self._pack(one_a_byte, codes)
        return out[0]

    def finish(self, gathered: Tensor) -> None:
        if not self.fits:
            return super().finish(gathered)
        gathered, body = gathered.contiguous(), self._body()
        _, scales, codes = self._fields(gathered, 0)
        rows = zip(self.layout.chunks, scales, codes, strict=True)
        table, lengths = table_of(
            (chunk, Places(body + 4 * chunk.start, scale.data_ptr(), code.data_ptr()))
            for chunk, scale, code in rows
        )
        over_rows(lengths, lambda a, b, _: self.library.dequantise(table, a, b, self.bits))

    def _body(self) -> int:
        return at("a message", self.payload.body, self.payload.body.numel())

    def _dropped(self) -> int:
        return at("what rounding drops", self.dropped, self.payload.body.numel())

    def _rounding(self, stage: int) -> Table:
        u = numbers(torch.float32, self.payload.flat.device)
        place = place_of((*self.seed, self.rank, stage))
        return Table(1, numbers=at("random numbers", u, len(u)), place=place, bits=self.bits)

    def _one_a_byte(self, codes: Tensor, sizes: list[int]) -> list[Tensor]:
        """Where so many codes are written for each of these messages: there, but of 4 bits apart,
        to be packed.
        """
        if self.bits == 8:
            return list(codes)
        held = self.scratch("codes", sum(sizes), torch.int8, codes.device)
        return list(held.split(sizes))

    def _pack(self, one_a_byte: list[Tensor], codes: Tensor) -> None:
        if self.bits == 4:
            for own, out in zip(one_a_byte, codes, strict=True):
                pack(own, out[: code_bytes(len(own), 4)])


def table_of(chunks: Iterable[tuple[Chunk, Places]]) -> tuple[Table, list[int]]:
    """The rows of a table, some for each thread, and how many values each has."""
    cuts = [(chunk, places, piece) for chunk, places in chunks for piece in chunk.pieces]
    most = -(-sum(piece.n for _, _, piece in cuts) // torch.get_num_threads())
    step = max(ROW, -(-most // ROW) * ROW)
    rows = [
        (chunk, places, piece.at + a, piece.row + a // ROW, min(step, piece.n - a))
        for chunk, places, piece in cuts
        for a in range(0, piece.n, step)
    ]
    lengths = [n for *_, n in rows]
    table = Table(
        len(rows),
        values=[places.values + 4 * first for _, places, first, _, _ in rows],
        scales=[places.scales + 4 * row for _, places, _, row, _ in rows],
        codes=[places.codes for _, places, *_ in rows],
        dropped=[places.dropped + 4 * first for _, places, first, _, _ in rows],
        at=[first for _, _, first, _, _ in rows],
        row=[places.row + row for _, places, _, row, _ in rows],
        n=lengths,
        size=[chunk.stop - chunk.start for chunk, *_ in rows],
    )
    return table, lengths
