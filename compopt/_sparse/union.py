"""TAGC's index: where any rank has left something, and how many of these places each rank owns.

How long a payload is follows from it, so the host has to know. On a device the numbers are read for
all buckets at once, and nothing else is asked for: positions are found for a number that is known.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._ops.operations import Ops
from .._state.buckets import upload
from .._state.shards import Shards
from .._wire.requests import ReadToHost, RequestGenerator


@dataclass(frozen=True, slots=True)
class Union:
    """Positions among the bits of the mask, ascending, int64; how many each rank owns; of those
    that this rank owns how many are in each compressed tensor, where that is known.
    """

    index: Tensor
    counts: list[int]
    own: list[int] | None = None

    def own_index(self, shards: Shards) -> Tensor:
        """Positions that this rank owns, among its own bits."""
        first, size = sum(self.counts[: shards.rank]), self.counts[shards.rank]
        begin, _ = shards.own_bits
        return self.index[first : first + size] - begin


@dataclass(frozen=True, slots=True)
class Tables:
    """Of each byte, how many bits are set; of each byte, the place of its first set bit, ...

    ``edges``: bytes of the mask before which bits are counted.
    """

    counts: Tensor
    places: Tensor
    edges: Tensor


def union_of(
    shards: Shards, bits: Tensor, ops: Ops, cache: dict[str, Any]
) -> RequestGenerator[Union]:
    """The index, from its ``bits``. ``cache`` keeps what follows from ``shards``."""
    if bits.device.type == "cpu":
        index = ops.set_bits_of(bits)
        return Union(index, shards.counts(index))
    of, tables = cache.get("tables", (None, None))
    if of is not shards:
        tables = tables_of(shards, bits.device)
        cache["tables"] = shards, tables
    counts = tables.counts.index_select(0, bits.int())
    before = counts.new_empty(len(counts) + 1, dtype=torch.int64)
    before[:1].zero_()
    torch.cumsum(counts, 0, out=before[1:])
    told = yield ReadToHost(before.index_select(0, tables.edges))
    cuts, edges = told[: shards.ranks + 1], told[shards.ranks + 1 :]
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    own = [b - a for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return Union(positions_in(bits, counts, before, cuts[-1], tables.places), sizes, own)


def tables_of(shards: Shards, device: torch.device) -> Tables:
    places = [[i for i in range(8) if byte >> i & 1] for byte in range(256)]
    padded = [place for own in places for place in [*own, *[0] * (8 - len(own))]]
    edges = [*shards.cuts, *(edge for part in shards.own_bytes for edge in part)]
    return Tables(
        upload([len(own) for own in places], torch.int32, device),
        upload(padded, torch.uint8, device),
        upload(edges, torch.int64, device),
    )


def positions_in(bits: Tensor, counts: Tensor, before: Tensor, size: int, places: Tensor) -> Tensor:
    """The ``size`` positions of set bits, ascending: of each its byte, which of the byte's set bits
    it is, and where in the byte that one is.

    ``counts`` and ``before``: of each byte, and of those before it.
    """
    byte = torch.repeat_interleave(counts, output_size=size).long()
    which = torch.arange(size, dtype=torch.int64, device=bits.device)
    which.sub_(before.index_select(0, byte))
    place = which.add_(bits.index_select(0, byte), alpha=8)
    return places.index_select(0, place).add(byte, alpha=8)
