"""The matrices that a tensor's rows are, and batches of them by shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._state.tensors import take_local_part, to_local


class Slice(NamedTuple):
    """Matrices of one shape: ``matrices`` of ``rows`` rows each, from a row of a tensor on;
    of a stack of matrices, in each.
    """

    p: Tensor
    start: int
    matrices: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.p.shape[-1]

    @property
    def numel(self) -> int:
        return self.p.numel() // self.p.shape[-2] * self.matrices * self.rows

    def view_rows(self, x: Tensor) -> Tensor:
        """Return a view of these rows of x, which has the tensor's rows."""
        return x.narrow(-2, self.start, self.matrices * self.rows)


def cut_rows(p: Tensor, rows: Sequence[int]) -> list[Slice]:
    """Divide a tensor whose matrices have so many rows; neighbours of one shape are one slice."""
    slices, start = [], 0
    for each, run in itertools.groupby(rows):
        slices.append(Slice(p, start, len(list(run)), each))
        start += slices[-1].matrices * each
    return slices


def make_batches(slices: Iterable[Slice], most: int) -> list[list[list[Slice]]]:
    """Divide slices into batches, equally on all ranks: one shape of matrices and its transpose,
    and no more than ``most`` elements if they are several. A batch has its slices by shape.
    """
    sides: dict[tuple[int, int], list[Slice]] = {}
    for one in slices:
        sides.setdefault(one.shape, []).append(one)
    batches: list[list[list[Slice]]] = []
    kind, numel = (0, 0), 0
    for shape in sorted(sides, key=lambda shape: (min(shape), max(shape), *shape)):
        begins_side = True
        for one in sides[shape]:
            size = one.numel
            if kind != (min(shape), max(shape)) or numel + size > most:
                batches.append([])
                kind, numel, begins_side = (min(shape), max(shape)), 0, True
            if begins_side:
                batches[-1].append([])
            batches[-1][-1].append(one)
            numel, begins_side = numel + size, False
    return batches


def stack_slices(side: Sequence[Slice], of: dict[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Copy a side's matrices, of each tensor's value, to one of shape (number, rows, columns)."""
    matrices = [one.view_rows(of[one.p]).reshape(-1, *one.shape) for one in side]
    counts = [len(each) for each in matrices]
    stack = matrices[0].new_empty((sum(counts), *side[0].shape), dtype=dtype)
    torch._foreach_copy_(stack.split(counts), matrices)
    return stack


def unstack_slices(side: Sequence[Slice], stack: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of weights that this rank has of a side, and those of a stack for them."""
    weights, results, first = [], [], 0
    for one in side:
        is_cut, local = cuts_matrices(one.p), to_local(one.p)
        rows = one.view_rows(one.p if is_cut else local)
        shape = rows.shape
        count = shape.numel() // (stack.shape[1] * stack.shape[2])
        part = stack[first : first + count].view(shape)
        first += count
        weights.append(local if is_cut else rows)
        results.append(take_local_rows(one, part) if is_cut else part)
    return weights, results


def take_local_rows(one: Slice, part: Tensor) -> Tensor:
    """Return what this rank has of a tensor of which a slice is ``part``, and all else zero."""
    if part.shape != one.p.shape:
        whole = part.new_zeros(one.p.shape)
        one.view_rows(whole).copy_(part)
        part = whole
    return take_local_part(one.p, part)


def cuts_matrices(p: Tensor) -> bool:
    """Return True if this rank has a part only of some matrices of a sharded tensor."""
    cuts = [one for one in getattr(p, "placements", ()) if not one.is_replicate()]
    return any(not (one.is_shard() and one.dim < p.ndim - 2) for one in cuts)
