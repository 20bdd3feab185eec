"""The rows of FSDP2's reduce-scatter: each rank's part of every parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .._state.bits import WORD
from .._state.shards import Range, ShardLayout, Strided


def cut_by_rows(
    ranges: list[list[Range]], compressed_counts: list[int], compressed: list[bool], rank: int
) -> ShardLayout:
    """Give every rank an equally long part of each compressed tensor, padded where necessary.

    ``compressed_counts`` are the compressed elements of each rank, without padding.
    """
    ranks = len(ranges)
    lengths = [max(stop for _, stop in parts) for parts in zip(*ranges, strict=True)]
    sizes = [n // ranks if c else 0 for n, c in zip(lengths, compressed, strict=True)]
    width = sum(sizes) + -sum(sizes) % (8 * WORD)
    firsts = itertools.accumulate(sizes, initial=0)
    strided_bits = [
        Strided(first, ranks, n, width) if c else None
        for first, n, c in zip(firsts, sizes, compressed, strict=False)
    ]
    used = sum(sizes)
    gaps = [Strided(used, ranks, width - used, width)] if used < width else []
    cuts = [r * width // 8 for r in range(ranks + 1)]
    return ShardLayout(
        lengths, compressed, ranges, cuts, strided_bits, gaps, compressed_counts, rank
    )


class ParamColumns(NamedTuple):
    """One parameter's part of every row of a reduce-scatter: ``size`` elements from ``begin`` on.

    FSDP2 shards the parameter along ``dim`` over ``ranks``. Shards have the order of the rows: all
    ranks' parts, one after the other, each padded to ``size``.
    """

    p: Tensor
    dim: int
    begin: int
    size: int
    ranks: int

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.begin + self.size)

    def count_filled(self, rank: int) -> int:
        """Return the number of its elements that ``rank`` has; padding follows."""
        if self.dim:
            return self.size
        return min(self.size, max(0, self.p.numel() - rank * self.size))

    def range_of(self, rank: int, matrix: bool) -> tuple[int, int]:
        """Return the elements that ``rank`` decodes, in shard order: those that it owns.

        With ``matrix`` the tensor has the parameter's shape: the rank decodes its rows, or all
        elements if FSDP cuts along another dimension; ``select_part`` takes its own from them.
        """
        if matrix and self.dim:
            return 0, self.p.numel()
        start, stop = rank * self.size, (rank + 1) * self.size
        return (min(start, self.p.numel()), min(stop, self.p.numel())) if matrix else (start, stop)

    def in_shape(self, sharded: Tensor) -> Tensor:
        """Convert a vector in shard order to the parameter's shape."""
        shape = self.p.shape
        if not self.dim:
            return sharded[: self.p.numel()].view(shape)
        parts = sharded.view(self.ranks, *shape[: self.dim], -1, *shape[self.dim + 1 :])
        return parts.movedim(0, self.dim).reshape(shape)

    def in_shard_order(self, tensor: Tensor) -> list[Tensor]:
        """Convert a tensor of the parameter's shape to shard order, as vectors to concatenate."""
        if self.dim:
            return [tensor.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0).flatten()]
        padding = self.ranks * self.size - tensor.numel()
        return [tensor.reshape(-1), tensor.new_zeros(padding)]

    def select_part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the part of ``rank`` of a tensor of the parameter's shape, as a vector."""
        chunks = tensor.chunk(self.ranks, self.dim)
        return chunks[rank].reshape(-1) if rank < len(chunks) else tensor.new_empty(0)


def place_in_rows(params: Iterable[tuple[Tensor, int]], ranks: int) -> list[ParamColumns]:
    """Place parameters in a row, in this order, each with the dimension that FSDP2 shards."""
    pieces, begin = [], 0
    for p, dim in params:
        size = longest_part_numel(p, dim, ranks)
        pieces.append(ParamColumns(p, dim, begin, size, ranks))
        begin += size
    return pieces


def longest_part_numel(p: Tensor, dim: int, ranks: int) -> int:
    """Return the elements of the longest rank's part of ``p``, which FSDP2 shards along ``dim``."""
    if not p.numel():
        return 0
    return -(-p.shape[dim] // ranks) * (p.numel() // p.shape[dim])
