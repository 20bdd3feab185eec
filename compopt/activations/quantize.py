"""Quantization: fewer bits an element, forward and, across a stage boundary, backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .codecs import ALONE, Alone, Compressor


class _StraightThrough(torch.autograd.Function):
    """y forward, the gradient of x backward."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Encode(torch.autograd.Function):
    """x to packed bytes; the gradient arrives as packed bytes too and is unpacked."""

    @staticmethod
    def forward(ctx, x: Tensor, codec: Quantize) -> Tensor:
        ctx.codec, ctx.shape = codec, x.shape
        return codec.pack(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.codec.unpack(gradient, ctx.shape), None


class _Decode(torch.autograd.Function):
    """Packed bytes to x; the gradient of x leaves as packed bytes."""

    @staticmethod
    def forward(ctx, values: Tensor, codec: Quantize, shape: tuple[int, ...]) -> Tensor:
        ctx.codec = codec
        return codec.unpack(values, shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.codec.pack(gradient), None, None


class Quantize(Compressor):
    """`bits` bits an element and one step size a tensor, max|x| / (2^(bits-1) - 1) (MCBench, section 3.1).

    Gradients are straight-through. In a tensor-parallel all-reduce they pass exactly, as no gradient crosses the
    network there. At a stage boundary the gradient is quantized the same way on its way back: it has to fit into the
    bytes that came.

    Args:
        bits: 2, 4 or 8.
        stochastic: round up or down at random, without bias, instead of to the nearest.
    """

    def __init__(self, bits: int, stochastic: bool = False) -> None:
        super().__init__()
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8; got {bits}.")
        self.bits, self.stochastic = bits, stochastic

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, None]:
        return _Encode.apply(x, self), None

    def decompress(self, values: Tensor, side: None, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return _Decode.apply(values, self, tuple(shape))

    def forward(self, x: Tensor, ranks: Alone = ALONE) -> Tensor:
        with torch.no_grad():
            total = super().forward(x, ranks)
        return _StraightThrough.apply(x, total)

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        words = -(-math.prod(shape) * self.bits // 8)
        return -(-(words + 4) // dtype.itemsize) * dtype.itemsize

    def pack(self, x: Tensor) -> Tensor:
        """Packed bytes and the fp32 step size behind them, seen as a vector of x's dtype: autograd carries that."""
        flat, levels, each = x.detach().reshape(-1), 2 ** (self.bits - 1) - 1, 8 // self.bits
        step = (flat.abs().max().float() / levels).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = flat / step.to(flat.dtype).clamp_min(torch.finfo(flat.dtype).tiny)
        rounded = (scaled + torch.rand_like(scaled)).floor() if self.stochastic else scaled.round()
        codes = rounded.clamp(-levels, levels).add(levels).to(torch.uint8)
        codes = nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
        packed = codes[:, 0].clone()
        for i in range(1, each):
            packed |= codes[:, i] << (i * self.bits)
        packed = torch.cat([step.view(1).view(torch.uint8), packed])
        return nn.functional.pad(packed, (0, -packed.numel() % x.element_size())).view(x.dtype)

    def unpack(self, values: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """The tensor of that shape that `pack` was given, to within rounding."""
        n, levels, each = math.prod(shape), 2 ** (self.bits - 1) - 1, 8 // self.bits
        raw = values.detach().contiguous().view(torch.uint8)
        step = raw[:4].clone().view(torch.float32)
        packed = raw[4 : 4 + -(-n // each)]
        codes = torch.stack([(packed >> (i * self.bits)) & (2**self.bits - 1) for i in range(each)], dim=1)
        return ((codes.view(-1)[:n].to(values.dtype) - levels) * step.to(values.dtype)).view(shape)
