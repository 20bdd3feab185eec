"""What TAGC sends of a reduce-scatter of FSDP: a row for the owner of each shard.

A row begins with what is not compressed; then come the accumulators: all of them, or coded what is
at the union. What is not finite is among the largest, so it arrives, and the step is skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._sparse.codes import CODES, Code
from .._sparse.union import Union
from .._state.bits import ones_at
from .._wire.payload import float_dtype
from .parcels import Parcel


class Everything:
    """All accumulators ``x`` as they are: a dense step."""

    exact = False  # it must travel in float32 at least

    def __init__(self, parcel: Parcel, x: Tensor):
        self.parcel, self.x = parcel, x
        # what rounding takes off them
        self.dropped: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """How many numbers go to each rank for its accumulators."""
        return [self.parcel.width] * self.parcel.ranks

    @property
    def sizes(self) -> list[int]:
        """How many numbers go to each rank."""
        return [self.parcel.plain + n for n in self.lengths]

    @property
    def counts(self) -> tuple[int | None, int]:
        """Accumulators sent, None for all; leftovers of a sketch."""
        return None, 0

    def message(self, plain: Tensor, given: torch.dtype) -> Tensor:
        """All rows. ``given``: the dtype in which FSDP would send them."""
        exact, begin = self.x.new_empty(sum(self.sizes)), self.parcel.plain
        rows = exact.split(self.sizes)
        for row, own in zip(rows, plain, strict=True):
            row[:begin] = own
        self.write([row[begin:] for row in rows])
        dtype = float_dtype(self.parcel.group["payload_dtype"]) or given
        if self.exact or self.parcel.exact:
            dtype = torch.promote_types(given, torch.float32)
        sent = exact.to(dtype)
        if torch.promote_types(dtype, exact.dtype) != dtype:
            exact.sub_(sent)
            self.dropped = torch.cat([row[begin:] for row in rows])
        return sent

    def write(self, parts: list[Tensor]) -> None:
        """The accumulators, for each owner."""
        for part, own in zip(parts, self.x, strict=True):
            part.copy_(own)

    def decode(self, mean: Tensor) -> Tensor:
        """This rank's averaged row of accumulators."""
        return mean

    def hold_back(self) -> None:
        """What is sent is owed no more, but for what rounding took off it."""
        if self.dropped is None:
            self.x.zero_()
        else:
            self.x.copy_(self.dropped.view(self.x.shape))


class AtUnion(Everything):
    """What line 2 has ``left``, coded at the index of all that any rank has left.

    Both are positions among all accumulators; ``bits`` has those of ``left`` set that are not 0.
    """

    def __init__(self, parcel: Parcel, x: Tensor, left: Tensor, bits: Tensor, union: Union):
        super().__init__(parcel, x)
        h = parcel.group
        seed = 1_000_003 * h["step"] + parcel.length  # alike on all ranks, another in every step
        code, ratio = CODES[h["codec"]], h["sketch_ratio"]
        self.code: Code = code(parcel.shards, union.index, union.counts, ratio, seed)
        self.own = union.own_index(parcel.shards)
        self.exact, self.left, self.bits = self.code.exact, left, bits

    @property
    def lengths(self) -> list[int]:
        return self.code.sizes

    @property
    def counts(self) -> tuple[int | None, int]:
        return len(self.code.index), self.code.leftovers

    def write(self, parts: list[Tensor]) -> None:
        values = self.x.view(-1).index_select(0, self.code.index)
        # 0 at what only others have left
        self.code.fill(parts, values.mul_(ones_at(self.bits, self.code.index)))

    def decode(self, mean: Tensor) -> Tensor:
        values = self.code.decode(mean).to(self.x.dtype)
        return self.x.new_zeros(self.parcel.width).index_copy_(0, self.own, values)

    def hold_back(self) -> None:
        x = self.x.view(-1).index_fill_(0, self.left, 0)
        if self.dropped is not None:  # at what only others have left that is 0
            x.index_add_(0, self.code.index, self.dropped)
