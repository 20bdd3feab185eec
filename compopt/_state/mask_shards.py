"""Mask shards: which rank selects which elements of a bucket, and how a selection is encoded.

Each rank owns an equal range of the mask's bytes, selects in it, and all ranks gather the ranges. A
range is sent as bits, or as an Elias-Fano code where that is smaller: low bits of a position as
they are, high bits as gaps in unary. The code takes about log2(e / density) bits a selected
element, and its size is known before the selection.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import byte_offsets, find_positions, pack_bits, set_bits_, split_bytes, unpack_bits
from .masks import selection_size

SLACK = 0.05  # a selection by a threshold may miss the wanted count by this share of it


class MaskSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened tensor, of which about ``k`` are selected.

    ``first_bit`` is their place among the bits of their rank's range. More than ``max_k`` are never
    selected.
    """

    tensor: int
    start: int
    stop: int
    first_bit: int
    k: int
    max_k: int


class MaskShard(NamedTuple):
    """One rank's range of the mask's bytes, and the slices of tensors in it.

    At most ``max_k`` elements are selected. ``low_bits`` of each position are stored as they are; 0
    where the bits themselves are smaller than any code.
    """

    first_byte: int
    last_byte: int
    slices: tuple[MaskSlice, ...]
    max_k: int
    low_bits: int

    @property
    def nbytes(self) -> int:
        return self.last_byte - self.first_byte


class MaskShards(NamedTuple):
    """All ranks' shards.

    ``is_coded``: messages are Elias-Fano codes. ``message_bytes``: the size of every rank's
    message.
    """

    shards: tuple[MaskShard, ...]
    is_coded: bool
    message_bytes: int


@lru_cache(maxsize=256)
def shard_mask(lengths: tuple[int, ...], ranks: int, density: float) -> MaskShards:
    """Cut the mask of tensors of these lengths (0: not compressed) into one equal range a rank."""
    offsets = byte_offsets(lengths)
    cuts = split_bytes(offsets[-1], ranks)
    slices: list[list[MaskSlice]] = [[] for _ in range(ranks)]
    for i, (n, offset) in enumerate(zip(lengths, offsets, strict=False)):
        tensor_k, stop = selection_size(density, n), 0
        rank = bisect_right(cuts, offset) - 1
        while stop < n:
            start, stop = stop, min(n, 8 * (cuts[rank + 1] - offset))
            k = tensor_k * stop // n - tensor_k * start // n  # the slices' add up to the tensor's
            max_k = math.floor(k * (1 + SLACK))
            first_bit = 8 * (offset - cuts[rank]) + start
            slices[rank].append(MaskSlice(i, start, stop, first_bit, k, max_k))
            rank += 1
    ranges = zip(cuts, cuts[1:], map(tuple, slices), strict=False)
    return _choose_code([*ranges])


def _choose_code(ranges: list[tuple[int, int, tuple[MaskSlice, ...]]]) -> MaskShards:
    """Choose the smaller of bits and codes. A single rank sends nothing and keeps its bits."""
    shards = []
    for first, last, slices in ranges:
        n, k = 8 * (last - first), sum(piece.max_k for piece in slices)
        size, low_bits = min((_code_size(n, k, low), low) for low in range(1, 24))
        shards.append(MaskShard(first, last, slices, k, low_bits if size < n else 0))
    is_coded = len(shards) > 1 and all(shard.low_bits for shard in shards)
    sizes = [
        _code_size(8 * shard.nbytes, shard.max_k, shard.low_bits) // 8 if is_coded else shard.nbytes
        for shard in shards
    ]
    return MaskShards(tuple(shards), is_coded, max(sizes))


# Elias-Fano codes: a run of high bits in unary, then one row for each low bit


def _code_size(n: int, k: int, low_bits: int) -> int:
    """Return the bits of the code of at most k among n positions."""
    return _high_bits(n, k, low_bits) + low_bits * _round_up(k)


def _high_bits(n: int, k: int, low_bits: int) -> int:
    return _round_up((n >> low_bits) + k + 1)


def _round_up(n: int) -> int:
    """Return the next multiple of 8."""
    return n + -n % 8


def code_layout(shard: MaskShard) -> tuple[int, int, int]:
    """Return the bits of the run of high bits, the bits of a row of low bits, and the number of
    rows.
    """
    high_bits = _high_bits(8 * shard.nbytes, shard.max_k, shard.low_bits)
    return high_bits, _round_up(shard.max_k), shard.low_bits


def encode_mask(positions: Tensor, bits: Tensor, shards: MaskShards, rank: int) -> Tensor:
    """Return this rank's message, from the positions and the bits of its range."""
    code = _encode_positions(positions, shards.shards[rank]) if shards.is_coded else bits
    return torch.nn.functional.pad(code, (0, shards.message_bytes - code.numel()))


def _encode_positions(positions: Tensor, shard: MaskShard) -> Tensor:
    k, device = positions.numel(), positions.device
    high_bits, row_bits, low_bits = code_layout(shard)
    high = torch.zeros(high_bits, dtype=torch.bool, device=device)
    order = torch.arange(k, dtype=torch.int64, device=device)
    high[(positions >> low_bits).add_(order)] = True
    low = torch.zeros(low_bits, row_bits, dtype=torch.bool, device=device)
    for bit, row in enumerate(low):
        row[:k] = (positions >> bit) & 1
    return pack_bits(torch.cat([high, low.view(-1)]))


def decode_positions(message: Tensor, shard: MaskShard) -> Tensor:
    """Return the positions in an encoded range, ascending, int64."""
    high_bits, row_bits, low_bits = code_layout(shard)
    high_bytes = high_bits // 8
    positions = find_positions(message[:high_bytes])
    order = torch.arange(positions.numel(), dtype=torch.int64, device=message.device)
    positions.sub_(order).bitwise_left_shift_(low_bits)
    low = unpack_bits(message[high_bytes : high_bytes + low_bits * row_bits // 8])
    for bit, row in enumerate(low.view(low_bits, row_bits)):
        positions.add_(row[: positions.numel()], alpha=1 << bit)
    return positions


def assemble_mask(
    messages: Tensor, shards: MaskShards, rank: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bucket's mask, from all ranks' messages, and the positions of its set bits,
    ascending, int64.

    ``positions``: those in this rank's range, which it has not lost.
    """
    decode = decode_positions if shards.is_coded else _decode_bits
    rows = enumerate(zip(messages, shards.shards, strict=True))
    all_positions = torch.cat(
        [
            (positions if r == rank else decode(message, shard)) + 8 * shard.first_byte
            for r, (message, shard) in rows
        ]
    )
    if not shards.is_coded:
        pairs = zip(messages, shards.shards, strict=True)
        return torch.cat([message[: shard.nbytes] for message, shard in pairs]), all_positions
    bits = messages.new_empty(shards.shards[-1].last_byte)
    set_bits_(bits, all_positions)
    return bits, all_positions


def _decode_bits(message: Tensor, shard: MaskShard) -> Tensor:
    """Return the positions in a range that was sent as bits, ascending, int64."""
    return find_positions(message[: shard.nbytes])
