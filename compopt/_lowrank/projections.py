"""How a tensor is projected: as a matrix H of m rows and d columns.

``H R`` with R of shape (d, r) crosses the network, and ``scale * (H R) R^T`` is its
reconstruction. Where H is cut into blocks of rows each has an R of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._state.tensors import to_local
from .kinds import KINDS, NARROW, Kind

# For each tensor of a bucket how it is projected; None: sent whole.
Plan = list["Projection | None"]


@dataclass(frozen=True, slots=True)
class Projection:
    """How one tensor is projected.

    ``rows`` and ``columns`` are the tensor as a matrix; ``of_rows``: its rows are projected, not
    its columns. ``r`` is what remains of the projected dimension, ``beta`` the weight of the old
    error, ``height`` how many rows of H share one R (None: all).
    """

    rows: int
    columns: int
    of_rows: bool
    r: int
    kind: Kind
    beta: float
    height: int | None = None

    @property
    def d(self) -> int:
        return self.rows if self.of_rows else self.columns

    @property
    def m(self) -> int:
        return self.columns if self.of_rows else self.rows

    @property
    def blocks(self) -> int:
        """How many matrices R it takes."""
        return 1 if self.height is None else math.ceil(self.m / self.height)

    @property
    def drawn(self) -> int:
        """How many numbers these have."""
        return self.blocks * self.d * self.r

    @property
    def scale(self) -> float:
        return self.kind.scale(self.r)

    @property
    def inflation(self) -> float:
        return self.kind.inflation(self.d, self.r)

    @property
    def least_beta(self) -> float:
        return self.kind.least_beta(self.d, self.r)

    def matrix(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as the (m, d) matrix whose columns are projected."""
        matrix = tensor.view(self.rows, self.columns)
        return matrix.t() if self.of_rows else matrix

    def of_part(self, part: Tensor) -> Tensor:
        """Its part of a payload as the (m, r) matrix H R."""
        return self.kind.of_part(part, self.m, self.r)


def by_blocks(
    R: Tensor, left: Tensor, right: Tensor, height: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """R and the rows of two matrices that belong to it: all whole blocks stacked, then the rest.

    R is one matrix, or of each block of ``height`` rows one.
    """
    if height is None or R.dim() == 2:
        yield R, left, right
        return
    whole = len(left) // height
    rows = whole * height
    if whole:
        stacked = (x[:rows].unflatten(0, (whole, height)) for x in (left, right))
        yield R[:whole], *stacked
    if rows < len(left):
        yield R[whole], left[rows:], right[rows:]


@lru_cache(maxsize=4096)
def projection(
    shape: torch.Size,
    sharded: bool,
    ratio: float,
    kind: str,
    ef_beta: float | str,
    rank: int = 16,
    block_rows: int | str | None = None,
) -> Projection | None:
    """How a tensor of this (to_local) shape is projected; None when it is sent whole."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    rows, columns = as_matrix(shape)
    how = KINDS[kind]
    cut = how.cut(rows, columns, sharded, ratio, rank)
    if cut is None:
        return None
    d = rows if cut.of_rows else columns
    beta = how.best_beta(d, cut.r) if isinstance(ef_beta, str) else ef_beta
    m = columns if cut.of_rows else rows
    height = how.block_rows(cut.r) if isinstance(block_rows, str) else block_rows
    if height is not None and (how.follows or height >= m):
        height = None
    return Projection(rows, columns, cut.of_rows, cut.r, how, beta, height)


def as_matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a tensor: the last dimension, and narrow ones with those before them."""
    split = len(shape) - 1
    while split > 1 and math.prod(shape[split:]) < NARROW:
        split -= 1
    return math.prod(shape[:split]), math.prod(shape[split:])


def is_sharded(p: Tensor) -> bool:
    return to_local(p) is not p
