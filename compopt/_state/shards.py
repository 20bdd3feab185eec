"""Shards: which elements of a bucket's tensors each rank owns, and sharded state gathered and cut
again.

The rank that owns a shard keeps its moments, and its float32 master where parameters are of lower
precision; the other ranks keep nothing of them. In memory ``optimizer.state`` shows the part of
each tensor that this rank owns, as a vector that may be empty.

There are two layouts. ``cut_evenly`` (ZeRO-1) cuts anywhere within tensors, at whole words of 64
elements: compressed tensors are cut as one row of elements, dense ones as another, so that every
rank owns its share of both. ``cut_by_rows`` follows FSDP, which gives each rank a row: its part of
one tensor after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import WORD, byte_offsets, split_bytes
from .tensors import upload

Range = tuple[int, int]


class Strided(NamedTuple):
    """``rows`` times ``columns`` elements of a vector, the first at ``start``, rows ``stride``
    apart.
    """

    start: int
    rows: int
    columns: int
    stride: int

    def of(self, x: Tensor) -> Tensor:
        if self.rows == 1:
            return x[self.start : self.start + self.columns]
        return x.as_strided(
            (self.rows, self.columns), (self.stride, 1), x.storage_offset() + self.start
        )


class Segments(NamedTuple):
    """Runs of bits of a mask that belong to one tensor each: where they begin, how far from there
    their elements lie in all compressed tensors (None: nowhere else), and which tensor it is.
    """

    begins: Tensor
    shifts: Tensor | None
    tensors: Tensor


class ShardLayout:
    """Who owns what of the tensors of one bucket.

    ``ranges[r][i]`` are the elements of flattened tensor i that rank r owns. A mask has a bit for
    every element of a compressed tensor, those of one rank together: ``cuts`` are the bytes where
    each rank's begin, ``places[i]`` are the bits of tensor i, ``gaps`` those that belong to none.
    ``owned[r]`` compressed elements are rank r's, without what fills up its row.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        compressed: Sequence[bool],
        ranges: list[list[Range]],
        cuts: list[int],
        places: list[Strided | None],
        gaps: list[Strided],
        owned: list[int],
        rank: int,
    ):
        self.rank, self.ranks = rank, len(ranges)
        self.lengths, self.compressed, self.ranges = lengths, compressed, ranges
        self.cuts, self.places, self.gaps, self.owned = cuts, places, gaps, owned
        self._segments_on: dict[torch.device, Segments] = {}

    @property
    def own(self) -> list[Range]:
        return self.ranges[self.rank]

    def sizes(self, rank: int) -> list[int]:
        """Elements of each tensor that ``rank`` owns."""
        return [stop - start for start, stop in self.ranges[rank]]

    @property
    def most(self) -> int:
        """Elements of the largest shard: what each rank hands over when shards are gathered."""
        return max(sum(self.sizes(rank)) for rank in range(self.ranks))

    # The mask

    @property
    def mask_bytes(self) -> int:
        return self.cuts[-1]

    @property
    def own_bits(self) -> Range:
        """This rank's bits of the mask."""
        return 8 * self.cuts[self.rank], 8 * self.cuts[self.rank + 1]

    def views_in_mask_order(self, x: Tensor) -> list[Tensor | None]:
        """For each compressed tensor the view of its elements in ``x``, which has one for each bit
        of the mask.
        """
        return [None if place is None else place.of(x) for place in self.places]

    @property
    def own_parts_of_mask(self) -> list[Range | None]:
        """Where this rank's part of each compressed tensor lies among its own bits."""
        parts: list[Range | None] = []
        for place, (start, stop) in zip(self.places, self.own, strict=True):
            if place is None:
                parts.append(None)
                continue
            offset = start if place.rows == 1 else self.rank * place.stride
            first = place.start + offset - self.own_bits[0]
            parts.append((first, first + stop - start))
        return parts

    def count_by_rank(self, positions: Tensor) -> list[int]:
        """How many of ``positions`` in the mask, ascending, each rank owns."""
        edges = 8 * torch.tensor(self.cuts, dtype=torch.int64, device=positions.device)
        bounds = torch.searchsorted(positions, edges).tolist()
        return [b - a for a, b in itertools.pairwise(bounds)]

    def places_of(self, positions: Tensor) -> Tensor:
        """Where elements at these positions in the mask are in all compressed tensors, one after
        the other. What lies between tensors is somewhere.
        """
        shifts = self._segments(positions.device).shifts
        if shifts is None:
            return positions
        places = positions + shifts.index_select(0, self._segment_of(positions))
        return places.clamp_(max=self.compressed_length - 1)

    def tensors_at(self, positions: Tensor) -> Tensor:
        """Which tensor each of these positions in the mask belongs to."""
        tensors = self._segments(positions.device).tensors
        return tensors.index_select(0, self._segment_of(positions))

    @property
    def compressed_length(self) -> int:
        return sum(n for n, c in zip(self.lengths, self.compressed, strict=True) if c)

    def _segment_of(self, positions: Tensor) -> Tensor:
        begins = self._segments(positions.device).begins
        return torch.bucketize(positions, begins, right=True).sub_(1)

    def _segments(self, device: torch.device) -> Segments:
        if device in self._segments_on:
            return self._segments_on[device]
        rows, first = [], 0
        for i, place in enumerate(self.places):
            if place is None or not self.lengths[i]:
                continue
            for row in range(place.rows):
                begin = place.start + row * place.stride
                rows.append((begin, first + row * place.columns - begin, i))
            first += self.lengths[i]
        begins, shifts, tensors = zip(*sorted(rows), strict=True)
        found = Segments(
            upload(begins, torch.int64, device),
            upload(shifts, torch.int64, device) if any(shifts) else None,
            upload(tensors, torch.int64, device),
        )
        self._segments_on[device] = found
        return found


