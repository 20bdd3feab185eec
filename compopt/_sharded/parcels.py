"""What one reduce-scatter of FSDP averages, as TAGC sees it.

What is compressed of a row is copied into a row of *accumulators*, of whole words of the mask; all
else is sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._engine.when import start_of
from .._state.fsdp_rows import FsdpRows
from .._state.masks import WORD
from .._state.shards import Shards


class Parcel(FsdpRows):
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
        super().__init__(given, rank, ranks)
        self.group = group
        self.width = self.compressed + -self.compressed % (8 * WORD)  # of a row of accumulators
        self.shards = Shards([self.width] * ranks, [True] * ranks, rank, ranks)
        # compressed elements in each rank's row
        self.counts = [sum(one.filled(r, ranks) for one in self.to_compress) for r in range(ranks)]
        # accumulators as they will be where the step is applied: line 2's
        self.ahead: Tensor | None = None
        self.sent: tuple[int | None, int] = None, 0  # at the union of the last step, and leftovers
        self.cache: dict[str, Any] = {}  # what follows from ``shards``
        self._memory: Tensor | None = None

    @property
    def phase(self) -> str:
        return "sparse" if self.sparsifies else "dense"

    @property
    def count(self) -> tuple[int, int | None, int]:
        """Elements compressed, sent of these in the last step (None: all), leftovers."""
        return sum(self.counts), *self.sent

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
        for piece in self.to_compress:
            if x is self.ahead:
                x[:, piece.place : piece.place + piece.size].add_(rows[:, piece.begin : piece.end])
                continue
            gradients = (g for g, _ in piece.views(rows, piece.begin))
            for (mine, owed), g in zip(piece.views(x, piece.place), gradients, strict=True):
                torch.add(g, owed, out=mine)
        return x

    def deliver(self, out: Tensor, plain: Tensor, averaged: Tensor) -> None:
        """This rank's averaged row, where FSDP wants it."""
        for piece in self.pieces:
            row = plain if piece.residual is None else averaged
            out[piece.begin : piece.end] = row[piece.place : piece.place + piece.size]

    def commit(self, norm: float) -> None:
        """The step is applied: this is owed now."""
        if self.ahead is not None:
            for piece in self.pieces:
                for mine, owed in piece.views(self.ahead, piece.place):
                    owed.copy_(mine)

    def drop(self) -> None:
        """The step has ended: what was not applied is not owed."""
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
