"""Layouts: how one kind of state is kept in memory, and how it is brought into its tensor's shape.

In a state dict every state has the shape of its tensor. In memory a mask is bits, a momentum that
is zero off its mask is what is on it, and of sharded state a rank keeps its own part. Each layout
says how much it keeps of a tensor, and knows the way to the whole and back.

``expand`` and ``compact`` are the way into a state dict and out of it. They are the same on all
ranks, but that the whole of a shard is 0 where other ranks own it. ``cut_shard`` then cuts what is
loaded, or taken over from another layout of the same optimizer, to what is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bits import pack_bits, unpack_bits
from .tensors import distribute_like, to_local

VECTOR = (-1,)  # a shape, for Tensor.view


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a bucket, as layouts see it."""

    param: Tensor
    compressed: bool
    # the elements this rank owns of it; None where nothing is cut into shards
    own: tuple[int, int] | None = None

    @property
    def shape(self) -> torch.Size:
        return to_local(self.param).shape

    @property
    def numel(self) -> int:
        return to_local(self.param).numel()

    def laid_out(self, state: Tensor) -> Tensor:
        """State of all of this rank's elements, in the parameter's shape and its placements."""
        return distribute_like(self.param.detach(), state.view(self.shape))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What all kinds of state have in common; unless it says otherwise a state is kept whole."""

    dtype: torch.dtype
    compressed_only: bool = False  # tensors that are averaged dense have no such state
    optional: bool = False  # 0 where a checkpoint lacks it

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        """Elements kept on this rank; ``held`` is what was kept so far."""
        return of.numel

    def keeps_shape(self, of: Member) -> bool:
        """Whether it is kept in the tensor's shape."""
        return True

    def shape(self, of: Member) -> tuple[int, ...]:
        """The shape in which it is kept."""
        return of.shape if self.keeps_shape(of) else VECTOR

    def view_for_user(self, view: Tensor, of: Member) -> Tensor:
        """What ``optimizer.state`` shows of it."""
        return of.laid_out(view) if self.keeps_shape(of) else view

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        """As a state dict has it; ``beside`` is the tensor's other state, as it is kept."""
        return kept

    def compact(self, saved: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        """The way back from ``expand``; ``beside`` is the tensor's other state, as it was saved.

        What is compact already stays as it is.
        """
        return saved

    def cut_shard(self, held: Tensor, of: Member) -> Tensor:
        """What this rank keeps of a compact state; what is cut already stays as it is."""
        return held

    def expected_numel(self, loaded: Tensor, of: Member, beside: Mapping[str, Tensor]) -> int:
        """How many elements a loaded, compact state must have to be sound."""
        return self.numel(of)


@dataclass(frozen=True)
class Dense(Layout):
    """An element for every element of the tensor, in its shape."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Unsharded(Layout):
    """An element for every element of the whole tensor, also where this rank has a part of it."""

    dtype: torch.dtype

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return of.param.numel()

    def shape(self, of: Member) -> tuple[int, ...]:
        return of.param.shape

    def view_for_user(self, view: Tensor, of: Member) -> Tensor:
        return view


@dataclass(frozen=True)
class Scalar(Layout):
    """One number a tensor."""

    dtype: torch.dtype

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return 1

    def keeps_shape(self, of: Member) -> bool:
        return False

    def shape(self, of: Member) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Bits(Layout):
    """A mask: one bit an element, whole bytes a tensor, the first element in the lowest bit."""

    dtype: torch.dtype = torch.uint8

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return (of.numel + 7) // 8

    def keeps_shape(self, of: Member) -> bool:
        return False

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        return of.laid_out(unpack_bits(kept)[: of.numel])

    def compact(self, saved: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        if saved.dtype != torch.bool:
            return saved
        flags = saved.reshape(-1)
        return pack_bits(torch.cat([flags, flags.new_zeros(-flags.numel() % 8)]))


@dataclass(frozen=True)
class OnMask(Layout):
    """Of a compressed tensor only the elements on a mask, which is another state of kind Bits.

    Elsewhere it is 0. Of a tensor that is not compressed it is whole.
    """

    dtype: torch.dtype
    mask: str

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return of.numel if held is None or not of.compressed else held.numel()

    def keeps_shape(self, of: Member) -> bool:
        return not of.compressed

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        if not of.compressed:
            return kept
        mask = unpack_bits(beside[self.mask])[: of.numel]
        whole = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return of.laid_out(whole.masked_scatter_(mask, kept))

    def compact(self, saved: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        mask = beside.get(self.mask)
        if not of.compressed or mask is None or mask.dtype != torch.bool:
            return saved
        if saved.numel() != mask.numel():
            return saved
        return saved.reshape(-1)[mask.reshape(-1)]

    def expected_numel(self, loaded: Tensor, of: Member, beside: Mapping[str, Tensor]) -> int:
        bits = beside.get(self.mask)
        if not of.compressed or bits is None:
            return of.numel
        return int(sum(((bits >> bit) & 1).sum() for bit in range(8)))


@dataclass(frozen=True)
class Sharded(Layout):
    """Of each tensor only the elements in this rank's shard, as a vector that may be empty.

    Of a frozen parameter, which is in no shard, it is kept whole.
    """

    dtype: torch.dtype

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        if of.own is None:
            return of.numel
        start, stop = of.own
        return stop - start

    def keeps_shape(self, of: Member) -> bool:
        return False

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        if of.own is None:
            return of.laid_out(kept)
        start, stop = of.own
        return of.laid_out(
            pad(kept.reshape(-1), (start, of.numel - stop))
        )  # the rest is other ranks'

    def cut_shard(self, held: Tensor, of: Member) -> Tensor:
        if of.own is None or held.numel() != of.numel:
            return held
        start, stop = of.own
        return held.reshape(-1)[start:stop]


@dataclass(frozen=True)
class Prefix(Layout):
    """Fewer elements than the tensor has, as a vector; in a state dict zeros follow them."""

    dtype: torch.dtype
    size: Callable[[Tensor], int]  # elements for a parameter
    unsharded: bool = False  # of the whole tensor, also where this rank has a part of it

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return self.size(of.param)

    def keeps_shape(self, of: Member) -> bool:
        return False

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        long = of.param.numel() if self.unsharded else of.numel
        padded = pad(kept.reshape(-1), (0, long - kept.numel()))
        return padded.view(of.param.shape) if self.unsharded else of.laid_out(padded)

    def cut_shard(self, held: Tensor, of: Member) -> Tensor:
        """What has neither the tensor's number of elements nor this one begins anew, at 0."""
        n = self.numel(of)
        if held.numel() in (n, of.param.numel() if self.unsharded else of.numel):
            return held.reshape(-1)[:n]
        return held.new_zeros(n)

    def expected_numel(self, loaded: Tensor, of: Member, beside: Mapping[str, Tensor]) -> int:
        return loaded.numel()  # any number will do, see ``cut_shard``
