"""The mean of an int8 or int4 payload by Triton kernels: a launch or two for each of its stages."""

from __future__ import annotations

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._wire.quantise import numbers, place_of
from ..._wire.quantised_mean import QuantisedMean
from ..._wire.requests import Payload

MOST = 2**31  # bytes of messages: kernels count them in 32 bits


class TritonMean(QuantisedMean):
    """As the reference, in the same messages; codes of 2 bits, and values in float64, are left to
    it.
    """

    def __init__(self, payload: Payload, rank: int, ranks: int):
        super().__init__(payload, rank, ranks)
        small = max(payload.body.numel(), ranks * self._size(self.words)) < MOST
        self.fits = self.bits in (8, 4) and payload.flat.dtype == torch.float32 and small

    @property
    def _programs(self) -> kernels.Programs:
        cuts = tuple(
            (c.start, c.first_row, c.stop - c.start, tuple(map(tuple, c.pieces)))
            for c in self.layout.chunks
        )
        return kernels.programs(cuts, self.payload.flat.device)

    def _noise(self, stage: int) -> tuple[Tensor, int]:
        table = numbers(torch.float32, self.payload.flat.device)
        return table, place_of((*self.seed, self.rank, stage))

    def _at(self, words: int) -> tuple[int, int]:
        """Bytes of a message in front of its scales and codes."""
        return 4 * words, 4 * (words + self.layout.scales)

    def first(self) -> Tensor:
        if not self.fits:
            return super().first()
        flat, dropped = self.payload.flat, self.dropped
        shape = self.ranks, self._size(self.words)
        out = torch.empty(shape, dtype=torch.uint8, device=flat.device)
        self._fields(out, self.words)[0].copy_(flat[: self.words])
        noise, (scales_at, codes_at) = self._noise(1), self._at(self.words)
        body, bits = self.payload.body, self.bits
        kernels.quantise(self._programs, body, dropped, *noise, out, scales_at, codes_at, bits)
        return out

    def second(self, received: Tensor) -> Tensor:
        if not self.fits:
            return super().second(received)
        received = received.contiguous()
        kernels.mean_of_words(received, self.payload.flat[: self.words])
        out = torch.empty(self._size(0), dtype=torch.uint8, device=received.device)
        noise, at, own_codes_at = self._noise(2), self._at(self.words), self._at(0)[1]
        kernels.mean(
            self._programs,
            self.rank,
            received,
            self.dropped,
            *noise,
            out,
            *at,
            own_codes_at,
            self.bits,
        )
        return out

    def finish(self, gathered: Tensor) -> None:
        if not self.fits:
            return super().finish(gathered)
        kernels.dequantise(self._programs, gathered, self.payload.body, self._at(0)[1], self.bits)
