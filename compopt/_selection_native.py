"""What a rank selects of a bucket, by the C passes: the counterpart of ``_selection.Selection`` for all its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ._buckets import Bucket
from ._masks import Deal, Part, code_of
from ._native import Table, at
from ._ops import Ops, Tensors
from ._selection import own_x


class NativeSelection:
    """What this rank selects in one step: exactly as many as are wanted, so that all sizes are known beforehand."""

    def __init__(self, bucket: Bucket, ops: Ops, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal = bucket, ops, deal
        self.part: Part = deal.parts[rank]
        self.pieces = {piece.tensor: piece for piece in self.part.pieces}
        self.room, total, self.first = 0, 0, {}  # where a tensor's positions begin among all
        for piece in self.part.pieces:
            self.first[piece.tensor], total = total, total + piece.wanted
            self.room = max(self.room, 2 * ops.library.room_for(piece.wanted))
        self.positions = torch.empty(total, dtype=torch.int32)

    def row(self, i: int) -> tuple[int, ...]:
        """The end of tensor i's row in the table of a commit: where to look, among what, how many, into where."""
        piece = self.pieces.get(i)
        if piece is None:
            return (0,) * 5
        return at(self.bucket.state["threshold"][i]), piece.start, piece.stop, piece.wanted, self.at(i)

    def at(self, i: int) -> int:
        """Where tensor i's positions are, counted from the first element of its piece."""
        return at(self.positions) + 4 * self.first[i]

    def take(self, grads: Tensors) -> None:
        """Select by line 10's x of this step, before anything is written."""
        for i in self.pieces:
            self.take_one(i, grads[i])

    def take_one(self, i: int, g: Tensor | None) -> None:
        if i in self.pieces:
            piece = self.pieces[i]
            self.ops.largest(own_x(self.bucket, i, piece, g), piece.wanted, 0.0, self.at(i))

    def message(self) -> Tensor:
        """This rank's bits, coded where codes are smaller."""
        message, coded, rows = torch.zeros(self.deal.length, dtype=torch.uint8), self.deal.coded, []
        for i, piece in self.pieces.items():
            rows += (self.at(i), piece.wanted, piece.at)
        code = range_of(self.part) if coded else None
        self.ops.library.encode(Table(rows), len(self.pieces), code, at(message))
        return message

    def found(self, messages: Tensor) -> tuple[Tensors, Tensor]:
        """All ranks' selections, as positions in each tensor and as the bucket's bits."""
        deal, library, bucket = self.deal, self.ops.library, self.bucket
        pieces = [piece for part in deal.parts for piece in part.pieces]
        sizes = [0] * len(bucket.lengths)
        for piece in pieces:
            sizes[piece.tensor] += piece.wanted
        positions, bits = (
            torch.empty(sum(sizes), dtype=torch.int32),
            torch.zeros(deal.parts[-1].last, dtype=torch.uint8),
        )
        many = [sum(piece.wanted for piece in part.pieces) for part in deal.parts]
        for part, found, message in zip(deal.parts, positions.split(many), messages, strict=True):
            if part is self.part and not deal.coded:  # what it knows
                found.copy_(self.positions)
                bits[part.first : part.last] = message[: part.last - part.first]
                for piece in part.pieces[:1]:  # only the first of a part can begin within a tensor
                    found[: piece.wanted] += piece.start
                continue
            rows, first = [], at(found)
            for piece in part.pieces:
                rows += (first, piece.wanted, piece.at, piece.start)
                first += 4 * piece.wanted
            code = range_of(part) if deal.coded else None
            library.decode(
                at(message), part.last - part.first, code, Table(rows), len(part.pieces), at(bits) + part.first
            )
        index = positions.split(sizes)
        return [i if c else None for i, c in zip(index, bucket.compressed, strict=True)], bits


def range_of(part: Part) -> Table:
    """How a part is coded, as masks.c reads it."""
    upper, row, low = code_of(part)
    return Table([low, upper, row])
