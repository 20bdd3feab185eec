"""Shard layouts: the elements of a bucket's tensors that each rank owns.

The owner of a shard stores its moments, and its float32 master if parameters have lower precision.
``optimizer.state`` shows the owned part of each tensor, as a vector that may be empty.

There are two layouts. ``cut_evenly`` (ZeRO-1) cuts anywhere within tensors, at whole words of 64
elements. It cuts the compressed tensors as one vector and the dense ones as another, so that every
rank owns its share of both. ``cut_by_rows`` follows the rows of FSDP's reduce-scatter: one row for
each rank, with its part of one parameter after the other, padded with zeros to the longest rank's
part (``ParamColumns``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import byte_offsets, split_bytes
from .tensors import upload

Range = tuple[int, int]


class Strided(NamedTuple):
    """A strided range of a vector: ``rows`` runs of ``columns`` elements, the first at ``start``,
    ``stride`` apart.
    """

    start: int
    rows: int
    columns: int
    stride: int

    def view_in(self, x: Tensor) -> Tensor:
        if self.rows == 1:
            return x[self.start : self.start + self.columns]
        return x.as_strided(
            (self.rows, self.columns), (self.stride, 1), x.storage_offset() + self.start
        )


class BitRun(NamedTuple):
    """``size`` bits of a mask from ``first`` on: those of a tensor's elements from ``at`` on."""

    first: int
    size: int
    tensor: int
    at: int


class Segments(NamedTuple):
    """Runs of bits of a mask, each of one tensor.

    ``begins`` are their first bits. ``shifts`` are the offsets from there to the same elements in
    the concatenation of all compressed tensors (None: all are 0). ``tensors`` are indices of
    tensors.
    """

    begins: Tensor
    shifts: Tensor | None
    tensors: Tensor