def cut_evenly(lengths: list[int], compressed: list[bool], rank: int, ranks: int) -> ShardLayout:
    """Equal parts for all ranks, of compressed tensors and of the others."""
    offsets, cuts = _offsets_and_cuts(lengths, compressed, True, ranks)
    others = _offsets_and_cuts(lengths, compressed, False, ranks)
    where = [(offsets, cuts) if c else others for c in compressed]
    ranges = [
        [
            _within(own[i], edges[r], edges[r + 1], n)
            for i, (n, (own, edges)) in enumerate(zip(lengths, where, strict=True))
        ]
        for r in range(ranks)
    ]
    places: list[Strided | None] = []
    gaps: list[Strided] = []
    for i, (n, c) in enumerate(zip(lengths, compressed, strict=True)):
        first, end = 8 * offsets[i], 8 * offsets[i + 1]
        places.append(Strided(first, 1, n, n) if c else None)
        if c and first + n < end:
            gaps.append(Strided(first + n, 1, end - first - n, 0))
    owned = [
        sum(stop - start for (start, stop), c in zip(own, compressed, strict=True) if c)
        for own in ranges
    ]
    return ShardLayout(lengths, compressed, ranges, cuts, places, gaps, owned, rank)


def cut_by_rows(
    ranges: list[list[Range]], owned: list[int], compressed: list[bool], rank: int
) -> ShardLayout:
    """Every rank owns as much of each compressed tensor as the others, filled up where necessary;
    ``owned``: without that.
    """
    ranks, lengths = (
        len(ranges),
        [max(stop for _, stop in own) for own in zip(*ranges, strict=True)],
    )
    sizes = [n // ranks if c else 0 for n, c in zip(lengths, compressed, strict=True)]
    width = sum(sizes) + -sum(sizes) % (8 * WORD)
    firsts = itertools.accumulate(sizes, initial=0)
    places = [
        Strided(first, ranks, n, width) if c else None
        for first, n, c in zip(firsts, sizes, compressed, strict=False)
    ]
    used = sum(sizes)
    gaps = [Strided(used, ranks, width - used, width)] if used < width else []
    cuts = [r * width // 8 for r in range(ranks + 1)]
    return ShardLayout(lengths, compressed, ranges, cuts, places, gaps, owned, rank)


def _offsets_and_cuts(
    lengths: list[int], compressed: list[bool], wanted: bool, ranks: int
) -> tuple[list[int], list[int]]:
    """Bytes at which tensors begin, and ranks' parts, in a mask of those that are compressed, or
    are not.
    """
    offsets = byte_offsets(
        tuple(n if c is wanted else 0 for n, c in zip(lengths, compressed, strict=True))
    )
    return offsets, split_bytes(offsets[-1], ranks)


def _within(offset: int, first: int, last: int, n: int) -> Range:
    """Elements of a tensor of n, whose bits begin at byte ``offset``, that lie in bytes ``first``
    to ``last``.
    """
    start, stop = (min(n, max(0, 8 * (cut - offset))) for cut in (first, last))
    return start, stop


def unshard(
    shards: ShardLayout,
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
