"""Masks: the selected elements of a bucket's tensors, and their selection by all ranks together.

A bucket's mask has one bit for each element of its compressed tensors, in whole bytes per tensor,
one tensor after the other.

For a mask that ranks select together, each rank owns an equal range of the mask's bytes, selects in
it, and all ranks gather the ranges. A range is sent as bits, or as an Elias-Fano code where that is
smaller: low bits of a position as they are, high bits as gaps in unary. The code takes about
log2(e / density) bits a selected element, and its size is known before the selection.

``RadiusAdamW``, ``ScapeAdamS`` and ``TagcAdamW`` select by it; reducers send on a ``Mask``.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._wire.requests import Phase
from .bits import (
    byte_offsets,
    find_positions,
    make_bits,
    pack_bits,
    positions_dtype,
    set_bits_,
    split_bytes,
    unpack_bits,
)
from .bucket import Bucket

Tensors = list[Tensor | None]


class Mask:
    """The elements of a bucket that a step selects: some of a compressed tensor, all of any other.

    ``bits[i]`` has one bit for each element of tensor i, the first in the lowest bit;
    ``positions[i]`` are the positions of set bits, ascending, in int32 where that is wide enough.
    Both are None for a tensor all of whose elements are selected; ``Mask(bucket)`` selects all
    elements of all tensors. ``sizes[i]`` elements are selected.

    Give bits or positions; the other form is computed when it is first read. Positions that are
    given beside bits must be those of the bits. ``sizes`` may be given where they are known: on a
    device the host then need not wait to compute positions.

    Raises TypeError or ValueError for invalid bits or positions.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        bits: Sequence[Tensor | None] | None = None,
        positions: Sequence[Tensor | None] | None = None,
        sizes: Sequence[int | None] | None = None,
    ):
        if bits is not None:
            for b, n, name in zip(bits, bucket.lengths, bucket.names, strict=True):
                if b is not None and (b.dtype is not torch.uint8 or b.numel() != (n + 7) // 8):
                    raise ValueError(
                        f"the mask of {name} is {b.numel()} elements of {b.dtype}: its {n} "
                        f"elements have {(n + 7) // 8} bytes of bits, torch.uint8."
                    )
        elif positions is not None:
            positions = _check_positions(positions, bucket)
        given = positions if bits is None else bits
        self.is_sparse = given is not None and any(one is not None for one in given)
        self.lengths = bucket.lengths
        self._given_sizes = sizes  # None where they are not known
        if not self.is_sparse:
            self.bits = self.positions = [None] * len(self.lengths)
            self.sizes = self.lengths
        elif bits is not None:
            self.bits = bits
        if self.is_sparse and positions is not None:
            self.positions = positions
        # For kernels: the number of elements of its tensor that are selected before each block.
        self.block_offsets: Tensor | None = None

    @property
    def phase(self) -> Phase:
        """The phase, in ``stats``, of a step that sends this."""
        return "sparse" if self.is_sparse else "dense"

    @property
    def has_bits(self) -> bool:
        """True if the bits need not be computed from positions."""
        return "bits" in vars(self)

    @cached_property
    def bits(self) -> Sequence[Tensor | None]:
        pairs = zip(self.positions, self.lengths, strict=True)
        return [None if p is None else make_bits(p, (n + 7) // 8) for p, n in pairs]

    @cached_property
    def positions(self) -> Sequence[Tensor | None]:
        sizes = self._given_sizes or [None] * len(self.lengths)
        decoded: Tensors = []
        for bits, n, size in zip(self.bits, self.lengths, sizes, strict=True):
            if bits is None:
                decoded.append(None)
                continue
            flags = unpack_bits(bits)[:n]  # without padding
            if size is None or flags.device.type == "cpu":
                positions = flags.nonzero().view(-1)
            else:
                positions = flags.nonzero_static(size=size).view(-1)
            if size is not None and positions.numel() != size:
                raise RuntimeError(
                    f"a mask has {positions.numel()} of {n} elements, and {size} were selected: "
                    "the optimizer's state was changed from outside. Load a checkpoint."
                )
            decoded.append(positions.to(positions_dtype([n])))
        return decoded

    @cached_property
    def sizes(self) -> list[int]:
        sizes = [size for size in self._given_sizes or () if size is not None]
        if len(sizes) == len(self.lengths):
            return sizes
        pairs = zip(self.positions, self.lengths, strict=True)
        return [n if p is None else p.numel() for p, n in pairs]

    def with_bits(self, bits: Sequence[Tensor | None]) -> Mask:
        """Return the same mask with its bits in other memory, ``bits``."""
        mask = copy.copy(self)
        mask.bits = bits
        return mask


def bits_by_tensor(bucket: Bucket, bits: Tensor) -> Tensors:
    """Split a bucket's bits by tensor; None for a tensor without bits."""
    sizes = [
        (n + 7) // 8 if c else 0 for n, c in zip(bucket.lengths, bucket.compressed, strict=True)
    ]
    cut = zip(bits.split(sizes), bucket.compressed, strict=True)
    return [part if compressed else None for part, compressed in cut]


def store_mask(bucket: Bucket, mask: Mask, name: str) -> Mask:
    """Copy a mask's bits to the bucket's state of this name; return the mask over the copy."""
    stored = [b for b in bucket.state[name] if b is not None]
    if stored:
        torch._foreach_copy_(stored, [b for b in mask.bits if b is not None])
    return mask.with_bits(bucket.state[name])


def _check_positions(positions: Sequence[Tensor | None], bucket: Bucket) -> Tensors:
    """Return positions in the stored dtype, if they are ascending and within their tensors."""
    dtype = positions_dtype(bucket.lengths)
    checked: Tensors = []
    for p, n, name in zip(positions, bucket.lengths, bucket.names, strict=True):
        if p is not None and (p.is_floating_point() or p.dtype is torch.bool or p.dim() != 1):
            raise TypeError(
                f"positions of {name} must be a vector of integers, got {p.dtype} of shape "
                f"{tuple(p.shape)}."
            )
        if p is not None and p.numel():
            is_inside = int(p[0]) >= 0 and int(p[-1]) < n
            if not (is_inside and bool((p[1:] > p[:-1]).all())):
                raise ValueError(f"positions of {name} are not ascending within its {n} elements.")
        checked.append(None if p is None else p.to(dtype).contiguous())
    return checked


def selection_size(density: float, n: int) -> int:
    """Return k, the number of selected elements of n: at least one, if there are any."""
    return min(n, max(1, round(float(density) * n)))


def sizes_at_density(bucket: Bucket, density: float) -> list[int]:
    """Return the number of elements sent of each tensor: this share of a compressed one, and all
    elements of any other.
    """
    pairs = zip(bucket.lengths, bucket.compressed, strict=True)
    return [selection_size(density, n) if compressed else n for n, compressed in pairs]


# Mask shards


class MaskSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened tensor, of which ``k`` are selected: fewer
    where only fewer are nonzero. ``first_bit`` is their place among the bits of their rank's range.
    """

    tensor: int
    start: int
    stop: int
    first_bit: int
    k: int


class SelectionRange(NamedTuple):
    """One rank's range of the mask's bytes, and the slices of tensors in it.

    At most ``k`` elements are selected. ``low_bits`` of each position are stored as they are; 0
    where the bits themselves are smaller than any code.
    """

    first_byte: int
    last_byte: int
    slices: tuple[MaskSlice, ...]
    k: int
    low_bits: int

    @property
    def nbytes(self) -> int:
        return self.last_byte - self.first_byte


class MaskPartition(NamedTuple):
    """The ranges of all ranks, which select ``sizes`` elements of each tensor together.

    ``is_elias_fano``: messages are Elias-Fano codes. ``message_bytes``: the size of every rank's
    message.
    """

    by_rank: tuple[SelectionRange, ...]
    sizes: tuple[int, ...]
    is_elias_fano: bool
    message_bytes: int


@lru_cache(maxsize=256)
def partition_mask(lengths: tuple[int, ...], ranks: int, density: float) -> MaskPartition:
    """Cut the mask of tensors of these lengths (0: not compressed) into one equal range a rank."""
    offsets = byte_offsets(lengths)
    cuts = split_bytes(offsets[-1], ranks)
    slices: list[list[MaskSlice]] = [[] for _ in range(ranks)]
    ks = [selection_size(density, n) for n in lengths]
    for i, (n, tensor_k, offset) in enumerate(zip(lengths, ks, offsets, strict=False)):
        stop = 0
        rank = bisect_right(cuts, offset) - 1
        while stop < n:
            start, stop = stop, min(n, 8 * (cuts[rank + 1] - offset))
            k = tensor_k * stop // n - tensor_k * start // n  # the slices' add up to the tensor's
            first_bit = 8 * (offset - cuts[rank]) + start
            slices[rank].append(MaskSlice(i, start, stop, first_bit, k))
            rank += 1
    ranges: list[SelectionRange] = []
    for first, last, parts in zip(cuts, cuts[1:], slices, strict=False):
        n, k = 8 * (last - first), sum(piece.k for piece in parts)
        size, low_bits = min((_code_size(n, k, low), low) for low in range(1, 24))
        ranges.append(SelectionRange(first, last, tuple(parts), k, low_bits if size < n else 0))
    # The smaller of bits and codes. A single rank sends nothing and keeps its bits.
    is_elias_fano = ranks > 1 and all(one.low_bits for one in ranges)
    nbytes = [one.nbytes for one in ranges]
    if is_elias_fano:
        nbytes = [_code_size(8 * one.nbytes, one.k, one.low_bits) // 8 for one in ranges]
    return MaskPartition(tuple(ranges), tuple(ks), is_elias_fano, max(nbytes))


# Elias-Fano codes: a run of high bits in unary, then one row for each low bit


def _code_size(n: int, k: int, low_bits: int) -> int:
    """Return the bits of the code of at most k among n positions."""
    return _high_bits(n, k, low_bits) + low_bits * _round_up(k)


def _high_bits(n: int, k: int, low_bits: int) -> int:
    return _round_up((n >> low_bits) + k + 1)


def _round_up(n: int) -> int:
    """Return the next multiple of 8."""
    return n + -n % 8


def code_layout(byte_range: SelectionRange) -> tuple[int, int, int]:
    """Return the bits of the run of high bits, the bits of a row of low bits, and the number of
    rows.
    """
    high_bits = _high_bits(8 * byte_range.nbytes, byte_range.k, byte_range.low_bits)
    return high_bits, _round_up(byte_range.k), byte_range.low_bits


def encode_mask(positions: Tensor, bits: Tensor, partition: MaskPartition, rank: int) -> Tensor:
    """Return this rank's message, from the positions and the bits of its range."""
    message = bits
    if partition.is_elias_fano:
        k, device = positions.numel(), positions.device
        high_bits, row_bits, low_bits = code_layout(partition.by_rank[rank])
        high = torch.zeros(high_bits, dtype=torch.bool, device=device)
        order = torch.arange(k, dtype=torch.int64, device=device)
        high[(positions >> low_bits).add_(order)] = True
        low = torch.zeros(low_bits, row_bits, dtype=torch.bool, device=device)
        for bit, row in enumerate(low):
            row[:k] = (positions >> bit) & 1
        message = pack_bits(torch.cat([high, low.view(-1)]))
    return torch.nn.functional.pad(message, (0, partition.message_bytes - message.numel()))


def decode_positions(message: Tensor, byte_range: SelectionRange) -> Tensor:
    """Return the positions in an encoded range, ascending, int64."""
    high_bits, row_bits, low_bits = code_layout(byte_range)
    high_bytes = high_bits // 8
    positions = find_positions(message[:high_bytes])
    order = torch.arange(positions.numel(), dtype=torch.int64, device=message.device)
    positions.sub_(order).bitwise_left_shift_(low_bits)
    low = unpack_bits(message[high_bytes : high_bytes + low_bits * row_bits // 8])
    for bit, row in enumerate(low.view(low_bits, row_bits)):
        positions.add_(row[: positions.numel()], alpha=1 << bit)
    return positions


def assemble_mask(
    messages: Tensor, partition: MaskPartition, rank: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bucket's mask, from all ranks' messages, and the positions of its set bits,
    ascending, int64.

    ``positions`` are those in this rank's own range, which need not be decoded.
    """
    parts: list[Tensor] = []
    ranges: list[Tensor] = []
    for r, (message, byte_range) in enumerate(zip(messages, partition.by_rank, strict=True)):
        if r == rank:
            in_range = positions
        elif partition.is_elias_fano:
            in_range = decode_positions(message, byte_range)
        else:
            in_range = find_positions(message[: byte_range.nbytes])
        parts.append(in_range + 8 * byte_range.first_byte)
        ranges.append(message[: byte_range.nbytes])
    all_positions = torch.cat(parts)
    if not partition.is_elias_fano:
        return torch.cat(ranges), all_positions
    bits = messages.new_empty(partition.by_rank[-1].last_byte)
    set_bits_(bits, all_positions)
    return bits, all_positions
