"""What one reduce-scatter of FSDP averages, as TAGC sees it: whose gradients, and where they lie.

FSDP hands over a row for each rank: that rank's part of one parameter after the other, all parts of
a parameter as long as its longest, filled up with zeros. What is compressed of a row is copied into
a row of *accumulators*, of whole words of the mask; all else is sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._engine.when import start_of
from .._state.masks import WORD
from .._state.shards import Shards


class Piece(NamedTuple):
    """One parameter's part of a row.

    ``begin`` and ``size``: where it lies in FSDP's rows, in elements. ``place``: where it lies in a
    row of accumulators, or of what is sent as it is. ``dim``: along which FSDP cuts it.
    ``residual``: what this rank owes of it, whole; None where it is sent as it is.
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


class Parcel:
    """The parameters of one reduce-scatter over ``ranks``, in its order.

    ``given``: each with the dimension that FSDP cuts, and its residual where it is compressed.
    ``group``: the options of those.
    """

    def __init__(
        self,
        given: Iterable[tuple[Tensor, int, Tensor | None]],
        group: dict[str, Any],
        rank: int,
        ranks: int,
    ):
        self.group, self.rank, self.ranks = group, rank, ranks
        self.pieces: list[Piece] = []
        self.length = self.plain = compressed = 0
        for p, dim, residual in given:
            size = part_of(p, dim, ranks)
            place = self.plain if residual is None else compressed
            self.pieces.append(Piece(p, dim, self.length, size, place, residual))
            self.length += size
            if residual is None:
                self.plain += size
            else:
                compressed += size
        self.width = compressed + -compressed % (8 * WORD)  # of a row of accumulators
        self.shards = Shards([self.width] * ranks, [True] * ranks, rank, ranks)
        # compressed elements in each rank's row
        self.counts = [
            sum(one.filled(r, ranks) for one in self.pieces if one.residual is not None)
            for r in range(ranks)
        ]
        # accumulators as they will be where the step is applied: line 2's
        self.ahead: Tensor | None = None
        self.sent: tuple[int | None, int] = None, 0  # at the union of the last step, and leftovers
        self.cache: dict[str, Any] = {}  # what follows from ``shards``
        self._memory: Tensor | None = None

    @property
    def sparsifies(self) -> bool:
        """Whether the dense start is over, and there is anything to compress."""
        return self.width > 0 and self.group["step"] >= start_of(self.group)

    def add_up(self, rows: Tensor, again: bool) -> Tensor:
        """Line 1, of all ranks' rows.

        ``again``: an earlier backward belongs to the same step, and what it left is added to.
        """
        if again and self.ahead is not None:
            x = self.ahead
        else:
            x = self._accumulators(rows)
        for piece in self.pieces:
            if piece.residual is None:
                continue
            if x is self.ahead:
                x[:, piece.place : piece.place + piece.size].add_(rows[:, piece.begin : piece.end])
                continue
            gradients = (g for g, _ in piece.views(rows, piece.begin))
            for (mine, owed), g in zip(piece.views(x, piece.place), gradients, strict=True):
                torch.add(g, owed, out=mine)
        return x

    def as_they_are(self, rows: Tensor) -> Tensor:
        """What is not compressed of all ranks' rows."""
        own = [rows[:, one.begin : one.end] for one in self.pieces if one.residual is None]
        return torch.cat(own, 1) if own else rows[:, :0]

    def deliver(self, out: Tensor, plain: Tensor, averaged: Tensor) -> None:
        """This rank's averaged row, where FSDP wants it."""
        for piece in self.pieces:
            row = plain if piece.residual is None else averaged
            out[piece.begin : piece.end] = row[piece.place : piece.place + piece.size]

    def commit(self) -> None:
        """The step is applied: this is owed now."""
        if self.ahead is not None:
            for piece in self.pieces:
                for mine, owed in piece.views(self.ahead, piece.place):
                    owed.copy_(mine)
        self.ahead = None

    def _accumulators(self, like: Tensor) -> Tensor:
        """Memory for them. A CPU keeps it for the next step: new pages cost more than copies."""
        if self._memory is not None:
            return self._memory
        wide = torch.promote_types(like.dtype, torch.float32)
        x = torch.zeros(self.ranks, self.width, dtype=wide, device=like.device)
        if x.device.type == "cpu":
            self._memory = x
        return x


def part_of(p: Tensor, dim: int, ranks: int) -> int:
    """Elements of a rank's part of ``p`` that FSDP cuts along ``dim``, the longest rank's."""
    if not p.numel():
        return 0
    return -(-p.shape[dim] // ranks) * (p.numel() // p.shape[dim])


def same_options(groups: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The options by which all of these groups' tensors are compressed.

    Raises ValueError where they differ.
    """
    first, *others = groups
    for name in names:
        for other in others:
            if other[name] != first[name]:
                raise ValueError(
                    f"{name} is {first[name]!r} and {other[name]!r} for parameters that one "
                    "fully_shard averages together: give them the same, or put them into "
                    "modules that are sharded apart."
                )
    return first
