"""Codes of 8 and 4 bits by C passes (kernels/native/quantise.c), which read and write memory once:
the mean of a payload, and a chunk alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._wire import coded
from ..._wire.quantise import ROW, Chunk, code_bytes, numbers, pack, place_of
from ..._wire.quantised_mean import QuantisedMean
from ..._wire.requests import Payload
from ..._wire.scratch import Scratch
from .tables import Table, at, over_rows, plain


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
        self.fits = takes(self.bits, payload.flat)

    def first(self) -> Tensor:
        if not self.fits:
            return super().first()
        body, dropped, chunks = self._body(), self._dropped(), self.layout.chunks
        out, words, scales, codes = self._messages(chunks, self.words)
        words.copy_(self.payload.flat[: self.words])
        own = one_a_byte(list(codes), chunks, self.bits, self.scratch)
        parts = []
        for chunk, scale, code in zip(chunks, scales, own, strict=True):
            values, rest = body + 4 * chunk.start, dropped + 4 * chunk.start
            places = Places(values, scale.data_ptr(), code.data_ptr(), rest, chunk.first_row)
            parts.append((chunk, places))
        table, lengths = table_of(parts)
        how = rounding((*self.seed, self.rank, 1), self.bits)
        over_rows(lengths, lambda a, b, _: self.library.quantise(table, a, b, how))
        together(own, list(codes), self.bits)
        return out

    def second(self, received: Tensor) -> Tensor:
        if not self.fits:
            return super().second(received)
        received, chunk = received.contiguous(), self.layout.chunks[self.rank]
        self._average_words(self._fields(received, self.words)[0])
        out, _, scales, codes = self._messages([chunk], 0)
        own = one_a_byte(list(codes), [chunk], self.bits, self.scratch)
        rest = self._dropped() + 4 * chunk.start
        table, lengths = table_of([(chunk, Places(0, scales.data_ptr(), own[0].data_ptr(), rest))])
        came = Table(
            1,
            messages=at("messages", received, received.numel(), torch.uint8),
            stride=received.shape[1],
            scales_at=4 * self.words,
            codes_at=4 * (self.words + self.layout.scales),
            ranks=self.ranks,
        )
        how = rounding((*self.seed, self.rank, 2), self.bits)
        over_rows(lengths, lambda a, b, _: self.library.mean_of_codes(table, a, b, how, came))
        together(own, list(codes), self.bits)
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

    def _messages(
        self, chunks: Sequence[Chunk], words: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One for each chunk, to be filled, and its fields. What a short chunk leaves over is zero:
        none of what this process held in that memory before is sent.
        """
        out = torch.empty(len(chunks), self._size(words), dtype=torch.uint8)
        first, scales, codes = self._fields(out, words)
        for chunk, scale, code in zip(chunks, scales, codes, strict=True):
            ends = chunk.rows, code_bytes(chunk.stop - chunk.start, self.bits)
            for part, end in zip((scale, code), ends, strict=True):
                if end < len(part):
                    part[end:] = 0
        return out, first, scales, codes

    def _body(self) -> int:
        return at("a message", self.payload.body, self.payload.body.numel())

    def _dropped(self) -> int:
        return at("what rounding drops", self.dropped, self.payload.body.numel())


def takes(bits: int, values: Tensor) -> bool:
    """Whether the passes know these codes and values."""
    return bits in (8, 4) and plain(values)


def encode(
    library: ctypes.CDLL,
    x: Tensor,
    chunk: Chunk,
    scales: Tensor,
    out: Tensor,
    seed: tuple[int, ...],
    scratch: Scratch,
    bits: int,
) -> None:
    """As ``coded.encode``."""
    if not takes(bits, x):
        return coded.encode(x, chunk, scales, out, seed, scratch, bits)
    (own,) = one_a_byte([out], [chunk], bits, scratch)
    values, scale = at("values", x, chunk.stop - chunk.start), at("scales", scales, chunk.rows)
    places = Places(values, scale, own.data_ptr(), values)
    table, lengths = table_of([(chunk, places)])
    how = rounding(seed, bits)
    over_rows(lengths, lambda a, b, _: library.quantise(table, a, b, how))
    together([own], [out], bits)


def decode(
    library: ctypes.CDLL,
    scales: Tensor,
    message: Tensor,
    chunk: Chunk,
    out: Tensor,
    scratch: Scratch,
    bits: int,
) -> None:
    """As ``coded.decode``."""
    if not takes(bits, out):
        return coded.decode(scales, message, chunk, out, scratch, bits)
    size = chunk.stop - chunk.start
    places = Places(
        at("values", out, size),
        at("scales", scales, chunk.rows),
        at("codes", message, code_bytes(size, bits), torch.int8),
    )
    table, lengths = table_of([(chunk, places)])
    over_rows(lengths, lambda a, b, _: library.dequantise(table, a, b, bits))


def rounding(seed: tuple[int, ...], bits: int) -> Table:
    """How the values of a message are rounded."""
    u = numbers(torch.float32, torch.device("cpu"))
    return Table(1, numbers=at("random numbers", u, len(u)), place=place_of(seed), bits=bits)


def one_a_byte(
    messages: list[Tensor], chunks: Sequence[Chunk], bits: int, scratch: Scratch
) -> list[Tensor]:
    """Where the codes of chunks are written: in their messages, but of 4 bits apart, to be packed
    by ``together``.
    """
    if bits == 8:
        return messages
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    return list(scratch("codes", sum(sizes), torch.int8, torch.device("cpu")).split(sizes))


def together(own: list[Tensor], messages: list[Tensor], bits: int) -> None:
    """Codes of 4 bits into their messages."""
    if bits == 4:
        for codes, out in zip(own, messages, strict=True):
            pack(codes, out[: code_bytes(len(codes), 4)])


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