@dataclass(eq=False)
class ShardLayout:
    """The owners of the elements of one bucket's tensors.

    Rank r owns the elements ``ranges[r][i]`` of flattened tensor i. A mask has a bit for every
    element of a compressed tensor. In the mask all bits of rank r are contiguous: bytes
    ``mask_cuts[r]`` to ``mask_cuts[r + 1]``. ``strided_bits[i]`` are the bits of tensor i, ``gaps``
    the bits of no tensor. Rank r owns ``compressed_counts[r]`` compressed elements, without
    padding.
    """

    lengths: Sequence[int]
    compressed: Sequence[bool]
    ranges: list[list[Range]]
    mask_cuts: list[int]
    strided_bits: list[Strided | None]
    gaps: list[Strided]
    compressed_counts: list[int]
    rank: int
    _own_edges: Tensor | None = None
    _segments_on: dict[torch.device, Segments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = len(self.ranges)
        self.own_ranges = self.ranges[self.rank]
        # the number of elements of each tensor that a rank owns, for every rank
        self.sizes = [[stop - start for start, stop in of_rank] for of_rank in self.ranges]
        self.own_sizes = self.sizes[self.rank]
        # elements of the largest shard, to which an all-gather pads every rank's
        self.max_numel = max(map(sum, self.sizes))
        self.mask_bytes = self.mask_cuts[-1]
        cuts = [8 * cut for cut in self.mask_cuts]
        self.bits = [*itertools.pairwise(cuts)]  # of the mask, of every rank
        self.own_bits = self.bits[self.rank]

    # The mask

    def views_in_mask_order(self, x: Tensor) -> list[Tensor | None]:
        """Return a view of each compressed tensor in ``x``, which has one element for each bit of
        the mask.
        """
        return [None if strided is None else strided.view_in(x) for strided in self.strided_bits]

    @cached_property
    def own_parts_of_mask(self) -> list[Range | None]:
        """The range of this rank's part of each compressed tensor among the rank's own bits."""
        parts: list[Range | None] = []
        for strided, (start, stop) in zip(self.strided_bits, self.own_ranges, strict=True):
            if strided is None:
                parts.append(None)
                continue
            offset = start if strided.rows == 1 else self.rank * strided.stride
            first = strided.start + offset - self.own_bits[0]
            parts.append((first, first + stop - start))
        return parts

    @cached_property
    def runs_by_shard(self) -> list[list[BitRun]]:
        """The runs of each rank's bits, ascending."""
        of_tensors = [
            BitRun(strided.start + row * strided.stride, strided.columns, i, row * strided.columns)
            for i, strided in enumerate(self.strided_bits)
            if strided is not None
            for row in range(strided.rows)
        ]
        of_ranks: list[list[BitRun]] = []
        for begin, end in self.bits:
            runs = []
            for first, size, tensor, at in sorted(of_tensors):
                start, stop = max(first, begin), min(first + size, end)
                if start < stop:
                    runs.append(BitRun(start, stop - start, tensor, at + start - first))
            of_ranks.append(runs)
        return of_ranks

    def count_by_rank(self, positions: Tensor) -> list[int]:
        """Count the ascending ``positions`` in the mask that each rank owns."""
        edges = 8 * torch.tensor(self.mask_cuts, dtype=torch.int64, device=positions.device)
        bounds = torch.searchsorted(positions, edges).tolist()
        return [b - a for a, b in itertools.pairwise(bounds)]

    def bounds_in_own_mask(self, positions: Tensor) -> list[Range]:
        """Return the range of each tensor among ascending ``positions`` in this rank's own bits, an
        empty one for a tensor that is not compressed.
        """
        if self._own_edges is None:
            edges = [part or (0, 0) for part in self.own_parts_of_mask]
            self._own_edges = torch.tensor(edges, dtype=torch.int64, device=positions.device)
        return [(a, b) for a, b in torch.searchsorted(positions, self._own_edges).tolist()]

    def map_to_tensors(self, positions: Tensor) -> Tensor:
        """Convert positions in the mask to positions in the concatenation of all compressed
        tensors. A position in a gap gives an arbitrary valid one.
        """
        shifts = self._segments(positions.device).shifts
        if shifts is None:
            return positions
        shifted = positions + shifts.index_select(0, self._segment_of(positions))
        pairs = zip(self.lengths, self.compressed, strict=True)
        return shifted.clamp_(max=sum(n for n, c in pairs if c) - 1)

    def tensors_at(self, positions: Tensor) -> Tensor:
        """Return the index of the tensor of each of these positions in the mask."""
        tensors = self._segments(positions.device).tensors
        return tensors.index_select(0, self._segment_of(positions))

    def _segment_of(self, positions: Tensor) -> Tensor:
        begins = self._segments(positions.device).begins
        return torch.bucketize(positions, begins, right=True).sub_(1)

    def _segments(self, device: torch.device) -> Segments:
        """Return the runs of bits of the mask on this device, computed once."""
        if device in self._segments_on:
            return self._segments_on[device]
        pairs = zip(self.lengths, self.compressed, strict=True)
        firsts = [*itertools.accumulate((n if c else 0 for n, c in pairs), initial=0)]
        runs = [*itertools.chain(*self.runs_by_shard)]
        begins = [run.first for run in runs]
        shifts = [firsts[run.tensor] + run.at - run.first for run in runs]
        self._segments_on[device] = Segments(
            upload(begins, torch.int64, device),
            upload(shifts, torch.int64, device) if any(shifts) else None,
            upload([run.tensor for run in runs], torch.int64, device),
        )
        return self._segments_on[device]


def cut_evenly(lengths: list[int], compressed: list[bool], rank: int, ranks: int) -> ShardLayout:
    """Give all ranks equal parts, of the compressed tensors and of the others."""
    # offsets of tensors and of ranks, in bytes of a mask: of the compressed tensors, of the others
    offsets_of: dict[bool, list[int]] = {}
    cuts_of: dict[bool, list[int]] = {}
    for chosen in (True, False):
        sizes = tuple(n if c is chosen else 0 for n, c in zip(lengths, compressed, strict=True))
        offsets_of[chosen] = byte_offsets(sizes)
        cuts_of[chosen] = split_bytes(offsets_of[chosen][-1], ranks)
    ranges: list[list[Range]] = [[] for _ in range(ranks)]
    for i, (n, c) in enumerate(zip(lengths, compressed, strict=True)):
        edges = [min(n, max(0, 8 * (cut - offsets_of[c][i]))) for cut in cuts_of[c]]
        for owned_ranges, first_and_end in zip(ranges, itertools.pairwise(edges), strict=True):
            owned_ranges.append(first_and_end)
    offsets, cuts = offsets_of[True], cuts_of[True]
    strided_bits: list[Strided | None] = []
    gaps: list[Strided] = []
    for i, (n, c) in enumerate(zip(lengths, compressed, strict=True)):
        first, end = 8 * offsets[i], 8 * offsets[i + 1]
        strided_bits.append(Strided(first, 1, n, n) if c else None)
        if c and first + n < end:
            gaps.append(Strided(first + n, 1, end - first - n, 0))
    compressed_counts = [
        sum(stop - start for (start, stop), c in zip(rank_ranges, compressed, strict=True) if c)
        for rank_ranges in ranges
    ]
    return ShardLayout(
        lengths, compressed, ranges, cuts, strided_bits, gaps, compressed_counts, rank
    )


def unshard(
    shards: ShardLayout,
    rows: Tensor,
    into: list[Tensor | None],
    owners: list[int] | None = None,
    add: bool = False,
) -> None:
    """Write gathered shards to the flattened tensors ``into``, or ``add`` them.

    Row r is the shard of rank ``owners[r]``, by default of rank r. A tensor that is not in the rows
    is None.
    """
    destinations: list[Tensor] = []
    sources: list[Tensor] = []
    for row, owner in zip(rows, owners or range(shards.ranks), strict=True):
        at = 0
        for (start, stop), tensor in zip(shards.ranges[owner], into, strict=True):
            if tensor is not None and stop > start:
                destinations.append(tensor[start:stop])
                sources.append(row[at : at + stop - start])
                at += stop - start
    if destinations:
        (torch._foreach_add_ if add else torch._foreach_copy_)(destinations, sources)
