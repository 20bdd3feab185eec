"""Masks: which elements of a bucket's tensors are selected, as bits and as positions.

A bucket's mask has one bit for each element of its compressed tensors, in whole bytes per tensor,
one tensor after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .bits import find_positions, make_bits, positions_dtype
from .buckets import Bucket

Tensors = list[Tensor | None]


class Mask:
    """The elements of a bucket that a step selects: some of a compressed tensor, all of any other.

    ``bits[i]`` has one bit for each element of tensor i, the first in the lowest bit;
    ``positions[i]`` are the positions of set bits, ascending, in int32 where that is wide enough.
    Both are None for a tensor all of whose elements are selected; ``Mask(bucket)`` selects all
    elements of all tensors. ``sizes[i]`` elements are selected.

    Of bits and positions, the missing form is computed lazily. ``decode(bits, n, size)`` is the
    backend's function from bits to positions. ``sizes`` may be given where they are known.
    Positions that are given beside bits must be those of the bits.

    Raises TypeError or ValueError for invalid bits or positions.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        bits: Sequence[Tensor | None] | None = None,
        positions: Sequence[Tensor | None] | None = None,
        sizes: Sequence[int | None] | None = None,
        decode: Callable[[Tensor, int, int | None], Tensor] | None = None,
    ):
        if bits is not None:
            _check_bits(bits, bucket)
        elif positions is not None:
            positions = _checked_positions(positions, bucket)
        given = positions if bits is None else bits
        self.is_sparse = given is not None and any(one is not None for one in given)
        self.lengths = bucket.lengths
        nothing: Tensors = [None] * len(self.lengths)
        self._bits = bits if self.is_sparse else nothing
        self._positions = positions if self.is_sparse else nothing
        self._given_sizes = sizes  # None where they are not known
        self._sizes = None if self.is_sparse else self.lengths
        self._decode = decode or _decode_bits
        # For kernels: how many elements of its tensor are selected before each block.
        self.block_offsets: Tensor | None = None
        # The same of all masks in one launch, this one's place among them, and how many there are.
        self.batch_offsets: tuple[Tensor, int, int] | None = None

    @property
    def phase(self) -> str:
        """The phase, in ``stats``, of a step that sends this."""
        return "sparse" if self.is_sparse else "dense"

    @property
    def has_bits(self) -> bool:
        """Whether bits are known, without computing them from positions."""
        return self._bits is not None

    @property
    def bits(self) -> Sequence[Tensor | None]:
        if self._bits is None:
            pairs = zip(self.positions, self.lengths, strict=True)
            self._bits = [None if p is None else make_bits(p, (n + 7) // 8) for p, n in pairs]
        return self._bits

    @property
    def positions(self) -> Sequence[Tensor | None]:
        if self._positions is None:
            sizes = self._given_sizes or [None] * len(self.lengths)
            rows = zip(self.bits, self.lengths, sizes, strict=True)
            self._positions = [None if b is None else self._decoded(b, n, k) for b, n, k in rows]
        return self._positions

    @property
    def sizes(self) -> list[int]:
        if self._sizes is None:
            # assigned in one statement: an interrupt may not leave a part of them
            sizes = [size for size in self._given_sizes or () if size is not None]
            if len(sizes) < len(self.lengths):
                pairs = zip(self.positions, self.lengths, strict=True)
                sizes = [n if p is None else p.numel() for p, n in pairs]
            self._sizes = sizes
        return self._sizes

    def with_bits(self, bits: Sequence[Tensor | None]) -> Mask:
        """Return the same mask, with a copy of its bits in their place."""
        moved = copy.copy(self)
        moved._bits = bits
        return moved

    def _decoded(self, bits: Tensor, n: int, size: int | None) -> Tensor:
        found = self._decode(bits, n, size)
        if size is not None and found.numel() != size:
            raise RuntimeError(
                f"a mask has {found.numel()} of {n} elements, and {size} were selected: the "
                "optimizer's state was changed from outside. Load a checkpoint."
            )
        return found


def bits_by_tensor(bucket: Bucket, bits: Tensor) -> Tensors:
    """Split a bucket's bits by tensor; None for a tensor without bits."""
    sizes = [
        (n + 7) // 8 if c else 0 for n, c in zip(bucket.lengths, bucket.compressed, strict=True)
    ]
    cut = zip(bits.split(sizes), bucket.compressed, strict=True)
    return [own if compressed else None for own, compressed in cut]


def store_mask(bucket: Bucket, _: object, mask: Mask, name: str) -> Mask:
    """Copy a mask's bits to the bucket's state of this name; return the mask over the copy."""
    own = [b for b in bucket.state[name] if b is not None]
    if own:
        torch._foreach_copy_(own, [b for b in mask.bits if b is not None])
    return mask.with_bits(bucket.state[name])


def clear_mask(bucket: Bucket, _: object, name: str) -> None:
    """Clear the bits in the bucket's state of this name."""
    bucket.flat[name].zero_()


def _check_bits(bits: Sequence[Tensor | None], bucket: Bucket) -> None:
    for b, n, name in zip(bits, bucket.lengths, bucket.names, strict=True):
        if b is not None and (b.dtype is not torch.uint8 or b.numel() != (n + 7) // 8):
            raise ValueError(
                f"the mask of {name} is {b.numel()} elements of {b.dtype}: its {n} elements have "
                f"{(n + 7) // 8} bytes of bits, torch.uint8."
            )


def _checked_positions(positions: Sequence[Tensor | None], bucket: Bucket) -> Tensors:
    """Return positions in the stored dtype, if they are ascending and within their tensors."""
    dtype = positions_dtype(bucket.lengths)
    found: Tensors = []
    for p, n, name in zip(positions, bucket.lengths, bucket.names, strict=True):
        if p is not None and (p.is_floating_point() or p.dtype is torch.bool or p.dim() != 1):
            raise TypeError(
                f"positions of {name} must be a vector of integers, got {p.dtype} of shape "
                f"{tuple(p.shape)}."
            )
        if p is not None and p.numel() and not _ascending_within(p, n):
            raise ValueError(f"positions of {name} are not ascending within its {n} elements.")
        found.append(None if p is None else p.to(dtype).contiguous())
    return found


def _ascending_within(p: Tensor, n: int) -> bool:
    return int(p[0]) >= 0 and int(p[-1]) < n and bool((p[1:] > p[:-1]).all())


def _decode_bits(bits: Tensor, n: int, size: int | None) -> Tensor:
    return find_positions(bits).to(positions_dtype([n]))


def selection_size(density: float, n: int) -> int:
    """Return k, how many of n elements are selected: at least one, if there are any."""
    return min(n, max(1, round(density * n)))


def sizes_at_density(bucket: Bucket, density: float) -> list[int]:
    """Return how many elements are sent of each tensor: this share of compressed ones, and all of
    others.
    """
    pairs = zip(bucket.lengths, bucket.compressed, strict=True)
    return [selection_size(density, n) if compressed else n for n, compressed in pairs]
