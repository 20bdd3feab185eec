"""What one reduce-scatter of FSDP averages: whose gradients, and where they lie.

FSDP hands over a row for each rank: that rank's part of one parameter after the other, all parts of
a parameter as long as its longest, filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """One parameter's part of a row.

    ``begin`` and ``size``: where it lies in FSDP's rows, in elements. ``place``: where it lies
    among what is compressed of a row, or among what is sent as it is. ``dim``: along which FSDP
    cuts it. ``residual``: what this rank owes of it, whole; None where it is sent as it is.
    """

    p: Tensor
    dim: int
    begin: int
    size: int
    place: int
    residual: Tensor | None

    @property
    def end(self) -> int:
        return self.begin + self.size

    def filled(self, rank: int, ranks: int) -> int:
        """How much of it ``rank`` has; zeros follow."""
        if self.dim:
            return self.size
        return min(self.size, max(0, self.p.numel() - rank * self.size))

    def span(self, rank: int, ranks: int) -> tuple[int, int]:
        """Which of its rows ``rank`` has: the first, and the first after them."""
        here, each = self.p.shape[0], -(-self.p.shape[0] // ranks)
        return min(rank * each, here), min((rank + 1) * each, here)

    def gather(self, rows: Tensor) -> Tensor:
        """The whole of it, from all ranks' rows: a copy."""
        own, shape = rows[:, self.begin : self.end], self.p.shape
        if not self.dim:
            return own.reshape(-1)[: self.p.numel()].view(shape)
        cut = [*shape[: self.dim], -1, *shape[self.dim + 1 :]]
        return torch.cat([row.view(cut) for row in own], self.dim)

    def views(self, rows: Tensor, begin: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of its elements in ``rows``, from column ``begin`` on, each with that of the residual."""
        if self.residual is None or not self.p.numel():
            return
        own = rows[:, begin : begin + self.size]
        if self.dim:
            whole = self.residual.unflatten(self.dim, (len(rows), -1)).movedim(self.dim, 0)
            yield own.unflatten(1, whole.shape[1:]), whole
            return
        flat = self.residual.view(-1)
        full, rest = divmod(flat.numel(), self.size)
        yield own[:full], flat[: full * self.size].view(full, self.size)
        if rest:
            yield own[full, :rest], flat[full * self.size :]


class FsdpRows:
    """The parameters of one reduce-scatter over ``ranks``, in its order.

    ``given``: each with the dimension that FSDP cuts, and its residual where it is compressed.
    """

    def __init__(self, given: Iterable[tuple[Tensor, int, Tensor | None]], rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.pieces: list[Piece] = []
        # elements of a row: all, what is sent as it is, what is compressed
        self.length = self.plain = self.compressed = 0
        for p, dim, residual in given:
            size = part_of(p, dim, ranks)
            place = self.plain if residual is None else self.compressed
            self.pieces.append(Piece(p, dim, self.length, size, place, residual))
            self.length += size
            if residual is None:
                self.plain += size
            else:
                self.compressed += size

    @property
    def as_they_are(self) -> list[Piece]:
        """What is not compressed."""
        return [piece for piece in self.pieces if piece.residual is None]

    @property
    def to_compress(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.residual is not None]


def columns_of(rows: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """These pieces of all ranks' rows, one after the other."""
    own = [rows[:, piece.begin : piece.end] for piece in pieces]
    return torch.cat(own, 1) if own else rows[:, :0]


def part_of(p: Tensor, dim: int, ranks: int) -> int:
    """Elements of a rank's part of ``p`` that FSDP cuts along ``dim``, the longest rank's."""
    if not p.numel():
        return 0
    return -(-p.shape[dim] // ranks) * (p.numel() // p.shape[dim])
