"""Quantization: fewer bits an element, forward and, where asked for, backward."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .codecs import ALONE, Alone, Compressor, applied


class _Encode(torch.autograd.Function):
    """x to packed bytes; the gradient arrives packed too, at its front, and is unpacked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Quantize) -> Tensor:
        ctx.codec, ctx.shape = codec, x.shape
        return codec.pack(x, codec.bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        bits = ctx.codec.bits_within_payload()
        return ctx.codec.unpack(gradient, ctx.shape, bits), None


class _Decode(torch.autograd.Function):
    """Packed bytes to x; the gradient of x leaves as packed bytes, as many as came."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, codec: Quantize, shape: tuple[int, ...]) -> Tensor:
        ctx.codec, ctx.came = codec, values.numel()
        return codec.unpack(values, shape, codec.bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        packed = ctx.codec.pack(gradient, ctx.codec.bits_within_payload())
        return nn.functional.pad(packed, (0, ctx.came - packed.numel())), None, None


class Quantize(Compressor):
    """`bits` bits an element, 2^bits levels from -s to s - s / 2^(bits-1), s the largest magnitude
    of a channel.

    As in MCBench's code (its paper writes one scale a tensor, which one large channel spoils for
    all others). A channel is an entry of the last dimension. Gradients are straight-through: exact
    in a tensor-parallel all-reduce, where no gradient crosses the network. Across a stage boundary
    the gradient returns in full beside the payload, on a process group of the two stages; with
    ``gradient_bits`` no larger than ``bits`` it is quantized and needs no group.

    Args:
        bits: 2, 4 or 8.
        stochastic: round up or down at random, without bias, instead of to the nearest.
        scale: "channel", or "tensor" for one of the whole activation.
        gradient_bits: of the gradient that returns across a stage boundary: 2, 4, 8, or None for
            all of it.
    """

    straight_through = True

    def __init__(
        self,
        bits: int,
        stochastic: bool = False,
        *,
        scale: Literal["channel", "tensor"] = "channel",
        gradient_bits: int | None = None,
    ) -> None:
        super().__init__()
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8; got {bits}.")
        if gradient_bits not in (None, 2, 4, 8):
            raise ValueError(f"gradient_bits must be 2, 4, 8 or None; got {gradient_bits}.")
        if scale not in ("channel", "tensor"):
            raise ValueError(f'scale must be "channel" or "tensor"; got {scale!r}.')
        self.bits, self.stochastic = bits, stochastic
        self.scale, self.gradient_bits = scale, gradient_bits

    def extra_repr(self) -> str:
        words = f"bits={self.bits}, stochastic={self.stochastic}, scale={self.scale!r}"
        return f"{words}, gradient_bits={self.gradient_bits}"

    def fits_payload(self) -> bool:
        """Whether a gradient of that many bits fits where the activation's bytes were."""
        return self.gradient_bits is not None and self.gradient_bits <= self.bits

    def bits_within_payload(self) -> int:
        """Bits of a gradient that returns in place of the payload."""
        if self.gradient_bits is None or not self.fits_payload():
            raise RuntimeError(
                f"a gradient of {self.gradient_bits or 'all its'} bits does not fit into a payload "
                f"of {self.bits}: call the compressor, use SendCompressed and ReceiveCompressed "
                "with a group, or set gradient_bits."
            )
        return self.gradient_bits

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, None]:
        return applied(_Encode, x, self), None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return applied(_Decode, values, self, tuple(shape))

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return self.size(shape, self.bits, dtype) * dtype.itemsize

    def size(self, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> int:
        """Elements of that dtype that `pack` makes of that shape."""
        n = math.prod(shape)
        packed = 2 * self._scales(shape) + -(-n * bits // 8) if n else 0
        return -(-packed // dtype.itemsize)

    def _scales(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.scale == "channel" and shape else 1

    def pack(self, x: Tensor, bits: int) -> Tensor:
        """A bfloat16 scale a channel and the packed codes, seen as a vector of x's dtype: autograd
        carries that.
        """
        if not x.numel():
            return x.new_zeros(0)
        half, each = 1 << (bits - 1), 8 // bits
        wide = torch.promote_types(x.dtype, torch.float32)
        matrix = x.detach().reshape(-1, self._scales(x.shape)).to(wide)
        scales = matrix.abs().amax(0).bfloat16()
        scaled = matrix / (scales.to(wide) / half).clamp_min(torch.finfo(wide).tiny)
        rounded = (scaled + torch.rand_like(scaled)).floor() if self.stochastic else scaled.round()
        codes = rounded.clamp(-half, half - 1).add(half).to(torch.uint8).view(-1)
        codes = nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
        packed = codes[:, 0].clone()
        for i in range(1, each):
            packed |= codes[:, i] << (i * bits)
        packed = torch.cat([scales.view(torch.uint8), packed])
        return nn.functional.pad(packed, (0, -packed.numel() % x.element_size())).view(x.dtype)

    def unpack(self, values: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
        """The tensor of that shape that `pack` was given, to within rounding."""
        n, half, each = math.prod(shape), 1 << (bits - 1), 8 // bits
        if not n:
            return values.new_zeros(shape)
        wide = torch.promote_types(values.dtype, torch.float32)
        raw, front = values.detach().contiguous().view(torch.uint8), 2 * self._scales(shape)
        scales = raw[:front].clone().view(torch.bfloat16).to(wide)
        packed = raw[front : front + -(-n // each)]
        codes = torch.stack(
            [(packed >> (i * bits)) & ((1 << bits) - 1) for i in range(each)], dim=1
        )
        levels = codes.view(-1)[:n].to(wide).view(-1, len(scales)) - half
        return (levels * (scales / half)).to(values.dtype).view(shape)
