"""Reducers: what is sent for a bucket, and how the average is read back.

A reducer encodes this rank's gradients and residuals, exchanges what it has encoded, decodes the
average, and feeds back into the residuals what was not sent. It is used wherever gradients are
averaged: under DistributedDataParallel, with sharded state, and inside FSDP2. What is done with the
average is an update's business.

Where the bucket is cut into shards a reducer may send each rank only what that rank owns; the
average is then this rank's part of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._ops.norms import finite_marks, squared_norm, stacked_squared_norms
from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._state.masks import Mask
from .._wire.payload import Payload, PayloadDtype
from .._wire.requests import AllReduceMean, ReduceScatterMean, RequestGenerator


class Reducer(Protocol):
    """Averages the gradients of one bucket, once."""

    @property
    def phase(self) -> str:
        """The name that ``stats`` give a step that sends this."""

    def reduce(self) -> RequestGenerator[Payload]:
        """Encode, exchange and decode. Returns the averaged message, whose header says which
        gradients there are.
        """

    def read_owned_parts(self, dtype: torch.dtype) -> Iterable[Tensor]:
        """The averaged gradient of what this rank owns of every tensor, as vectors."""

    def feed_back(self, present: list[bool]) -> None:
        """Replace the bucket's residuals by what was not sent of gradient and residual; of tensors
        that are not ``present`` they stay.
        """

    def next_state(self, i: int) -> dict[str, Tensor]:
        """Return the other new state of tensor i if the step is applied, by name."""


class ShardReducer(Reducer, Protocol):
    """A reducer whose average can be clipped before a sharded update reads it."""

    def squared_norm(self) -> Tensor:
        """Return this rank's share of |G|^2: the sum over ranks is that of the whole average."""

    def clip(self, factor: float) -> None:
        """Scale the average by ``factor``, which is at most 1."""

    def read_owned_parts(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return vectors that stay valid until the end of the step."""


class ReduceScatterReducer:
    """Sends gradients whole, with the residuals of those that have any; each rank gets its shard.

    A residual is then what rounding to the payload's dtype has taken off.
    """

    def __init__(self, bucket: Bucket, ops: Ops):
        self.bucket, self.ops, self.layout = bucket, ops, bucket.shards
        self.grads = bucket.grads()
        self.sent_whole = list(range(len(self.grads)))
        self.sends_residuals = bucket.has_residual
        self.values: list[Tensor] = []  # the average, once it is there

    @property
    def phase(self) -> str:
        return "rounded" if self.bucket.is_rounded else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        like = torch.empty(0, dtype=self.bucket.compute_dtype, device=self.bucket.device)
        flat = self.pack_rows(finite_marks(self.grads, like))
        self.write_whole_tensors()
        mean = yield from self.exchange(flat)
        self.values = list(mean.parts)
        return mean

    def squared_norm(self) -> Tensor:
        """Return |G|^2 of this rank's shard; on a device one number for each tensor."""
        if self.bucket.device.type != "cpu":
            values = [part for part in self.values if part.numel()]
            return stacked_squared_norms(values or self.values[:1])
        first, *others = map(squared_norm, self.values)
        return sum(others, first)

    def clip(self, factor: float) -> None:
        if factor < 1:
            torch._foreach_mul_(self.values, factor)

    def read_owned_parts(self, dtype: torch.dtype) -> list[Tensor]:
        return [part.to(dtype) for part in self.values]

    def feed_back(self, present: list[bool]) -> None:
        bucket, rounds = self.bucket, self.rows[0].dropped is not None
        for part, i in enumerate(self.sent_whole):
            e = bucket.state["residual"][i]
            if e is None or not present[i]:
                continue
            if rounds:
                e.view(-1).copy_(torch.cat([row.dropped_parts[part] for row in self.rows]))
            elif bucket.has_residual:
                e.zero_()
        bucket.cache["has_residual"] = rounds or (bucket.has_residual and not all(present))

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {}

    # A row for every owner

    @property
    def payload_dtype(self) -> PayloadDtype:
        dtype: PayloadDtype = self.bucket.group["payload_dtype"]
        return dtype

    def pack_rows(self, marks: Tensor, encoded_sizes: Sequence[int] = ()) -> Tensor:
        """Make a row for every rank, of what it owns of tensors that are sent whole, then
        ``encoded_sizes[rank]`` numbers. Returns the memory they lie in.
        """
        ranks = range(self.layout.ranks)
        sizes = [self.layout.sizes(rank) for rank in ranks]
        lengths = [[sizes[rank][i] for i in self.sent_whole] for rank in ranks]
        for rank_lengths, size in zip(lengths, encoded_sizes, strict=False):
            rank_lengths.append(size)
        self.rows, flat = self.bucket.make_payloads(lengths, self.payload_dtype)
        torch._foreach_copy_([row.header for row in self.rows], [marks] * len(self.rows))
        return flat

    def write_whole_tensors(self) -> None:
        """Into each row its rank's elements of the tensors that are sent whole."""
        residual = self.bucket.state["residual"]
        flat = [None if g is None else g.reshape(-1) for g in self.grads]
        absent, to, grads, with_residual, residuals = [], [], [], [], []
        for rank, row in enumerate(self.rows):
            for part, i in zip(row.unrounded_parts, self.sent_whole, strict=False):
                if not part.numel():
                    continue
                g, e, owned = flat[i], residual[i], slice(*self.layout.ranges[rank][i])
                if g is None:
                    absent.append(part)
                else:
                    to.append(part)
                    grads.append(g[owned])
                if self.sends_residuals and e is not None:
                    with_residual.append(part)
                    residuals.append(e.reshape(-1)[owned])
        if absent:
            torch._foreach_zero_(absent)
        if to:
            torch._foreach_copy_(to, grads)
        if with_residual:
            torch._foreach_add_(with_residual, residuals)

    def exchange(self, flat: Tensor) -> RequestGenerator[Payload]:
        """Round the rows, send each to its owner; returns the mean of this rank's."""
        for row in self.rows:
            row.round()
        sizes = [row.flat.numel() for row in self.rows]
        received = yield ReduceScatterMean(flat, sizes)
        return self.rows[self.layout.rank].over(received)


class AllReduceReducer:
    """Sends gradients plus residuals on a mask that all ranks know, by one all-reduce.

    Every rank receives the whole average, and reads its shard of it where state is sharded.
    """

    def __init__(self, bucket: Bucket, ops: Ops, mask: Mask):
        self.bucket, self.ops, self.mask = bucket, ops, mask
        self.grads = bucket.grads()
        self.residual: list[Tensor | None] = [*bucket.state["residual"]]
        self.is_whole = all(positions is None for positions in mask.positions)
        self.sends_residuals = bucket.is_rounded or bucket.has_residual

    @property
    def phase(self) -> str:
        if not self.is_whole:
            return "sparse"
        return "rounded" if self.bucket.is_rounded else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        add = self.residual if self.sends_residuals else None
        sent = self.ops.encode(self.bucket, self.grads, self.mask, add)
        mean: Payload = yield AllReduceMean(sent)
        self.mean = mean
        return mean

    def average(self, i: int, like: Tensor) -> Tensor:
        """Return the averaged gradient of tensor i, like ``like``; valid until the next call."""
        return self.ops.decode(self.mean.parts[i], self.mask.positions[i], like)

    def squared_norm(self) -> Tensor:
        return squared_norm(self.mean.body) / self.bucket.shards.ranks

    def clip(self, factor: float) -> None:
        if factor < 1:
            self.mean.body.mul_(factor)

    def read_owned_parts(self, dtype: torch.dtype) -> Sequence[Tensor]:
        shards, lengths = self.bucket.shards, self.bucket.lengths
        sizes = shards.sizes(shards.rank)
        memory = self.bucket.get_memory("average", sum(sizes), dtype)
        parts: Sequence[Tensor] = memory.split(sizes)
        for i, (part, (start, stop)) in enumerate(zip(parts, shards.own_ranges, strict=True)):
            like = memory.new_empty(1).expand(lengths[i])
            part.copy_(self.average(i, like)[start:stop])
        return parts

    def feed_back(self, present: list[bool]) -> None:
        mean, rounds = self.mean, self.mean.dropped is not None
        for i, (e, is_present) in enumerate(zip(self.residual, present, strict=True)):
            if e is None or not is_present:
                continue
            g, at = self.grads[i], self.mask.positions[i]
            if g is not None and at is not None:
                e.add_(g)
            if rounds:
                self.ops.write_at(e, at, mean.dropped_parts[i])
            elif at is not None:
                self.ops.clear_at(e, at)
            else:
                e.zero_()
        remains = rounds or not self.is_whole
        self.bucket.cache["has_residual"] = remains or (self.sends_residuals and not all(present))

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {}
