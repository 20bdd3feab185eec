"""What a compressor is, and the two that are linear in every element: Identity and AutoEncoder."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._state.tensors import to_local


def replicated(weight: Tensor) -> Tensor:
    """This rank's copy of a weight that is the same on all of them, in a DTensor or not, and so is
    its gradient.
    """
    return to_local(weight)  # whose gradient is a DTensor with the weight's placements


def applied(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """``function.apply(*args)``, of which torch does not say what it returns."""
    result: Tensor = function.apply(*args)
    return result


def given(side: Tensor | None) -> Tensor:
    """The side tensor, for a compressor that cannot do without."""
    if side is None:
        raise ValueError(
            "side is missing beside the values: decompress what the same compressor has compressed."
        )
    return side


class Alone:
    """One rank that has nobody to add to: a stage boundary, or a process on its own.

    `MeshRanks` is its counterpart.
    """

    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; every rank gets it, so the gradient passes unchanged."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x. A rank's gradient is that of its own entry."""
        return [x]

    def shared(self, weight: Tensor) -> Tensor:
        """A weight all ranks share but use on different activations: its gradient is summed over
        the ranks.
        """
        return replicated(weight)


ALONE = Alone()


class _StraightThrough(torch.autograd.Function):
    """y forward, the gradient of x backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Compressor(nn.Module):
    """Base class. Subclasses give `compress`, `decompress` and `bytes`; calling a compressor does
    one all-reduce.

    A subclass with settings names them in `extra_repr`: by them the two ends of a stage boundary
    know each other. One with weights or buffers sets them in `reset_parameters`, alike on all
    ranks, so that a model can be made on the meta device. Weights of a tensor-parallel module are
    DTensors: compute with `ranks.shared(weight)` where each rank holds its own activation, with
    `replicated(weight)` where all hold the same.

    Attributes:
        summable: True when the values of several ranks may be added before `decompress`. Otherwise
            every rank's payload is gathered, decompressed and added up.
        straight_through: True when the gradient that arrives is also that of what was compressed.
            At a stage boundary it then travels beside the payload, on the group named there.
        gradient_bits: None, or the bits an element of such a gradient, which `pack`, `size` and
            `unpack` then make and read.
        enabled: False while everything is sent. See `set_compression`.
    """

    summable = False
    straight_through = False
    gradient_bits: int | None = None
    enabled = True

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor | None]:
        """What is sent for x: (values, side). Gradients flow through the values only; `side` is
        equal on all ranks where the compressor is summable. `ranks` is there for methods that must
        agree on something first.
        """
        raise NotImplementedError

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """The activation of that shape, from what was sent."""
        raise NotImplementedError

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one rank's payload for an activation of that shape."""
        raise NotImplementedError

    def forward(self, x: Tensor, ranks: Alone = ALONE) -> Tensor:
        """The sum of x over the ranks, as far as compression lets through."""
        if not self.enabled:
            return ranks.sum(x)
        return self.exchange(x, ranks)

    def exchange(self, x: Tensor, ranks: Alone) -> Tensor:
        """What `forward` does while the compressor is enabled."""
        if not self.straight_through:
            return self._total(x, ranks)
        with torch.no_grad():
            total = self._total(x, ranks)
        return applied(_StraightThrough, x, total)

    def _total(self, x: Tensor, ranks: Alone) -> Tensor:
        values, side = self.compress(x, ranks)
        if self.summable:
            total = ranks.sum(values)
            self.learn(total)
            return self.decompress(total, side, x.shape)
        sides = [None] * ranks.size if side is None else ranks.gather(side)
        parts = [
            self.decompress(v, s, x.shape) for v, s in zip(ranks.gather(values), sides, strict=True)
        ]
        return sum(parts[1:], parts[0])

    def learn(self, total: Tensor) -> None:
        """Told the sum of all ranks' values, for compressors that start from it the next time."""

    def fits_payload(self) -> bool:
        """Whether a straight-through gradient returns in the payload's place, without a group."""
        return False

    def pack(self, x: Tensor, bits: int) -> Tensor:
        """A gradient of that many bits an element, as a vector of x's dtype."""
        raise NotImplementedError

    def size(self, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> int:
        """Elements of that dtype that `pack` makes of that shape."""
        raise NotImplementedError

    def unpack(self, values: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
        """The tensor of that shape that `pack` was given, to within rounding."""
        raise NotImplementedError


class Identity(Compressor):
    """No compression: the same exchange, everything sent.

    The reference the others are compared with.
    """

    summable = True

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, None]:
        return x, None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return values.view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape) * dtype.itemsize


class AutoEncoder(Compressor):
    """Two learned matrices: `hidden` numbers a token become `code` and back (MCBench, section 3.1).
    Exact gradients.

    The encoder starts as random orthonormal columns and the decoder as their transpose, so that
    what arrives first is a projection of the activation; both are drawn from `seed` alone, so that
    all ranks and both ends of a stage boundary start alike. At a boundary the sender trains the
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
        """Draw both matrices. After `to_empty`, for a model that was made on the meta device."""
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

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, None]:
        return x @ ranks.shared(self.encoder).to(x.dtype), None

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return (values @ replicated(self.decoder).to(values.dtype)).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape[:-1]) * self.encoder.shape[1] * dtype.itemsize
