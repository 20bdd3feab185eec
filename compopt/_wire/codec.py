"""The codec of flat values for a gather: int8, int4 or int2, with a scale for each 128 values.

It knows neither bucket nor optimizer. Quantized means of payloads are in ``quantization``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .payload import Scratch, packed_bytes
from .quantization import Chunk, dequantize_chunk, quantize_chunk, row_layout


class FlatCodec:
    """Encodes the values of every rank to a message of scales, then quantized values.

    ``lengths[rank]``: the lengths of that rank's tensors, no two of which share a scale. All
    messages have ``nbytes`` bytes. ``quantize`` and ``dequantize``: a backend's.
    """

    def __init__(
        self,
        bits: int,
        lengths: Sequence[tuple[int, ...]],
        scratch: Scratch,
        quantize: Callable[..., None] = quantize_chunk,
        dequantize: Callable[..., None] = dequantize_chunk,
    ):
        self.bits, self.scratch = bits, scratch
        self.quantize, self.dequantize = quantize, dequantize
        self.chunks = [row_layout(parts, 1).chunks[0] for parts in lengths]
        self.quantized_at = 4 * max(chunk.rows for chunk in self.chunks)
        quantized = packed_bytes(max(chunk.stop for chunk in self.chunks), bits)
        # a message without bytes could not be viewed as float32
        self.nbytes = max(4, self.quantized_at + quantized + -quantized % 4)

    def encode(self, values: Tensor, rank: int, out: Tensor, seed: tuple[int, ...] | None) -> None:
        """Write a rank's message to ``out``; its ``values`` become the rounding error.

        ``seed`` None: rounded to the nearest.
        """
        chunk = self.chunks[rank]
        scales, quantized = self._fields(out, chunk)
        self.quantize(values, chunk, scales, quantized, seed, self.scratch, self.bits)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the values of all ranks to the rows of ``out``, as long as the longest."""
        for message, chunk, row in zip(messages, self.chunks, out, strict=True):
            scales, quantized = self._fields(message, chunk)
            self.dequantize(scales, quantized, chunk, row[: chunk.stop], self.scratch, self.bits)

    def _fields(self, message: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return a rank's scales, and its quantized values as bytes."""
        scales = message[: 4 * chunk.rows].view(torch.float32)
        return scales, message[self.quantized_at :].view(torch.int8)
