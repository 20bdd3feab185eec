"""TAGC's count sketch: encodes values at an index that all ranks know.

It is made for all shards of a bucket at once. Codes are linear, so the mean of codes is the code of
the mean.

The sketch (Li et al. 2024, section 2.2 of TAGC) adds an element, with a sign, to three cells
of its shard's table. A cell with a single element reveals its value. Peeling subtracts that value
from the element's two other cells, which may leave new cells with a single element, and so on.
Which elements come out depends on the index alone, not on values. So every rank knows beforehand
which elements do not, and sends these *leftovers* as they are, behind the table, instead of in a
second round. Nothing is ever estimated.

``UnionReducer`` (``tagc``) encodes and decodes by it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._state.shards import ShardLayout
from .._state.tensors import upload

# 2^64 / golden ratio and splitmix64's first factor, signed
GOLDEN, ODD = -0x61C8864680B583EB, -0x40A7B892E31B1A47


class Sketch:
    """A table for each shard, with one cell per ``ratio`` compressed elements, and the leftovers.

    Values are at an ``index``, ascending, in a bucket's mask, of which each rank owns ``counts``.
    ``seed`` draws the cells; it must be the same on all ranks. Codes must be sent in float32 or
    wider, because peeling adds and subtracts.
    """

    def __init__(
        self, layout: ShardLayout, index: Tensor, counts: list[int], ratio: float, seed: int
    ):
        self.layout, self.index, self.counts = layout, index, counts
        self.thirds = [math.ceil(count / (3 * ratio)) for count in layout.compressed_counts]
        self.tables = [3 * third for third in self.thirds]
        size, device = sum(counts), index.device
        sizes = upload(counts, torch.int64, device)
        third, base = (
            upload(numbers, torch.int64, device).repeat_interleave(sizes, output_size=size)
            for numbers in (self.thirds, [sum(self.tables[:r]) for r in range(layout.ranks)])
        )
        three = torch.arange(3, dtype=torch.int64, device=device)
        salts = three.add(3 * seed).mul_(GOLDEN).unsqueeze(1)
        hashed = index.unsqueeze(0) ^ salts
        # alike on every device: by multiplications that wrap, and shifts
        for factor, shift in ((ODD, 31), (GOLDEN, 29)):
            hashed = hashed * factor
            hashed = hashed ^ ((hashed >> shift) & ((1 << (64 - shift)) - 1))
        number = (hashed >> 1) & 0x7FFFFFFF  # bits that the sign does not use
        # three cells of every element of the index, a third of the table each, and its signs there
        self.cells = number % third.clamp(min=1) + third * three.unsqueeze(1) + base
        self.signs = 1 - 2 * (hashed & 1)
        del hashed, number, third, base  # peeling takes as much memory again
        self.rounds, leftover_mask = peel(self.cells, sum(self.tables))
        self.leftover_mask = leftover_mask
        self.leftover_counts = [int(part.sum()) for part in leftover_mask.split(self.counts)]
        self.leftovers = sum(self.leftover_counts)

    def encode(self, values: Tensor) -> list[Tensor]:
        """Return for every owner the table and the leftovers of ``values``, this rank's at the
        index.
        """
        tables = values.new_zeros(sum(self.tables))
        in_table = values.masked_fill(self.leftover_mask, 0)
        tables.index_add_(0, self.cells.reshape(-1), (in_table * self.signs).reshape(-1))
        leftover_values = values[self.leftover_mask].split(self.leftover_counts)
        pairs = zip(tables.split(self.tables), leftover_values, strict=True)
        return [torch.cat(pair) for pair in pairs]

    def decode(self, code: Tensor) -> Tensor:
        """Return values at the index of this rank's shard, peeled out of its table in the order
        that ``peel`` has found.
        """
        rank = self.layout.rank
        first, base = sum(self.counts[:rank]), sum(self.tables[:rank])
        shard = slice(first, first + self.counts[rank])
        table = code[: self.tables[rank]].clone()
        cells, signs, leftover_mask = (
            self.cells[:, shard] - base,
            self.signs[:, shard].to(code.dtype),
            self.leftover_mask[shard],
        )
        values = code.new_zeros(self.counts[rank])
        values[leftover_mask] = code[self.tables[rank] :]
        for element, which in self.rounds:
            is_owned = (element >= shard.start) & (element < shard.stop)
            element, which = element[is_owned] - first, which[is_owned]
            value = table[cells[which, element]] * signs[which, element]
            values[element] = value
            table.index_add_(
                0, cells[:, element].reshape(-1), (-value * signs[:, element]).reshape(-1)
            )
        return values


def peel(cells: Tensor, total: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the order in which elements come out of a sketch of ``total`` cells, in rounds, and a
    mask of those that do not.

    ``cells``: three different ones for each element, shape ``(3, elements)``. A round is a pair:
    the elements that come out, ascending, and for each the one of its three cells that holds only
    it.
    """
    n, device = cells.shape[1], cells.device
    flat, ids = cells.reshape(-1), torch.arange(n, dtype=torch.int64, device=device)
    degree = torch.zeros(total, dtype=torch.int64, device=device)
    degree.index_add_(0, flat, torch.ones_like(flat))
    # The sum of the elements in a cell: where one is left, that one.
    id_sums = torch.zeros_like(degree).index_add_(0, flat, ids.repeat(3))
    leftover_mask = torch.ones(n, dtype=torch.bool, device=device)
    rounds: list[tuple[Tensor, Tensor]] = []
    touched = flat
    while True:
        element = id_sums[touched[degree[touched] == 1]].unique()
        if not element.numel():
            return rounds, leftover_mask
        which = (degree[cells[:, element]] == 1).to(torch.uint8).argmax(0)
        rounds.append((element, which))
        leftover_mask[element] = False
        touched = cells[:, element].reshape(-1)
        degree.index_add_(0, touched, torch.full_like(touched, -1))
        id_sums.index_add_(0, touched, -element.repeat(3))
