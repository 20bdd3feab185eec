"""What one reduce-scatter of FSDP averages, as TAGC sees it.

What is compressed of a row is copied into a row of *accumulators*, of whole words of the mask; all
else is sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._engine.inside import Held, Unsent
from .._engine.when import start_of
from .._state.bits import WORD
from .._state.fsdp_rows import FsdpRows
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
        # some were unfrozen since the last step: nothing would hold back what rounding takes off
        self.exact = False
        self.width = self.compressed + -self.compressed % (8 * WORD)  # of a row of accumulators
        self.shards = Shards([self.width] * ranks, [True] * ranks, rank, ranks)
        # compressed elements in each rank's row
        self.counts = [sum(one.filled(r, ranks) for one in self.to_compress) for r in range(ranks)]
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

    def add_up(self, rows: Tensor, held: Held) -> Tensor:
        """Line 1, of all ranks' rows; what an earlier backward of this step holds back is not sent
        twice.
        """
        x = self._accumulators(rows)
        for piece in self.to_compress:
            gradients = (g for g, _ in piece.views(rows, piece.begin))
            for (mine, owed), g in zip(piece.views(x, piece.place), gradients, strict=True):
                if piece.p in held:
                    mine.copy_(g)
                else:
                    torch.add(g, owed, out=mine)
        return x

    def deliver(self, out: Tensor, plain: Tensor, averaged: Tensor) -> None:
        """This rank's averaged row, where FSDP wants it."""
        for piece in self.pieces:
            row = plain if piece.residual is None else averaged
            out[piece.begin : piece.end] = row[piece.place : piece.place + piece.size]

    def note_unsent(self, x: Tensor, held: Held) -> None:
        """Note what remains of accumulators ``x``."""
        for piece in self.to_compress:
            assert piece.residual is not None
            rest = torch.empty_like(piece.residual)
            parts = piece._replace(residual=rest).views(x, piece.place)
            for mine, own in parts:
                own.copy_(mine)
            if piece.p in held:
                held[piece.p].rest.add_(rest)
            else:
                held[piece.p] = Unsent(rest, piece.residual)

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
