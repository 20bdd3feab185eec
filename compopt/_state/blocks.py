"""Values in 8 bits: blocks of 128 codes from -127 to 127, each behind its scale.

A block has 132 bytes. Its largest value has code 127 or -127, and the scale, a float32, has 17
significant bits, so that its product with a code is exact: a block that is decoded and encoded
again is the same. Other values are rounded at random without bias, or to nearest.

``Residuals`` stores in such blocks, and the backends have faster codecs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._wire.payload import ROW
from .._wire.quantization import (
    BLOCK_ROWS,
    NOISE_STRIDE,
    SMALLEST,
    divide_,
    noise_offset,
    noise_table,
    select_noise,
)

BLOCK_BYTES = 4 + ROW
LARGEST = 127
CUT = 2**7  # of the mantissa's last place: what a scale is a multiple of


class BlockCodec:
    """Encodes and decodes flat values; a backend may have one of its own.

    ``blocks`` are int8, (count, 132).
    """

    def encode(
        self, values: Tensor, blocks: Tensor, seed: tuple[int, ...] | None = None, first: int = 0
    ) -> None:
        """Encode ``values`` to ``blocks``, of which the first has the number ``first``: with the
        seed it determines the random numbers. Without a seed values are rounded to nearest.
        """
        padded = values.new_zeros(len(blocks) * ROW) if len(values) % ROW else values
        if padded is not values:
            padded[: len(values)] = values
        begin, all_at_once = 0, blocks.device.type != "cpu"
        while begin < len(blocks):  # on a CPU in groups that stay in the cache
            end = min(len(blocks), begin + BLOCK_ROWS - (first + begin) % BLOCK_ROWS)
            end = len(blocks) if all_at_once else end
            rows = padded.view(-1, ROW)[begin:end]
            _encode_rows(rows, blocks[begin:end], _draw(rows, seed, first + begin))
            begin = end

    def decode(self, blocks: Tensor, out: Tensor) -> None:
        """Write the values of ``blocks`` to flat ``out``."""
        scales, codes = blocks[:, :4].view(torch.float32), blocks[:, 4:]
        if len(out) % ROW:
            out.copy_(codes.to(out.dtype).mul_(scales).view(-1)[: len(out)])
        else:
            torch.mul(codes, scales, out=out.view(-1, ROW))


def _draw(rows: Tensor, seed: tuple[int, ...] | None, first: int) -> Tensor | float:
    """Return a number in [0, 1) for each value of rows from number ``first`` on."""
    if seed is None:
        return 0.5
    group, skipped = divmod(first, BLOCK_ROWS)
    offset, table = noise_offset(seed) + NOISE_STRIDE * group, noise_table(rows.dtype, rows.device)
    noise = select_noise(table, offset, (skipped + len(rows)) * ROW)
    return noise[skipped * ROW :].view(rows.shape)


def _encode_rows(x: Tensor, blocks: Tensor, noise: Tensor | float) -> None:
    size = x.abs()
    largest = size.amax(1, keepdim=True)
    scale = divide_(largest.to(torch.float32, copy=True), LARGEST)
    scale.masked_fill_(scale < SMALLEST, 0)
    scale.view(torch.int32).add_(CUT // 2).bitwise_and_(-CUT)
    scale.add_(scale - scale)  # inf becomes NaN
    codes = (x / scale.to(x.dtype)).add_(noise).floor_().clamp_(-LARGEST, LARGEST)
    codes = torch.where(size == largest, torch.copysign(size.new_full((), LARGEST), x), codes)
    blocks[:, :4].view(torch.float32).copy_(scale)
    blocks[:, 4:].copy_(torch.where(scale > 0, codes, 0))
