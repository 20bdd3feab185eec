"""What one reduce-scatter of FSDP averages: whose gradients, and where they lie.

FSDP hands over a row for each rank: that rank's part of one parameter after the other, all parts of
a parameter as long as its longest, filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """One parameter's part of every row: ``size`` elements from ``begin`` on. FSDP cuts it along
    ``dim`` over this number of ``ranks``.
    """

    p: Tensor
    dim: int
    begin: int
    size: int
    ranks: int

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.begin + self.size)

    def filled(self, rank: int) -> int:
        """How many of its elements ``rank`` has; zeros follow."""
        if self.dim:
            return self.size
        return min(self.size, max(0, self.p.numel() - rank * self.size))

    def range_of(self, rank: int, matrix: bool) -> tuple[int, int]:
        """Which elements ``rank`` owns of a vector in the order of shards; of a ``matrix``, in the
        parameter's shape, all where FSDP does not cut its rows.
        """
        if matrix and self.dim:
            return 0, self.p.numel()
        start, stop = rank * self.size, (rank + 1) * self.size
        return (min(start, self.p.numel()), min(stop, self.p.numel())) if matrix else (start, stop)

    # A tensor in the order of its shards: all ranks' parts, one after the other, each filled up

    def in_shape(self, sharded: Tensor) -> Tensor:
        """A tensor in the order of its shards, in the parameter's shape."""
        shape = self.p.shape
        if not self.dim:
            return sharded[: self.p.numel()].view(shape)
        parts = sharded.view(self.ranks, *shape[: self.dim], -1, *shape[self.dim + 1 :])
        return parts.movedim(0, self.dim).reshape(shape)

    def in_shard_order(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of the parameter's shape in the order of its shards: vectors, one after the
        other.
        """
        if self.dim:
            return [tensor.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0).flatten()]
        padding = self.ranks * self.size - tensor.numel()
        return [tensor.reshape(-1), tensor.new_zeros(padding)]

    def own_part(self, tensor: Tensor, rank: int) -> Tensor:
        """What ``rank`` has of a tensor of the parameter's shape, as a vector."""
        chunks = tensor.chunk(self.ranks, self.dim)
        return chunks[rank].reshape(-1) if rank < len(chunks) else tensor.new_empty(0)


def lay_out(params: Iterable[tuple[Tensor, int]], ranks: int) -> list[Piece]:
    """Where parameters lie in a row, in this order, each with the dimension that FSDP cuts."""
    pieces, begin = [], 0
    for p, dim in params:
        size = part_of(p, dim, ranks)
        pieces.append(Piece(p, dim, begin, size, ranks))
        begin += size
    return pieces


def part_of(p: Tensor, dim: int, ranks: int) -> int:
    """Elements of a rank's part of ``p`` that FSDP cuts along ``dim``, the longest rank's."""
    if not p.numel():
        return 0
    return -(-p.shape[dim] // ranks) * (p.numel() // p.shape[dim])
