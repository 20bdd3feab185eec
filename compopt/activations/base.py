"""Interface of a compressor, and of the ranks that it exchanges with.

``codecs`` implements it; ``SendCompressed`` and ``CompressedRowwise`` call it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .._state.tensors import to_local, without_autocast


def replicated(weight: Tensor) -> Tensor:
    """Return this rank's copy of a weight, a DTensor or not, that is replicated on all ranks, as is
    its gradient.
    """
    return to_local(weight)


def apply_function(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """Return ``function.apply(*args)``, which torch does not annotate."""
    result: Tensor = function.apply(*args)
    return result


def require_side(side: Tensor | None) -> Tensor:
    """Return the side tensor of a compressor that needs one."""
    if side is None:
        raise ValueError(
            "side is missing beside the values: decompress what the same compressor has compressed."
        )
    return side


class TensorParallelRanks:
    """A single rank: a stage boundary, or a single process. `MeshRanks` are several ranks."""

    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, on every rank; the gradient passes unchanged."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x. A rank's gradient is that of its own entry."""
        return [x]

    def shared(self, weight: Tensor) -> Tensor:
        """Return a weight that all ranks use on different activations: its gradient is summed over
        the ranks.
        """
        return replicated(weight)


ALONE = TensorParallelRanks()


class _StraightThrough(torch.autograd.Function):
    """Return y in forward, and pass its gradient to x in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.detach()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Compressor(nn.Module):
    """Base class. Subclasses implement `compress`, `decompress` and `bytes`; calling a compressor
    does one all-reduce.

    A subclass with settings returns them from `extra_repr`; the two ends of a stage boundary
    compare them. A subclass with weights or buffers sets them in `reset_parameters`, equal on all
    ranks, so that a model can be made on the meta device. Weights of a tensor-parallel module are
    DTensors: compute with `ranks.shared(weight)` if each rank has its own activation, with
    `replicated(weight)` if all ranks have the same.

    Attributes:
        summable: True if the values of several ranks may be added before `decompress`. Otherwise
            every rank's payload is gathered, decompressed and added up.
        straight_through: True if the gradient of the output is also that of the input. At a stage
            boundary it is then sent beside the payload, on the group named there.
        gradient_bits: None, or the bits of each element of such a gradient, which `pack`, `size`
            and `unpack` then encode and decode.
        enabled: False while activations are sent uncompressed. See `set_compression`.
    """

    summable = False
    straight_through = False
    gradient_bits: int | None = None
    enabled = True

    def compress(
        self, x: Tensor, ranks: TensorParallelRanks = ALONE
    ) -> tuple[Tensor, Tensor | None]:
        """Return the payload of x, (values, side). Gradients flow through the values only; `side`
        is equal on all ranks if the compressor is summable. If ranks must agree on something before
        they compress, they exchange it through `ranks`.
        """
        raise NotImplementedError

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the activation of that shape, from its payload."""
        raise NotImplementedError

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of one rank's payload for an activation of that shape."""
        raise NotImplementedError

    @_disable_dynamo
    def forward(self, x: Tensor, ranks: TensorParallelRanks = ALONE) -> Tensor:
        """Return the sum of x over the ranks, compressed while the compressor is enabled."""
        if not self.enabled:
            return ranks.sum(x)
        with without_autocast(x):
            return self.exchange(x, ranks)

    def exchange(self, x: Tensor, ranks: TensorParallelRanks) -> Tensor:
        """Return the sum of the compressed x over the ranks."""
        if not self.straight_through:
            return self._sum_payloads(x, ranks)
        with torch.no_grad():
            total = self._sum_payloads(x, ranks)
        return apply_function(_StraightThrough, x, total)

    def _sum_payloads(self, x: Tensor, ranks: TensorParallelRanks) -> Tensor:
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
        """Observe the sum of all ranks' values, from which the next call may start."""

    def fits_payload(self) -> bool:
        """True if a straight-through gradient returns in place of the payload, without a group."""
        return False

    def pack(self, x: Tensor, bits: int) -> Tensor:
        """Quantize a gradient to that many bits, as a vector of x's dtype."""
        raise NotImplementedError

    def size(self, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> int:
        """Return the length of the vector of that dtype that `pack` returns for that shape."""
        raise NotImplementedError

    def unpack(self, values: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
        """Dequantize the vector that `pack` returned for a tensor of that shape."""
        raise NotImplementedError
