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

from .._wire.payload import count_rows
from .bits import pack_bits, unpack_bits
from .blocks import BLOCK_BYTES, BlockCodec
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
    """Base of all layouts. ``info`` is the tensor to which a state belongs, ``entry`` all state of
    that tensor.
    """

    dtype: torch.dtype
    compressed_only: bool = False  # only compressed tensors have such state
    optional: bool = False  # a checkpoint without it loads zeros

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        """Return the shape in which the state is stored. ``state`` is the state stored so far: its
        size decides for a state on a mask.
        """
        raise NotImplementedError

    def numel(self, info: TensorInfo, state: Tensor | None = None) -> int:
        return math.prod(self.stored_shape(info, state))

    def view_for_user(self, view: Tensor, info: TensorInfo) -> Tensor:
        """Return the tensor that ``optimizer.state`` shows."""
        return view

    def expand(self, stored: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        """Return the state in the form of a state dict; ``entry`` is in its stored form."""
        return stored

    def compact(self, saved: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        """Invert ``expand``; ``entry`` is in the form of the state dict.

        A state that is compact already is returned unchanged.
        """
        return saved

    def cut_shard(self, state: Tensor, info: TensorInfo) -> Tensor:
        """Return this rank's part of a compact state; one that is cut already is unchanged."""
        return state

    def expected_numel(self, loaded: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> int:
        """Return the number of elements that a valid loaded, compact state has."""
        return self.numel(info)


@dataclass(frozen=True)
class LocalShape(Layout):
    """One element for every element of the tensor, in its shape."""

    dtype: torch.dtype

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return info.shape

    def view_for_user(self, view: Tensor, info: TensorInfo) -> Tensor:
        return info.to_param_shape(view)


@dataclass(frozen=True)
class GlobalShape(Layout):
    """State of the global tensor, whole on every rank, although FSDP2 may shard the parameter."""

    dtype: torch.dtype

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return info.param.shape


@dataclass(frozen=True)
class Int8Blocks(Layout):
    """Blocks of 8 bits of what has the layout ``exact`` in a state dict."""

    dtype: torch.dtype
    exact: Layout

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return count_rows(self.exact.numel(info)), BLOCK_BYTES

    def expand(self, stored: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        shape = self.exact.stored_shape(info)
        values = torch.empty(math.prod(shape), dtype=self.exact.dtype, device=stored.device)
        BlockCodec().decode(stored, values)
        return self.exact.view_for_user(values.view(shape), info)

    def compact(self, saved: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        if not saved.is_floating_point() or saved.numel() != self.exact.numel(info):
            return saved
        if not saved.isfinite().all():
            raise ValueError(
                "a residual in the state dict is not finite, so it is damaged, and nothing was "
                "loaded: load another checkpoint."
            )
        shape = self.stored_shape(info)
        blocks = torch.empty(shape, dtype=torch.int8, device=saved.device)
        BlockCodec().encode(saved.reshape(-1).to(self.exact.dtype), blocks)
        return blocks

    def expected_numel(self, loaded: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> int:
        is_exact = loaded.is_floating_point()
        return self.exact.numel(info) if is_exact else self.numel(info)


@dataclass(frozen=True)
class Bits(Layout):
    """A mask: one bit for each element, the first in the lowest bit, padded to whole bytes."""

    dtype: torch.dtype = torch.uint8

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return ((info.numel + 7) // 8,)

    def expand(self, stored: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        return info.to_param_shape(unpack_bits(stored)[: info.numel])

    def compact(self, saved: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
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

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        if not info.compressed:
            return info.shape
        return (info.numel if state is None else state.numel(),)

    def view_for_user(self, view: Tensor, info: TensorInfo) -> Tensor:
        return view if info.compressed else info.to_param_shape(view)

    def expand(self, stored: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        if not info.compressed:
            return stored
        mask = unpack_bits(entry[self.mask])[: info.numel]
        values = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return info.to_param_shape(values.masked_scatter_(mask, stored))

    def compact(self, saved: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        mask = entry.get(self.mask)
        if not info.compressed or mask is None or mask.dtype != torch.bool:
            return saved
        if saved.numel() != mask.numel():
            return saved
        return saved.reshape(-1)[mask.reshape(-1)]

    def expected_numel(self, loaded: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> int:
        bits = entry.get(self.mask)
        if not info.compressed or bits is None:
            return info.numel
        return int(sum(((bits >> bit) & 1).sum() for bit in range(8)))


@dataclass(frozen=True)
class Sharded(Layout):
    """The elements in this rank's shard of each tensor, as a vector that may be empty.

    A frozen parameter is in no shard; its state is stored unsharded.
    """

    dtype: torch.dtype

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        if info.own_range is None:
            return (info.numel,)
        start, stop = info.own_range
        return (stop - start,)

    def expand(self, stored: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        if info.own_range is None:
            return info.to_param_shape(stored)
        start, stop = info.own_range
        # zeros in place of the other ranks' elements
        return info.to_param_shape(pad(stored.reshape(-1), (start, info.numel - stop)))

    def cut_shard(self, state: Tensor, info: TensorInfo) -> Tensor:
        if info.own_range is None or state.numel() != info.numel:
            return state
        start, stop = info.own_range
        return state.reshape(-1)[start:stop]


@dataclass(frozen=True)
class PaddedVector(Layout):
    """A vector with fewer elements than the tensor; in a state dict zeros follow them."""

    dtype: torch.dtype
    size: Callable[[Tensor], int]  # number of elements for a parameter
    unsharded: bool = False  # state of the global tensor, of which this rank may hold a shard

    def stored_shape(self, info: TensorInfo, state: Tensor | None = None) -> tuple[int, ...]:
        return (self.size(info.param),)

    def expand(self, stored: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> Tensor:
        numel = info.param.numel() if self.unsharded else info.numel
        padded = pad(stored.reshape(-1), (0, numel - stored.numel()))
        return padded.view(info.param.shape) if self.unsharded else info.to_param_shape(padded)

    def cut_shard(self, state: Tensor, info: TensorInfo) -> Tensor:
        """Return the prefix of a state in either form, and zeros for a state of another size."""
        n = self.numel(info)
        if state.numel() in (n, info.param.numel() if self.unsharded else info.numel):
            return state.reshape(-1)[:n]
        return state.new_zeros(n)

    def expected_numel(self, loaded: Tensor, info: TensorInfo, entry: Mapping[str, Tensor]) -> int:
        return loaded.numel()  # ``cut_shard`` accepts any number
