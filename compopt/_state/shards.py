"""Shards: a bucket's elements cut into one equal part a rank, and sharded state gathered and cut
again.

The rank that owns a shard keeps its moments, and its float32 master where parameters are of lower
precision; the other ranks keep nothing of them. Cuts fall anywhere within tensors, at whole words
of 64 elements: compressed tensors are cut as one row of elements, dense ones as another, so that
every rank owns its share of both.

In memory ``optimizer.state`` shows the part of each tensor that this rank owns, as a vector that
may be empty.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .bits import cut_bytes, offsets_of

Range = tuple[int, int]


class Shards:
    """How the tensors of one bucket are cut.

    ``ranges[r][i]`` are the elements of flattened tensor i that rank r owns. ``offsets`` and
    ``cuts`` are bytes of the compressed tensors' mask: where each tensor's begin, and where each
    rank's do.
    """

    def __init__(self, lengths: list[int], compressed: list[bool], rank: int, ranks: int):
        self.rank, self.ranks, self.lengths, self.compressed = rank, ranks, lengths, compressed
        rows = [
            tuple(n if c is wanted else 0 for n, c in zip(lengths, compressed, strict=True))
            for wanted in (True, False)
        ]
        self.offsets, self.cuts = offsets_of(rows[0]), cut_bytes(offsets_of(rows[0])[-1], ranks)
        dense_offsets = offsets_of(rows[1])
        dense_cuts = cut_bytes(dense_offsets[-1], ranks)
        where = [
            (self.offsets, self.cuts) if c else (dense_offsets, dense_cuts) for c in compressed
        ]
        self.ranges = [
            [
                _within(offsets[i], cuts[r], cuts[r + 1], n)
                for i, (n, (offsets, cuts)) in enumerate(zip(lengths, where, strict=True))
            ]
            for r in range(ranks)
        ]

    @property
    def own(self) -> list[Range]:
        return self.ranges[self.rank]

    def sizes(self, rank: int) -> list[int]:
        """Elements of each tensor that ``rank`` owns."""
        return [stop - start for start, stop in self.ranges[rank]]

    def compressed_in(self, rank: int) -> int:
        """Elements of compressed tensors that ``rank`` owns."""
        return sum(size for size, c in zip(self.sizes(rank), self.compressed, strict=True) if c)

    @property
    def own_bytes(self) -> list[Range]:
        """Of each compressed tensor the bytes of the mask that this rank owns."""
        return [
            (offset + (start + 7) // 8, offset + (stop + 7) // 8)
            for offset, (start, stop), c in zip(
                self.offsets, self.own, self.compressed, strict=False
            )
            if c
        ]

    @property
    def own_bits(self) -> Range:
        """This rank's bits of the mask."""
        return 8 * self.cuts[self.rank], 8 * self.cuts[self.rank + 1]

    @property
    def own_spans(self) -> dict[int, Range]:
        """Of each compressed tensor where among these bits this rank's part of it lies."""
        begin, _ = self.own_bits
        rows = enumerate(zip(self.offsets, self.own, self.compressed, strict=False))
        return {
            i: (8 * offset + start - begin, 8 * offset + stop - begin)
            for i, (offset, (start, stop), c) in rows
            if c
        }

    @property
    def most(self) -> int:
        """Elements of the largest shard: what each rank hands over when shards are gathered."""
        return max(sum(self.sizes(rank)) for rank in range(self.ranks))

    def counts(self, positions: Tensor) -> list[int]:
        """How many of ``positions``, ascending, among the bits of the mask, each rank owns."""
        bounds = torch.searchsorted(
            positions, 8 * torch.tensor(self.cuts, dtype=torch.int64, device=positions.device)
        ).tolist()
        return [b - a for a, b in itertools.pairwise(bounds)]

    def in_own_parts(self, positions: Tensor) -> list[Tensor | None]:
        """Positions in this rank's part of the mask, for each compressed tensor counted from where
        its part begins.
        """
        edges = [
            8 * offset + edge
            for offset, (start, stop) in zip(self.offsets, self.own, strict=False)
            for edge in (start, stop)
        ]
        bounds = torch.searchsorted(
            positions, torch.tensor(edges, dtype=torch.int64, device=positions.device)
        ).tolist()
        return [
            positions[bounds[2 * i] : bounds[2 * i + 1]] - edges[2 * i] if compressed else None
            for i, compressed in enumerate(self.compressed)
        ]


def _within(offset: int, first: int, last: int, n: int) -> Range:
    """Elements of a tensor of n, whose bits begin at byte ``offset``, that lie in bytes ``first``
    to ``last``.
    """
    start, stop = (min(n, max(0, 8 * (cut - offset))) for cut in (first, last))
    return start, stop


def unshard(
    shards: Shards,
    rows: Tensor,
    into: list[Tensor | None],
    owners: list[int] | None = None,
    add: bool = False,
) -> None:
    """Write gathered shards into the flattened tensors ``into``; row r is that of rank
    ``owners[r]``, or of rank r.

    None for tensors that have no part in the rows. ``add``: they are added to what is there.
    """
    parts: list[Tensor] = []
    given: list[Tensor] = []
    for row, owner in zip(rows, owners or range(shards.ranks), strict=True):
        at = 0
        for (start, stop), whole in zip(shards.ranges[owner], into, strict=True):
            if whole is not None and stop > start:
                parts.append(whole[start:stop])
                given.append(row[at : at + stop - start])
                at += stop - start
    if parts:
        (torch._foreach_add_ if add else torch._foreach_copy_)(parts, given)
