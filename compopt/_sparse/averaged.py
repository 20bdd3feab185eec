"""The averaged gradient of what a rank owns of a bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.norms import squared_norm, stacked_squared_norms

# Of this rank's part of a tensor: values, and where they are in the part (None: everywhere).
Averaged = tuple[Tensor, Tensor | None]


class Average:
    """Of this rank's part of every tensor of a bucket: ``parts[i]`` of tensor i."""

    def __init__(self, parts: list[Averaged]):
        self.parts = parts

    def squared_norm(self) -> Tensor:
        """|G|^2 of this rank's shard; on a device one number for each tensor."""
        values = [own for own, _ in self.parts]
        if values[0].device.type != "cpu":
            there = [own for own in values if own.numel()]
            return stacked_squared_norms(there or values[:1])
        first, *others = map(squared_norm, values)
        return sum(others, first)

    def clip(self, factor: float) -> None:
        if factor < 1:
            torch._foreach_mul_([own for own, _ in self.parts], factor)

    def dense(self, dtype: torch.dtype) -> list[Tensor]:
        """All of it as dense vectors, 0 where nothing was exchanged."""
        return [own.to(dtype) for own, _ in self.parts]


class Scattered(Average):
    """The same on a device, of compressed tensors one vector: ``coded``, which is at ``index`` of
    the bits of the mask that this rank owns.

    ``spans``: where this rank's part of each compressed tensor begins and ends among these bits, of
    which there are ``size``.
    """

    def __init__(
        self,
        parts: list[Tensor],
        coded: Tensor,
        index: Tensor,
        spans: dict[int, tuple[int, int]],
        size: int,
    ):
        super().__init__([(own, None) for own in parts])
        self.coded, self.index, self.spans, self.size = coded, index, spans, size

    def dense(self, dtype: torch.dtype) -> list[Tensor]:
        flat = self.coded.new_zeros(self.size, dtype=dtype)
        flat.index_copy_(0, self.index, self.coded.to(dtype))
        return [
            flat[slice(*self.spans[i])] if i in self.spans else own.to(dtype)
            for i, (own, _) in enumerate(self.parts)
        ]
