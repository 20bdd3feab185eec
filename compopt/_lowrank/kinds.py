"""The kinds of projection: what ``projection=`` may say, a line of ``KINDS`` each.

A kind says which side of a matrix is projected and to how many columns, what makes the
reconstruction right, how much of the old error may be kept, and what becomes of random numbers
that are drawn for it. Everything else is the same for all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from .orthonormal import columns_of

# Rows, or the last dimensions of a convolution's kernel: fewer are not projected, or joined.
NARROW = 64
LARGEST = 2**22  # numbers drawn for a tensor of few rows


class Cut(NamedTuple):
    """What is left of a matrix: of its rows, or of its columns, ``r``."""

    of_rows: bool
    r: int


class Kind(ABC):
    """One way to project matrices of m rows and d columns to r columns."""

    follows = False  # its columns are not drawn: they follow the gradient, see ``tracking``
    forgets_after: int | None = 128  # steps after which the error is forgotten, by default
    owes = True  # what is left is a part of the gradient, and not the noise of an unbiased one

    @abstractmethod
    def cut(self, rows: int, columns: int, sharded: bool, ratio: float, rank: int) -> Cut | None:
        """What is left of a matrix; None where it is sent whole."""

    def scale(self, r: int) -> float:
        """Of p R^T: it is the nearest reconstruction there is (a contraction)."""
        return 1.0

    def inflation(self, d: int, r: int) -> float:
        """How many times as large as that of what was averaged the squared norm of its
        reconstruction is.
        """
        return 1.0

    def least_beta(self, d: int, r: int) -> float:
        """The weight of the old error below which the error grows without end."""
        return 0.0

    def best_beta(self, d: int, r: int) -> float:
        """The weight of the old error with which the error is least.

        A contraction never enlarges the error: all of the new one may be kept.
        """
        return 0.0

    def block_rows(self, r: int) -> int | None:
        """How many rows share one matrix of random numbers where the user leaves it to us (None:
        all).
        """
        return None

    def of_random(self, R: Tensor) -> None:
        """Make what projects, in place, of random numbers: a matrix, or several."""
        return

    def of_part(self, part: Tensor, m: int, r: int) -> Tensor:
        """A tensor's part of a payload as the (m, r) matrix H R."""
        return part.view(m, r)


class Random(Kind):
    """The smaller side of a tensor is projected.

    As many bytes and as much variance for the same ratio, with less to draw and to multiply. Unless
    it has few rows: what would be left of so few carries too little. Its columns are projected
    then, unless that takes too many numbers. So are those of sharded rows: whole on every rank,
    whatever the shard's number of rows.
    """

    def cut(self, rows: int, columns: int, sharded: bool, ratio: float, rank: int) -> Cut | None:
        few = rows < NARROW
        too_wide = few and columns * math.ceil(columns / ratio) > LARGEST
        of_rows = rows < columns and (not few or too_wide) and not sharded
        d = rows if of_rows else columns
        r = math.ceil(d / ratio)
        if r >= d or (too_wide and not of_rows):
            return None
        return Cut(of_rows, r)

    def block_rows(self, r: int) -> int | None:
        return 4 * r  # a random number for each four elements; r rows or fewer hardly lost less


def variance(d: int, r: int) -> float:
    """w: the mean of |reconstruction - g|^2 over |g|^2, for a Gaussian d x r matrix (SEPARATE,
    lemma 4.2).
    """
    return (d + 1) / r


class Gaussian(Random):
    """Independent normal numbers: the reconstruction is unbiased.

    With a weight beta of the old error, the squared error grows by beta^2 + (1 - beta)^2 w a
    step.
    """

    owes = False

    def scale(self, r: int) -> float:
        return 1 / r

    def inflation(self, d: int, r: int) -> float:
        return 1 + variance(d, r)  # on average

    def least_beta(self, d: int, r: int) -> float:
        w = variance(d, r)
        return (w - 1) / (w + 1)

    def best_beta(self, d: int, r: int) -> float:
        w = variance(d, r)
        return w / (1 + w)


class Orthonormal(Random):
    """Orthonormal columns that span the same space as a Gaussian's."""

    def of_random(self, R: Tensor) -> None:
        R.copy_(columns_of(R))


class Tracked(Kind):
    """Orthonormal columns that follow the gradient; the random ones are where they begin.

    Rows are projected, to ``rank`` of them: each shard is a matrix of its own.
    """

    follows = True
    forgets_after = None  # what a contraction that follows the gradient has left is worth keeping

    def cut(self, rows: int, columns: int, sharded: bool, ratio: float, rank: int) -> Cut | None:
        r = min(rank, rows, columns)
        costs_as_much = r * (rows + columns) >= rows * columns
        return None if costs_as_much else Cut(True, r)

    def of_part(self, part: Tensor, m: int, r: int) -> Tensor:
        """By columns: values of one size follow each other, and share int8's scales."""
        return part.view(r, m).t()


KINDS: Mapping[str, Kind] = {
    "gaussian": Gaussian(),
    "orthonormal": Orthonormal(),
    "tracked": Tracked(),
}
