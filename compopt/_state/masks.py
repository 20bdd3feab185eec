"""Masks: which elements of a bucket's tensors are selected, as bits and as positions.

A bucket's mask is one bit an element of its compressed tensors, whole bytes a tensor, one tensor
after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .buckets import Bucket

WORD = 8  # bytes: ranges begin at whole words of 64 bits
# Times a word of 8 booleans: their bits, the first lowest, in the highest byte.
GATHER_BITS = 0x0102040810204080
# Times a byte: that byte in all 8 of a word.
SPREAD_BYTE = 0x0101010101010101
# Bit i of byte i: 0x8040...01.
ONE_BIT_EACH = -0x7FBFDFEFF7FBFDFF

Tensors = list[Tensor | None]


class Mask:
    """Which elements a step takes of a bucket: some of a compressed tensor, all of any other.

    ``bits[i]`` has one bit an element of tensor i, the first in the lowest; ``positions[i]`` says
    where they are set, ascending, in int32 where that holds them. Both are None for a tensor that
    is taken whole, and ``Mask(bucket)`` takes all of them whole. ``sizes[i]`` elements are taken.

    Made of one of the two, a mask finds the other once, when it is asked for. ``decode(bits, n,
    size)`` is the back end's way from bits to positions. ``sizes`` is given where bits were just
    chosen and their number is known. Positions given beside bits were read from these bits.

    Raises TypeError or ValueError where bits or positions are not such.
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
        self.sparse = given is not None and any(one is not None for one in given)
        self.lengths = bucket.lengths
        whole: Tensors = [None] * len(self.lengths)
        self._bits = bits if self.sparse else whole
        self._positions = positions if self.sparse else whole
        self._told = sizes  # None where nobody has said
        self._sizes = None if self.sparse else self.lengths
        self._decode = decode or _decoded
        # For kernels: how many elements of its tensor are selected before each block.
        self.starts: Tensor | None = None
        # Likewise, of all masks that were found with this one, and which of how many it is.
        self.together: tuple[Tensor, int, int] | None = None

    @property
    def phase(self) -> str:
        """What a step that sends this is, in ``stats``."""
        return "sparse" if self.sparse else "dense"

    @property
    def has_bits(self) -> bool:
        """Whether there are bits without making them of positions."""
        return self._bits is not None

    @property
    def bits(self) -> Sequence[Tensor | None]:
        if self._bits is None:
            pairs = zip(self.positions, self.lengths, strict=True)
            self._bits = [None if p is None else bits_at(p, (n + 7) // 8) for p, n in pairs]
        return self._bits

    @property
    def positions(self) -> Sequence[Tensor | None]:
        if self._positions is None:
            sizes = self._told or [None] * len(self.lengths)
            rows = zip(self.bits, self.lengths, sizes, strict=True)
            self._positions = [None if b is None else self._read(b, n, k) for b, n, k in rows]
        return self._positions

    @property
    def sizes(self) -> list[int]:
        if self._sizes is None:
            # Whole at once: an interrupt in between may not leave a part of them.
            sizes = [size for size in self._told or () if size is not None]
            if len(sizes) < len(self.lengths):
                pairs = zip(self.positions, self.lengths, strict=True)
                sizes = [n if p is None else p.numel() for p, n in pairs]
            self._sizes = sizes
        return self._sizes

    def over(self, bits: Sequence[Tensor | None]) -> Mask:
        """The same mask, whose bits have been copied there."""
        moved = copy.copy(self)
        moved._bits = bits
        return moved

    def _read(self, bits: Tensor, n: int, size: int | None) -> Tensor:
        found = self._decode(bits, n, size)
        if size is not None and found.numel() != size:
            raise RuntimeError(
                f"a mask has {found.numel()} of {n} elements, and {size} were selected: the "
                "optimizer's state was changed from outside. Load a checkpoint."
            )
        return found


def bits_by_tensor(bucket: Bucket, bits: Tensor) -> Tensors:
    """The bucket's bits, one tensor's after the other's, as a list; None where it has none."""
    sizes = [
        (n + 7) // 8 if c else 0 for n, c in zip(bucket.lengths, bucket.compressed, strict=True)
    ]
    cut = zip(bits.split(sizes), bucket.compressed, strict=True)
    return [own if compressed else None for own, compressed in cut]


def stored(bucket: Bucket, _: object, mask: Mask, name: str) -> Mask:
    """The same mask, its bits copied to the bucket's state of this name."""
    own = [b for b in bucket.state[name] if b is not None]
    if own:
        torch._foreach_copy_(own, [b for b in mask.bits if b is not None])
    return mask.over(bucket.state[name])


def cleared(bucket: Bucket, _: object, name: str) -> None:
    """No element is selected in the bucket's state of this name."""
    bucket.flat[name].zero_()


def counted(bucket: Bucket, _: object, mask: Mask) -> None:
    """Nothing: a back end may count here what kernels want of all buckets' masks."""


def _check_bits(bits: Sequence[Tensor | None], bucket: Bucket) -> None:
    for b, n, name in zip(bits, bucket.lengths, bucket.names, strict=True):
        if b is not None and (b.dtype is not torch.uint8 or b.numel() != (n + 7) // 8):
            raise ValueError(
                f"the mask of {name} is {b.numel()} elements of {b.dtype}: its {n} elements have "
                f"{(n + 7) // 8} bytes of bits, torch.uint8."
            )


def _checked_positions(positions: Sequence[Tensor | None], bucket: Bucket) -> Tensors:
    """The same as they are kept, where they are ascending and within their tensors."""
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


def _decoded(bits: Tensor, n: int, size: int | None) -> Tensor:
    return positions_of(bits).to(positions_dtype([n]))


def positions_dtype(lengths: Sequence[int]) -> torch.dtype:
    """Of positions in tensors of these lengths."""
    return torch.int32 if max(lengths) < 2**31 else torch.int64


def offsets_of(lengths: tuple[int, ...]) -> list[int]:
    """Where each tensor's bytes begin in the bucket's mask; at last, where they end."""
    return [0, *accumulate((n + 7) // 8 for n in lengths)]


def cut_bytes(total: int, ranks: int) -> list[int]:
    """Where each rank's range of ``total`` bytes of mask begins, and at last where they end."""
    return [total * rank // ranks // WORD * WORD for rank in range(ranks)] + [total]


# Bits, flags, positions


def bits_of(flags: Tensor) -> Tensor:
    """8 m booleans as m bytes, the first in the lowest bit. Overwrites ``flags``."""
    return flags.view(torch.int64).mul_(GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def flags_of(bits: Tensor) -> Tensor:
    """m bytes as 8 m booleans."""
    return bits.long().mul_(SPREAD_BYTE).bitwise_and_(ONE_BIT_EACH).view(torch.uint8).bool()


def positions_of(bits: Tensor) -> Tensor:
    """The positions of all set bits, ascending, int64."""
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % WORD)).view(torch.int64)
    item = words.nonzero().view(-1)
    # Dense: the search below would go through most words many times.
    if item.numel() * 4 > words.numel() * 3:
        return flags_of(bits).nonzero().view(-1)
    left, counts, found = words.index_select(0, item), torch.zeros_like(item), []
    base, alive = item << 6, torch.arange(item.numel(), dtype=torch.int64, device=bits.device)
    while left.numel():  # the lowest bit of every word, then the next of those that have more
        lowest = torch.neg(left).bitwise_and_(left)
        # Its exponent as a floating-point number, plus 1023.
        place = (lowest.double().view(torch.int64) >> 52).bitwise_and_(0x7FF).add_(base)
        found.append((alive, place))
        counts.scatter_(0, alive, torch.full_like(alive, len(found)))
        left = left.bitwise_xor_(lowest)
        more = left.nonzero().view(-1)
        left, base, alive = (t.index_select(0, more) for t in (left, base, alive))
    starts = counts.cumsum(0).sub_(counts)
    out = item.new_empty(sum(place.numel() for _, place in found))
    for n, (alive, place) in enumerate(found):
        out.scatter_(0, starts.index_select(0, alive).add_(n), place)
    return out.sub_(1023)


def set_bits_(bits: Tensor, positions: Tensor, wanted: Tensor | None = None) -> None:
    """Exactly the bits at ``positions``; with ``wanted``, booleans, only where these are true."""
    one = torch.ones((), dtype=torch.uint8, device=bits.device) if wanted is None else wanted.byte()
    bits.zero_().index_add_(0, positions >> 3, one << (positions & 7).to(torch.uint8))


def bits_at(positions: Tensor, size: int, wanted: Tensor | None = None) -> Tensor:
    """``size`` bytes with the bits at these positions set, where ``wanted``."""
    bits = torch.empty(size, dtype=torch.uint8, device=positions.device)
    set_bits_(bits, positions, wanted)
    return bits


def count_shared(bits: Tensor, positions: Tensor) -> Tensor:
    """How many of the bits at ``positions`` are set."""
    return ones_at(bits, positions).sum()


def ones_at(bits: Tensor, positions: Tensor) -> Tensor:
    """The bits at ``positions``, 1 or 0 each, uint8."""
    shifts = (positions & 7).to(torch.uint8)
    return bits.index_select(0, positions >> 3).bitwise_right_shift_(shifts).bitwise_and_(1)


def per_tensor(positions: Tensor, lengths: tuple[int, ...]) -> list[Tensor | None]:
    """The positions within each tensor, int32 where that holds them; None for tensors of length 0
    (not compressed).
    """
    offsets = offsets_of(lengths)
    dtype = positions_dtype(lengths)
    cuts = torch.searchsorted(
        positions, 8 * torch.tensor(offsets, dtype=torch.int64, device=positions.device)
    ).tolist()
    local = torch.empty(positions.numel(), dtype=dtype, device=positions.device)
    for offset, a, b in zip(offsets, cuts, cuts[1:], strict=False):
        local[a:b] = positions[a:b] - 8 * offset
    return [local[a:b] if n else None for n, a, b in zip(lengths, cuts, cuts[1:], strict=False)]
