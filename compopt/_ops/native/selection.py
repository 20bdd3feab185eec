"""What a rank selects of a bucket, by the C passes: the counterpart of ``selection.Selection`` for
all its tensors.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.deal import Deal, Part, code_of
from ..._state.masks import Mask, Tensors, bits_by_tensor
from ..._wire.requests import CommunicationError
from ..moment import own_x
from ..ops import Ops
from .tables import Table, addresses, along, at, plain

# The end of scape.c's struct: where to look for the largest, among what, how many, into where.
CHOICE = ("guess", "start", "stop", "wanted", "chosen")


class SelectionPasses(Ops):
    """What of ``Ops`` is selecting the largest."""

    library: ctypes.CDLL

    def largest_of(self, x: Tensor, k: int) -> Tensor | None:
        if not plain(x) or x.numel() >= 2**31:
            return None
        out = torch.empty(k, dtype=torch.int32)
        self.largest(x, k, 0.0, out)
        return out.long()

    def largest(self, x: Tensor, k: int, guess: float, out: Tensor) -> float:
        """The positions of the k largest |x|, ascending, into int32 ``out``; returns a guess for
        next time.
        """
        room = 2 * self.library.room_for(k)
        memory = self.scratch(x, room, torch.int32, "candidates")
        scratch = at("candidates", memory, room, torch.int32)
        found, values = at("positions", out, k, torch.int32), at("what is selected", x, k)
        again: float = self.library.largest(values, x.numel(), k, guess, scratch, found)
        return again

    def top_k(self, score: Tensor, k: int) -> Tensor:
        """The packed mask of the k elements of largest magnitude."""
        if not plain(score) or score.numel() >= 2**31:
            return super().top_k(score, k)
        found, bits = (
            torch.empty(k, dtype=torch.int32),
            torch.zeros((score.numel() + 7) // 8, dtype=torch.uint8),
        )
        self.largest(score, k, 0.0, found)
        chosen = Table(1, chosen=at("positions", found, k, torch.int32), k=k, at=0)
        self.library.encode(chosen, 1, None, at("a mask", bits, len(bits), torch.uint8), len(bits))
        return bits


class NativeSelection:
    """What this rank selects in one step: exactly as many as are wanted, so that all sizes are
    known beforehand.
    """

    def __init__(self, bucket: Bucket, ops: SelectionPasses, deal: Deal, rank: int):
        self.bucket, self.ops, self.deal = bucket, ops, deal
        self.part: Part = deal.parts[rank]
        self.pieces = {piece.tensor: piece for piece in self.part.pieces}
        self.room, total, self.first = 0, 0, {}  # where a tensor's positions begin among all
        for piece in self.part.pieces:
            self.first[piece.tensor], total = total, total + piece.wanted
            self.room = max(self.room, 2 * ops.library.room_for(piece.wanted))
        self.positions = torch.empty(total, dtype=torch.int32)

    def columns(self, present: list[bool]) -> dict[str, list[int]]:
        """The end of a commit's table."""
        thresholds, none = self.bucket.state["threshold"], (0,) * len(CHOICE)
        guesses = addresses("thresholds", thresholds, [1] * len(thresholds), torch.float64)
        chosen = dict(zip(self.pieces, self.columns_of(self.positions), strict=True))
        rows = [
            (guesses[i], piece.start, piece.stop, piece.wanted, chosen[i])
            if here and (piece := self.pieces.get(i))
            else none
            for i, here in enumerate(present)
        ]
        return {name: list(column) for name, *column in zip(CHOICE, *rows, strict=True)}

    def columns_of(self, positions: Tensor) -> list[int]:
        """Where each piece's positions are among these of all, counted from the first element of
        the piece.
        """
        return along(
            "positions", positions, [piece.wanted for piece in self.part.pieces], torch.int32
        )

    def take(self, grads: Tensors) -> None:
        """Select by line 10's x of this step, before anything is written."""
        for i in self.pieces:
            self.take_one(i, grads[i])

    def take_one(self, i: int, g: Tensor | None) -> None:
        if i in self.pieces:
            piece, first = self.pieces[i], self.first[i]
            out = self.positions[first : first + piece.wanted]
            self.ops.largest(own_x(self.bucket, i, piece, g), piece.wanted, 0.0, out)

    def message(self) -> Tensor:
        """This rank's bits, coded where codes are smaller."""
        pieces = self.part.pieces
        message = self.bucket.memory("mask message", self.deal.length, torch.uint8).zero_()
        table = Table(
            len(pieces),
            chosen=self.columns_of(self.positions),
            k=[piece.wanted for piece in pieces],
            at=[piece.at for piece in pieces],
        )
        code = range_of(self.part) if self.deal.coded else None
        room = at("a mask", message, self.deal.length, torch.uint8)
        if self.ops.library.encode(table, len(pieces), code, room, self.deal.length) >= 0:
            raise RuntimeError(
                "positions that were selected are not within their tensor: memory is at fault."
            )
        return message

    def settle(self) -> None:
        """Where to look the next time has been noted by the pass that selected."""

    def found(self, messages: Tensor) -> Mask:
        """All ranks' selections.

        Raises CommunicationError where a rank selected what was not agreed.
        """
        bucket, parts = self.bucket, self.deal.parts
        sizes = [0] * len(bucket.lengths)
        for piece in (piece for part in parts for piece in part.pieces):
            sizes[piece.tensor] += piece.wanted
        positions = torch.empty(sum(sizes), dtype=torch.int32)
        bits = bucket.memory("mask bits", parts[-1].last, torch.uint8).zero_()
        first = 0
        for rank, (part, message) in enumerate(zip(parts, messages, strict=True)):
            wanted = sum(piece.wanted for piece in part.pieces)
            own = positions[first : first + wanted]
            self._read(rank, message, own, bits[part.first : part.last])
            first += wanted
        index = zip(positions.split(sizes), bucket.compressed, strict=True)
        ours = [p if compressed else None for p, compressed in index]
        return Mask(bucket, bits=bits_by_tensor(bucket, bits), positions=ours)

    def _read(self, rank: int, message: Tensor, found: Tensor, bits: Tensor) -> None:
        part, coded = self.deal.parts[rank], self.deal.coded
        if part is self.part and not coded:  # what it knows
            found.copy_(self.positions)
            bits.copy_(message[: len(bits)])
            for piece in part.pieces[:1]:  # only the first of a part can begin within a tensor
                found[: piece.wanted] += piece.start
            return
        wanted = [piece.wanted for piece in part.pieces]
        table = Table(
            len(wanted),
            found=along("positions", found, wanted, torch.int32),
            k=wanted,
            at=[piece.at for piece in part.pieces],
            start=[piece.start for piece in part.pieces],
            stop=[piece.stop for piece in part.pieces],
        )
        code = range_of(part) if coded else None
        received = at(
            "a mask of another rank", message, self.deal.length if coded else len(bits), torch.uint8
        )
        own_bits = at("a mask", bits, part.last - part.first, torch.uint8)
        read = self.ops.library.decode(received, len(bits), code, table, len(wanted), own_bits)
        if read != len(found):
            raise CommunicationError(
                f"the mask of rank {rank} is not what was agreed: it has other positions than "
                f"{len(found)} in their order. Memory or the network is at fault."
            )


def range_of(part: Part) -> Table:
    """How a part is coded, as masks.c reads it."""
    upper, row, low = code_of(part)
    return Table(1, low=low, upper=upper, row=row)
