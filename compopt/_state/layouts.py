"""Layouts: the storage of one kind of state, and its conversion to a state dict and back.

In a state dict every state has the shape of its tensor. In memory a mask is stored as bits, a
momentum that is zero off its mask as its values on the mask, and sharded state as this rank's part.

``expand`` converts the stored form to that of a state dict, ``compact`` converts it back. Their
results are the same on all ranks, except that an expanded shard is 0 where other ranks own the
elements. ``cut_shard`` then reduces a loaded state, or one from another layout of the same
optimizer, to this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .bits import pack_bits, unpack_bits
from .tensors import distribute_like, to_local

VECTOR = (-1,)  # a shape for Tensor.view


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a bucket, as layouts see it."""

    param: Tensor
    compressed: bool
    # the elements that this rank owns; None without shards
    own: tuple[int, int] | None = None

    @property
    def shape(self) -> torch.Size:
        return to_local(self.param).shape

    @property
    def numel(self) -> int:
        return to_local(self.param).numel()

    def laid_out(self, state: Tensor) -> Tensor:
        """Return state of this rank's elements in the parameter's shape and placements."""
        return distribute_like(self.param.detach(), state.view(self.shape))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Base of all layouts: one element for every element of the tensor, in its shape."""

    dtype: torch.dtype
    compressed_only: bool = False  # only compressed tensors have such state
    optional: bool = False  # a checkpoint without it loads zeros

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        """Return the number of elements stored here; ``held`` is the state stored so far."""
        return of.numel

    def keeps_shape(self, of: Member) -> bool:
        """True where the state is stored in the tensor's shape."""
        return True

    def shape(self, of: Member) -> tuple[int, ...]:
        """Return the shape in which the state is stored."""
        return of.shape if self.keeps_shape(of) else VECTOR

    def view_for_user(self, view: Tensor, of: Member) -> Tensor:
        """Return the entry of ``optimizer.state``."""
        return of.laid_out(view) if self.keeps_shape(of) else view

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        """Return the entry of a state dict; ``beside`` is the tensor's other state, as stored."""
        return kept

    def compact(self, saved: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        """Invert ``expand``; ``beside`` is the tensor's other state, as saved.

        A state that is compact already is returned unchanged.
        """
        return saved

    def cut_shard(self, held: Tensor, of: Member) -> Tensor:
        """Return this rank's part of a compact state; one that is cut already is unchanged."""
        return held

    def expected_numel(self, loaded: Tensor, of: Member, beside: Mapping[str, Tensor]) -> int:
        """Return the number of elements that a valid loaded, compact state has."""
        return self.numel(of)


@dataclass(frozen=True)
class Dense(Layout):
    """An element for every element of the tensor, in its shape."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Unsharded(Layout):
    """One element for every element of the global tensor, of which this rank may hold a shard."""

    dtype: torch.dtype

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return of.param.numel()

    def shape(self, of: Member) -> tuple[int, ...]:
        return of.param.shape

    def view_for_user(self, view: Tensor, of: Member) -> Tensor:
        return view


@dataclass(frozen=True)
class Scalar(Layout):
    """One number for each tensor."""

    dtype: torch.dtype

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return 1

    def keeps_shape(self, of: Member) -> bool:
        return False

    def shape(self, of: Member) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Bits(Layout):
    """A mask: one bit for each element, the first in the lowest bit, padded to whole bytes."""

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
    """Values of a compressed tensor on a mask, which is another state of kind Bits.

    Off the mask the state is 0. A tensor that is not compressed has all its values stored.
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
    """The elements in this rank's shard of each tensor, as a vector that may be empty.

    A frozen parameter is in no shard; its state is stored unsharded.
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
        # zeros in place of the other ranks' elements
        return of.laid_out(pad(kept.reshape(-1), (start, of.numel - stop)))

    def cut_shard(self, held: Tensor, of: Member) -> Tensor:
        if of.own is None or held.numel() != of.numel:
            return held
        start, stop = of.own
        return held.reshape(-1)[start:stop]


@dataclass(frozen=True)
class Prefix(Layout):
    """A vector with fewer elements than the tensor; in a state dict zeros follow them."""

    dtype: torch.dtype
    size: Callable[[Tensor], int]  # number of elements for a parameter
    unsharded: bool = False  # state of the global tensor, of which this rank may hold a shard

    def numel(self, of: Member, held: Tensor | None = None) -> int:
        return self.size(of.param)

    def keeps_shape(self, of: Member) -> bool:
        return False

    def expand(self, kept: Tensor, of: Member, beside: Mapping[str, Tensor]) -> Tensor:
        long = of.param.numel() if self.unsharded else of.numel
        padded = pad(kept.reshape(-1), (0, long - kept.numel()))
        return padded.view(of.param.shape) if self.unsharded else of.laid_out(padded)

    def cut_shard(self, held: Tensor, of: Member) -> Tensor:
        """Return the prefix of a state in either form, and zeros for a state of another size."""
        n = self.numel(of)
        if held.numel() in (n, of.param.numel() if self.unsharded else of.numel):
            return held.reshape(-1)[:n]
        return held.new_zeros(n)

    def expected_numel(self, loaded: Tensor, of: Member, beside: Mapping[str, Tensor]) -> int:
        return loaded.numel()  # ``cut_shard`` accepts any number
