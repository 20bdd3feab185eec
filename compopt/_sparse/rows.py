"""What TAGC sends of a bucket: a row for the owner of each shard. Everything as it is, or coded."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.norms import finite_marks
from .._ops.operations import Ops
from .._state.bits import per_tensor
from .._state.buckets import Bucket
from .._wire.payload import Payload, PayloadDtype
from .at_once import hold_back_at_once
from .averaged import Average, Scattered
from .codes import CODES, Code
from .sparsify import Left
from .union import Union


class Rows:
    """All gradients as they are, and of compressed tensors what is owed: a dense step."""

    phase = "dense"

    def __init__(self, bucket: Bucket, ops: Ops):
        self.bucket, self.ops, self.shards = bucket, ops, bucket.shards
        self.grads = bucket.grads()
        self.whole = list(range(len(self.grads)))  # the tensors that are sent as they are

    def pack(self) -> None:
        """Make the rows, and the memory they lie in."""
        lengths = [self.lengths(rank) for rank in range(self.shards.ranks)]
        self.rows, self.flat = self.bucket.payloads(lengths, self.dtype)
        marks = self.marks()
        torch._foreach_copy_([row.header for row in self.rows], [marks] * len(self.rows))
        self.write()
        self.write_code()
        for row in self.rows:
            row.round()

    @property
    def dtype(self) -> PayloadDtype:
        """On the wire."""
        dtype: PayloadDtype = self.bucket.group["payload_dtype"]
        return dtype

    def lengths(self, rank: int) -> list[int]:
        """How many numbers of each tensor go to ``rank``."""
        sizes = self.shards.sizes(rank)
        return [sizes[i] for i in self.whole]

    def marks(self) -> Tensor:
        """Of all gradients: finite or not."""
        return finite_marks(self.grads, self.flat)

    def write(self) -> None:
        """Of the tensors that are sent as they are the elements that each rank owns."""
        bucket, ranges = self.bucket, self.shards.ranges
        flat = [None if g is None else g.reshape(-1) for g in self.grads]
        empty, given, grads, owing, owed = [], [], [], [], []
        for rank, row in enumerate(self.rows):
            for part, i in zip(row.exact, self.whole, strict=False):
                g, own = flat[i], slice(*ranges[rank][i])
                if not part.numel():
                    continue
                if g is None:
                    empty.append(part)
                else:
                    given.append(part)
                    grads.append(g[own])
                if bucket.owes and bucket.compressed[i]:  # the dense start was taken up again
                    owing.append(part)
                    owed.append(bucket.state["residual"][i].reshape(-1)[own])
        if empty:
            torch._foreach_zero_(empty)
        if given:
            torch._foreach_copy_(given, grads)
        if owing:
            torch._foreach_add_(owing, owed)

    def write_code(self) -> None:
        """Nothing is coded."""

    @property
    def sizes(self) -> list[int]:
        """Numbers in each row, with its header."""
        return [row.flat.numel() for row in self.rows]

    def mean(self, row: Tensor) -> Payload:
        """What has arrived for this rank's shard."""
        return self.rows[self.shards.rank].over(row)

    def decode(self, mean: Payload) -> Average:
        """The averaged gradient of this rank's part of every tensor."""
        return Average([(part, None) for part in mean.parts])

    def hold_back(self, present: list[bool]) -> None:
        """What was held back has been sent, but for what rounding took off it."""
        bucket, rounds = self.bucket, self.rows[0].dropped is not None
        compressed = [i for i, c in enumerate(bucket.compressed) if c and present[i]]
        for i in compressed:
            acc = bucket.state["residual"][i].view(-1)
            if rounds:
                acc.copy_(torch.cat([row.dropped_parts[i] for row in self.rows]))
            elif bucket.owes:
                acc.zero_()
        bucket.cache["owes"] = rounds or (bucket.owes and not all(present))
        bucket.cache["counts"] = None, 0


class CodedRows(Rows):
    """Of compressed tensors what line 2 has left, coded; all others as they are."""

    phase = "sparse"

    def __init__(self, bucket: Bucket, ops: Ops, left: Left, union: Union):
        super().__init__(bucket, ops)
        h = bucket.group
        seed = 1_000_003 * h["step"] + bucket.index  # drawn anew for every bucket and step
        self.left, self.union = left, union
        code, ratio = CODES[h["codec"]], h["sketch_ratio"]
        self.code: Code = code(self.shards, union.index, union.counts, ratio, seed)
        self.whole = [i for i in self.whole if not bucket.compressed[i]]

    @property
    def dtype(self) -> PayloadDtype:
        exact = torch.promote_types(self.bucket.dtype, torch.float32)
        return exact if self.code.exact else super().dtype

    def lengths(self, rank: int) -> list[int]:
        return [*super().lengths(rank), self.code.sizes[rank]]

    def marks(self) -> Tensor:
        return self.left.marks

    def write_code(self) -> None:
        """Line 5: this rank's values at the index, 0 at what only others have left."""
        left, index = self.left, self.code.index
        residual, size = self.bucket.flat["residual"], 8 * self.shards.offsets[-1]
        own = self.ops.scratch(residual, size, use="x")
        own.index_fill_(0, index, 0)
        own.scatter_(0, left.positions, left.values)
        self.code.fill([row.exact[-1] for row in self.rows], own.index_select(0, index))

    def decode(self, mean: Payload) -> Average:
        """Line 10."""
        *whole, coded = mean.parts
        coded, parts = self.code.decode(coded), iter(whole)
        if self.union.own is not None:
            values = iter(coded.split(self.union.own))
            chosen = self.bucket.compressed
            begin, end = self.shards.own_bits
            tensors = [next(values) if c else next(parts) for c in chosen]
            index, spans = self.union.own_index(self.shards), self.shards.own_spans
            return Scattered(tensors, coded, index, spans, end - begin)
        at = self.shards.in_own_parts(self.code.index)
        values = iter(coded.split([len(own) for own in at if own is not None]))
        return Average([(next(parts), None) if own is None else (next(values), own) for own in at])

    def hold_back(self, present: list[bool]) -> None:
        """Line 2: the accumulator is what was zeroed, and what rounding took off what was sent."""
        bucket, residual = self.bucket, self.bucket.state["residual"]
        bucket.cache["owes"] = True
        bucket.cache["counts"] = len(self.code.index), self.code.leftovers
        if bucket.device.type != "cpu":
            rest = None if self.rows[0].dropped is None else self.rest()
            hold_back_at_once(bucket, self.ops, self.grads, self.left.positions, rest, present)
            return
        index = per_tensor(self.left.positions, bucket.compressed_lengths)
        sent = {i: at.long() for i, at in enumerate(index) if at is not None}
        dropped = self.rest().split([len(at) for at in sent.values()])
        for (i, at), rest in zip(sent.items(), dropped, strict=True):
            if not present[i]:
                continue
            g, acc = self.grads[i], residual[i]
            if g is not None:
                acc.add_(g)
            acc.view(-1).index_copy_(0, at, rest)

    def rest(self) -> Tensor:
        """What rounding took off what this rank has sent."""
        positions, residual = self.left.positions, self.bucket.flat["residual"]
        if self.rows[0].dropped is None:
            return residual.new_zeros(len(positions))
        at_index = torch.cat([row.dropped_parts[-1] for row in self.rows])
        # what is 0 was not sent, and need not be at the index
        x = self.ops.scratch(residual, 8 * self.shards.offsets[-1], use="x")
        x.index_fill_(0, positions, 0)
        return x.index_copy_(0, self.code.index, at_index).index_select(0, positions)
