"""The compressors of MCBench, section 3.1: an auto-encoder (A in its tables), top-k and random-k
(T, R), PowerSGD (P) and quantization (Q); and no compression.

Users give one to the wrappers of ``pipeline`` and ``tensor_parallel``.
"""

from __future__ import annotations

import math
import random
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._state.masks import selection_size
from .base import ALONE, Compressor, TensorParallelRanks, apply_function, replicated, require_side
from .recompute import Replay, is_recomputing


class Identity(Compressor):
    """No compression: the same exchange of the whole activation, as a reference."""

    summable = True

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, None]:
        return x, None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return values.view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape) * dtype.itemsize


class AutoEncoder(Compressor):
    """Two learned matrices: `hidden` numbers a token become `code` and back, by W_e and W_d in the
    paper, h to h_c. Exact gradients.

    The encoder starts as random orthonormal columns and the decoder as their transpose, so that the
    first output is a projection of the activation. Both are drawn from `seed` alone, so that all
    ranks and both ends of a stage boundary start equal. At a boundary the sender trains the
    encoder, the receiver the decoder. The matrices are used in the activation's precision.
    """

    summable = True

    def __init__(self, hidden: int, code: int, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= code <= hidden:
            raise ValueError(
                f"code must be between 1 and hidden; got code={code}, hidden={hidden}."
            )
        self.seed = seed
        self.encoder = nn.Parameter(torch.empty(hidden, code, dtype=torch.get_default_dtype()))
        self.decoder = nn.Parameter(torch.empty(code, hidden, dtype=torch.get_default_dtype()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw both matrices; call it after `to_empty`, if the model was on the meta device."""
        encoder, decoder = replicated(self.encoder), replicated(self.decoder)
        if encoder.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.randn(encoder.shape, generator=generator, dtype=torch.float64, device="cpu")
        columns = torch.linalg.qr(start).Q
        encoder.copy_(columns)
        decoder.copy_(columns.t())

    def extra_repr(self) -> str:
        return f"hidden={self.encoder.shape[0]}, code={self.encoder.shape[1]}, seed={self.seed}"

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, None]:
        return x @ ranks.shared(self.encoder).to(x.dtype), None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return (values @ replicated(self.decoder).to(values.dtype)).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape[:-1]) * self.encoder.shape[1] * dtype.itemsize


# Sparse: some of the elements


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1; got {density}.")


class TopK(Compressor):
    """The share `density` of elements with the largest magnitudes, with int32 positions.

    Gradients are exact.
    """

    def __init__(self, density: float) -> None:
        super().__init__()
        _check_density(density)
        self.density = density

    def extra_repr(self) -> str:
        return f"density={self.density}"

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1)
        k = selection_size(self.density, flat.numel())
        index = flat.detach().abs().topk(k, sorted=False).indices
        return flat[index], index.int()

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        # torch's pipelining first runs stages on uninitialized memory.
        index = require_side(side).long().clamp(0, max(n - 1, 0))
        return values.new_zeros(n).index_put((index,), values).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return selection_size(self.density, math.prod(shape)) * (dtype.itemsize + 4)


class RandomK(Compressor):
    """A share `density` of the elements, at random positions that all ranks share.

    Positions are (a*j + b) mod n for a random b, and a random a that is coprime with n. Every
    element is equally likely, n numbers are never sampled on the host, and two numbers encode the
    positions. Values are not rescaled; gradients are exact. The k-th forward draws a and b from
    `seed` and k; activation checkpointing recomputes it with the same ones.
    """

    summable = True

    def __init__(self, density: float, seed: int = 0) -> None:
        super().__init__()
        _check_density(density)
        self.density, self.seed = density, seed
        self._forwards = 0
        self._replay: Replay[tuple[int, int]] = Replay()

    def extra_repr(self) -> str:
        return f"density={self.density}, seed={self.seed}"

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, Tensor]:
        n = x.numel()
        numbers = self._replay(lambda: self._draw_step(n))
        side = torch.tensor(numbers, dtype=torch.int64, device=x.device)
        return x.reshape(-1)[self._make_positions(side, n)], side

    def _draw_step(self, n: int) -> tuple[int, int]:
        self._forwards += 1
        generator, n = random.Random(f"{self.seed}, {self._forwards}"), max(n, 1)
        step = generator.randrange(1, n + 1)
        while math.gcd(step, n) != 1:
            step = generator.randrange(1, n + 1)
        return step, generator.randrange(n)

    def _make_positions(self, side: Tensor, n: int) -> Tensor:
        order = torch.arange(selection_size(self.density, n), dtype=torch.int64, device=side.device)
        return (order * side[0] + side[1]).remainder(max(n, 1))

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        index = self._make_positions(require_side(side), n)
        return values.new_zeros(n).index_put((index,), values).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return selection_size(self.density, math.prod(shape)) * dtype.itemsize + 16


# Low rank


class PowerSGD(Compressor):
    """Factors of rank `rank` of the (tokens, hidden) matrix, by one power iteration a call (Vogels
    et al. 2019), in fp32 or wider.

    The payload is P and x^T P, for an orthonormal column basis P of x Q. P is treated as constant:
    the gradient is that of the projection x -> P P^T x, without the derivative of the QR
    factorization. The row basis Q of the next call is x^T P. It is updated in training only, and
    not while activation checkpointing recomputes a forward. An all-reduce sums x Q in fp32:
    for an activation in 16 bits it sends more than `bytes` says, which counts a payload.
    """

    summable = True
    # Q: x^T P of the last call.
    basis: Tensor

    def __init__(self, rank: int, hidden: int, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= rank <= hidden:
            raise ValueError(
                f"rank must be between 1 and hidden; got rank={rank}, hidden={hidden}."
            )
        self.seed = seed
        start = torch.empty(hidden, rank, dtype=torch.get_default_dtype())
        self.register_buffer("basis", start)
        self._replay: Replay[Tensor] = Replay()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the first basis; call it after `to_empty`, if the model was on the meta device."""
        if not self.basis.is_meta:
            generator = torch.Generator().manual_seed(self.seed)
            self.basis.copy_(
                torch.randn(
                    self.basis.shape, generator=generator, dtype=torch.float32, device="cpu"
                )
            )

    def extra_repr(self) -> str:
        return f"rank={self.basis.shape[1]}, hidden={self.basis.shape[0]}, seed={self.seed}"

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, Tensor]:
        matrix = x.reshape(-1, x.shape[-1])
        basis = self._replay(lambda: self.basis)
        with torch.no_grad():
            # QR is inaccurate in half precision.
            wide = torch.promote_types(basis.dtype, torch.float32)
            columns = ranks.sum(matrix.to(wide) @ basis.to(wide))
            orthonormal = torch.linalg.qr(columns).Q.to(x.dtype)
        values = matrix.t() @ orthonormal
        self.learn(values)
        return values, orthonormal

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return (require_side(side) @ values.t()).view(shape)

    @torch.no_grad()
    def learn(self, total: Tensor) -> None:
        if not self.training or is_recomputing() or torch.is_inference_mode_enabled():
            return
        # With fewer tokens than the rank, keep the wider basis.
        if total.shape == self.basis.shape:
            # One batch must not spoil all later ones: keep no basis that is not finite, or whose
            # squares overflow.
            basis = total.to(self.basis.dtype)
            wide = torch.promote_types(basis.dtype, torch.float32)
            usable = torch.linalg.vector_norm(basis, dtype=wide).isfinite()
            # A new tensor, because a forward that is recomputed may need the old one.
            self.basis = torch.where(usable, basis, self.basis)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        tokens, (hidden, rank) = math.prod(shape[:-1]), self.basis.shape
        return min(rank, tokens) * (tokens + hidden) * dtype.itemsize


# Quantization


class _Encode(torch.autograd.Function):
    """Quantize x to packed bytes; unpack the gradient from the front of as many bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Quantize) -> Tensor:
        ctx.codec, ctx.shape = codec, x.shape
        return codec.pack(x, codec.bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        bits = ctx.codec.bits_within_payload()
        return ctx.codec.unpack(gradient, ctx.shape, bits), None


class _Decode(torch.autograd.Function):
    """Unpack bytes to x; quantize the gradient of x to as many packed bytes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, codec: Quantize, shape: tuple[int, ...]) -> Tensor:
        ctx.codec, ctx.length = codec, values.numel()
        return codec.unpack(values, shape, codec.bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        packed = ctx.codec.pack(gradient, ctx.codec.bits_within_payload())
        return nn.functional.pad(packed, (0, ctx.length - packed.numel())), None, None


class Quantize(Compressor):
    """Quantization to `bits` bits: 2^bits levels from -s to s - s / 2^(bits-1), where s is the
    largest magnitude of a channel.

    Scales are those of MCBench's code. (Its paper has 2^bits - 1 levels, multiples of
    max|A| / (2^(bits-1) - 1), and one scale a tensor, which one large channel spoils for all
    others.) A channel is an entry of the last dimension. Gradients are
    straight-through. They are exact in a tensor-parallel all-reduce, where no gradient crosses the
    network. Across a stage boundary the gradient returns unquantized beside the payload, on a
    process group of the two stages; with ``gradient_bits`` of at most ``bits`` it is quantized and
    needs no group.

    Args:
        bits: 2, 4 or 8.
        stochastic: round up or down at random, without bias, instead of to the nearest level.
        scale: "channel", or "tensor" for one scale of the whole activation.
        gradient_bits: bits of the gradient that returns across a stage boundary: 2, 4, 8, or None
            for an unquantized one.
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
        rounding = f"bits={self.bits}, stochastic={self.stochastic}, scale={self.scale!r}"
        return f"{rounding}, gradient_bits={self.gradient_bits}"

    def fits_payload(self) -> bool:
        """True if the quantized gradient is no larger than the quantized activation."""
        return self.gradient_bits is not None and self.gradient_bits <= self.bits

    def bits_within_payload(self) -> int:
        """Return the bits of a gradient that returns in place of the payload."""
        if self.gradient_bits is None or not self.fits_payload():
            raise RuntimeError(
                f"a gradient of {self.gradient_bits or 'all its'} bits does not fit into a payload "
                f"of {self.bits}: call the compressor, use SendCompressed and ReceiveCompressed "
                "with a group, or set gradient_bits."
            )
        return self.gradient_bits

    def compress(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> tuple[Tensor, None]:
        return apply_function(_Encode, x, self), None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return apply_function(_Decode, values, self, tuple(shape))

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return self.size(shape, self.bits, dtype) * dtype.itemsize

    def size(self, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> int:
        n = math.prod(shape)
        packed = 2 * self._count_scales(shape) + -(-n * bits // 8) if n else 0
        return -(-packed // dtype.itemsize)

    def _count_scales(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.scale == "channel" and shape else 1

    def pack(self, x: Tensor, bits: int) -> Tensor:
        """Return the scales of all channels, in bfloat16, and the packed values, viewed as a vector
        of x's dtype, which autograd accepts.
        """
        if not x.numel():
            return x.new_zeros(0)
        half, per_byte = 1 << (bits - 1), 8 // bits
        wide = torch.promote_types(x.dtype, torch.float32)
        matrix = x.detach().reshape(-1, self._count_scales(x.shape)).to(wide)
        scales = matrix.abs().amax(0).bfloat16()
        scaled = matrix / (scales.to(wide) / half).clamp_min(torch.finfo(wide).tiny)
        rounded = (scaled + torch.rand_like(scaled)).floor() if self.stochastic else scaled.round()
        levels = rounded.clamp(-half, half - 1).add(half).to(torch.uint8).view(-1)
        levels = nn.functional.pad(levels, (0, -levels.numel() % per_byte)).view(-1, per_byte)
        packed = levels[:, 0].clone()
        for i in range(1, per_byte):
            packed |= levels[:, i] << (i * bits)
        packed = torch.cat([scales.view(torch.uint8), packed])
        return nn.functional.pad(packed, (0, -packed.numel() % x.element_size())).view(x.dtype)

    def unpack(self, values: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
        n, half, per_byte = math.prod(shape), 1 << (bits - 1), 8 // bits
        if not n:
            return values.new_zeros(shape)
        wide = torch.promote_types(values.dtype, torch.float32)
        raw, front = values.detach().contiguous().view(torch.uint8), 2 * self._count_scales(shape)
        scales = raw[:front].clone().view(torch.bfloat16).to(wide)
        packed = raw[front : front + -(-n // per_byte)]
        columns = [(packed >> (i * bits)) & ((1 << bits) - 1) for i in range(per_byte)]
        levels = torch.stack(columns, dim=1).view(-1)[:n].to(wide).view(-1, len(scales)) - half
        return (levels * (scales / half)).to(values.dtype).view(shape)
