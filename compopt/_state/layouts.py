"""Layouts: the storage of one kind of state, and its conversion to a state dict and back.

In a state dict every state has the shape of its tensor. In memory a mask is stored as bits, a
momentum that is zero off its mask as its values on the mask, and sharded state as this rank's part.

``expand`` converts the stored form to that of a state dict, ``compact`` converts it back. Their
results are the same on all ranks, except that an expanded shard is 0 where other ranks own the
elements. ``cut_shard`` then reduces a loaded state, or one from another layout of the same
optimizer, to this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bits import pack_bits, unpack_bits
from .tensors import distribute_like, to_local


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a bucket, as layouts see it."""

    param: Tensor
    compressed: bool
    # the elements that this rank owns; None without shards
    own_range: tuple[int, int] | None = None

    @property
    def shape(self) -> torch.Size:
        return to_local(self.param).shape

    @property
    def numel(self) -> int:
        return to_local(self.param).numel()

    def to_param_shape(self, state: Tensor) -> Tensor:
        """Return state of this rank's elements in the parameter's shape and placements."""
        return distribute_like(self.param.detach(), state.view(self.shape))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Base of all layouts. ``of`` is the tensor to which a state belongs, ``beside`` its other
    state.
    """

    dtype: torch.dtype
    compressed_only: bool = False  # only compressed tensors have such state
    optional: bool = False  # a checkpoint without it loads zeros

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        """Return the shape in which the state is stored; ``state`` is what has been stored so
        far.
        """
        raise NotImplementedError

    def numel(self, of: TensorInfo, state: Tensor | None = None) -> int:
        return math.prod(self.stored_shape(of, state))

    def view_for_user(self, view: Tensor, of: TensorInfo) -> Tensor:
        """Return the entry of ``optimizer.state``."""
        return view

    def expand(self, stored: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        """Return the entry of a state dict; ``beside`` is in its stored form."""
        return stored

    def compact(self, saved: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        """Invert ``expand``; ``beside`` is in the form of the state dict.

        A state that is compact already is returned unchanged.
        """
        return saved

    def cut_shard(self, state: Tensor, of: TensorInfo) -> Tensor:
        """Return this rank's part of a compact state; one that is cut already is unchanged."""
        return state

    def expected_numel(self, loaded: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> int:
        """Return the number of elements that a valid loaded, compact state has."""
        return self.numel(of)


@dataclass(frozen=True)
class LocalShape(Layout):
    """One element for every element of the tensor, in its shape."""

    dtype: torch.dtype

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return of.shape

    def view_for_user(self, view: Tensor, of: TensorInfo) -> Tensor:
        return of.to_param_shape(view)


@dataclass(frozen=True)
class GlobalShape(Layout):
    """State of the global tensor, whole on every rank, although FSDP2 may shard the parameter."""

    dtype: torch.dtype

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return of.param.shape


@dataclass(frozen=True)
class Scalar(Layout):
    """One number for each tensor."""

    dtype: torch.dtype

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Bits(Layout):
    """A mask: one bit for each element, the first in the lowest bit, padded to whole bytes."""

    dtype: torch.dtype = torch.uint8

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return ((of.numel + 7) // 8,)

    def expand(self, stored: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        return of.to_param_shape(unpack_bits(stored)[: of.numel])

    def compact(self, saved: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        if saved.dtype != torch.bool:
            return saved
        flags = saved.reshape(-1)
        return pack_bits(torch.cat([flags, flags.new_zeros(-flags.numel() % 8)]))


@dataclass(frozen=True)
class OnMask(Layout):
    """Values of a compressed tensor on a mask, which is another state of kind Bits.

    Off the mask the state is 0. A tensor that is not compressed has all its values stored.
    """

    dtype: torch.dtype
    mask: str

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        if not of.compressed:
            return of.shape
        return (of.numel if state is None else state.numel(),)

    def view_for_user(self, view: Tensor, of: TensorInfo) -> Tensor:
        return view if of.compressed else of.to_param_shape(view)

    def expand(self, stored: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        if not of.compressed:
            return stored
        mask = unpack_bits(beside[self.mask])[: of.numel]
        values = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return of.to_param_shape(values.masked_scatter_(mask, stored))

    def compact(self, saved: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        mask = beside.get(self.mask)
        if not of.compressed or mask is None or mask.dtype != torch.bool:
            return saved
        if saved.numel() != mask.numel():
            return saved
        return saved.reshape(-1)[mask.reshape(-1)]

    def expected_numel(self, loaded: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> int:
        bits = beside.get(self.mask)
        if not of.compressed or bits is None:
            return of.numel
        return int(sum(((bits >> bit) & 1).sum() for bit in range(8)))


@dataclass(frozen=True)
class Sharded(Layout):
    """The elements in this rank's shard of each tensor, as a vector that may be empty.

    A frozen parameter is in no shard; its state is stored unsharded.
    """

    dtype: torch.dtype

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        if of.own_range is None:
            return (of.numel,)
        start, stop = of.own_range
        return (stop - start,)

    def expand(self, stored: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        if of.own_range is None:
            return of.to_param_shape(stored)
        start, stop = of.own_range
        # zeros in place of the other ranks' elements
        return of.to_param_shape(pad(stored.reshape(-1), (start, of.numel - stop)))

    def cut_shard(self, state: Tensor, of: TensorInfo) -> Tensor:
        if of.own_range is None or state.numel() != of.numel:
            return state
        start, stop = of.own_range
        return state.reshape(-1)[start:stop]


@dataclass(frozen=True)
class PaddedVector(Layout):
    """A vector with fewer elements than the tensor; in a state dict zeros follow them."""

    dtype: torch.dtype
    size: Callable[[Tensor], int]  # number of elements for a parameter
    unsharded: bool = False  # state of the global tensor, of which this rank may hold a shard

    def stored_shape(self, of: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return (self.size(of.param),)

    def expand(self, stored: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> Tensor:
        long = of.param.numel() if self.unsharded else of.numel
        padded = pad(stored.reshape(-1), (0, long - stored.numel()))
        return padded.view(of.param.shape) if self.unsharded else of.to_param_shape(padded)

    def cut_shard(self, state: Tensor, of: TensorInfo) -> Tensor:
        """Return the prefix of a state in either form, and zeros for a state of another size."""
        n = self.numel(of)
        if state.numel() in (n, of.param.numel() if self.unsharded else of.numel):
            return state.reshape(-1)[:n]
        return state.new_zeros(n)

    def expected_numel(self, loaded: Tensor, of: TensorInfo, beside: Mapping[str, Tensor]) -> int:
        return loaded.numel()  # ``cut_shard`` accepts any number
