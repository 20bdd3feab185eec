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

from .._ops.norms import gradient_marks, squared_norm, stacked_squared_norms
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

    def feed_back(self, have_gradients: list[bool]) -> None:
        """Set the residual of every tensor with a gradient on any rank (``have_gradients``) to the
        part of gradient plus residual that was not sent. The other residuals stay.
        """

    def next_state(self, i: int) -> dict[str, Tensor]:
        """Return state of tensor i beside its residual, by name: the values to commit if the step
        is applied.
        """


class ShardReducer(Reducer, Protocol):
    """A reducer whose average can be clipped before a sharded update reads it."""

    def squared_norm(self) -> Tensor:
        """Return this rank's share of |G|^2: the sum over ranks is that of the whole average."""

    def clip(self, factor: float) -> None:
        """Scale the average by ``factor``, which is at most 1."""

    def read_owned_parts(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return vectors that stay valid until the end of the step."""


class ReduceScatterReducer:
    """Sends gradients dense, with the residuals of those that have any; each rank gets its shard.

    A residual is then what rounding to the payload's dtype has taken off. ``sent_dense``: the
    indices of the tensors that are sent, by default of all. ``sends_residuals``: whether their
    residuals are sent too, by default where there are some.
    """

    def __init__(
        self,
        bucket: Bucket,
        ops: Ops,
        sent_dense: list[int] | None = None,
        sends_residuals: bool | None = None,
    ):
        self.bucket, self.ops, self.layout = bucket, ops, bucket.shards
        self.grads = bucket.grads()
        self.sent_dense = [*range(len(self.grads))] if sent_dense is None else sent_dense
        self.sends_residuals = bucket.has_residual if sends_residuals is None else sends_residuals
        self.values: list[Tensor] = []  # the average, once it is there

    @property
    def phase(self) -> str:
        return "rounded" if self.bucket.is_rounded else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        like = torch.empty(0, dtype=self.bucket.compute_dtype, device=self.bucket.device)
        flat = self.make_owner_payloads(gradient_marks(self.grads, like))
        self.write_dense_tensors()
        mean = yield from self.exchange(flat)
        self.values = list(mean.parts)
        return mean

    def squared_norm(self) -> Tensor:
        """Return |G|^2 of this rank's shard, one number for each tensor."""
        values = [part for part in self.values if part.numel()]
        return stacked_squared_norms(values or self.values[:1])

    def clip(self, factor: float) -> None:
        if factor < 1:
            torch._foreach_mul_(self.values, factor)

    def read_owned_parts(self, dtype: torch.dtype) -> list[Tensor]:
        return [part.to(dtype) for part in self.values]

    def feed_back(self, have_gradients: list[bool]) -> None:
        bucket, is_rounded = self.bucket, self.owner_payloads[0].rounding_errors is not None
        for part, i in enumerate(self.sent_dense):
            e = bucket.state["residual"][i]
            if e is None or not have_gradients[i]:
                continue
            if is_rounded:
                errors = [payload.rounding_error_parts[part] for payload in self.owner_payloads]
                e.view(-1).copy_(torch.cat(errors))
            elif bucket.has_residual:
                e.zero_()
        bucket.cache["has_residual"] = is_rounded or (
            bucket.has_residual and not all(have_gradients)
        )

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {}

    # A payload for every owner

    @property
    def payload_dtype(self) -> PayloadDtype:
        dtype: PayloadDtype = self.bucket.group["payload_dtype"]
        return dtype

    def make_owner_payloads(self, marks: Tensor, encoded_sizes: Sequence[int] = ()) -> Tensor:
        """Make a payload for every owner, of what it owns of tensors that are sent dense, then
        ``encoded_sizes[rank]`` numbers. Returns the memory that they share.
        """
        ranks = range(self.layout.ranks)
        sizes = [self.layout.sizes(rank) for rank in ranks]
        lengths = [[sizes[rank][i] for i in self.sent_dense] for rank in ranks]
        for rank_lengths, size in zip(lengths, encoded_sizes, strict=False):
            rank_lengths.append(size)
        self.owner_payloads, flat = self.bucket.make_payloads(lengths, self.payload_dtype)
        headers = [payload.header for payload in self.owner_payloads]
        torch._foreach_copy_(headers, [marks] * len(headers))
        return flat

    def write_dense_tensors(self) -> None:
        """Write to each owner's payload its elements of the tensors that are sent dense."""
        residual = self.bucket.state["residual"]
        flat = [None if g is None else g.reshape(-1) for g in self.grads]
        absent, to, grads, with_residual, residuals = [], [], [], [], []
        for rank, payload in enumerate(self.owner_payloads):
            for part, i in zip(payload.unrounded_parts, self.sent_dense, strict=False):
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
        """Round the payloads, and send each to its owner. Returns the mean of this rank's."""
        for payload in self.owner_payloads:
            payload.round()
        sizes = [payload.flat.numel() for payload in self.owner_payloads]
        received = yield ReduceScatterMean(flat, sizes)
        return self.owner_payloads[self.layout.rank].with_flat(received)


class AllReduceReducer:
    """Sends gradients plus residuals on a mask that all ranks know, by one all-reduce.

    Every rank receives the whole average, and reads its shard of it where state is sharded.
    """

    def __init__(self, bucket: Bucket, ops: Ops, mask: Mask):
        self.bucket, self.ops, self.mask = bucket, ops, mask
        self.grads = bucket.grads()
        self.residual: list[Tensor | None] = [*bucket.state["residual"]]
        self.selects_all = all(positions is None for positions in mask.positions)
        self.sends_residuals = bucket.is_rounded or bucket.has_residual

    @property
    def phase(self) -> str:
        if not self.selects_all:
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

    def feed_back(self, have_gradients: list[bool]) -> None:
        mean, is_rounded = self.mean, self.mean.rounding_errors is not None
        for i, (e, has_gradient) in enumerate(zip(self.residual, have_gradients, strict=True)):
            if e is None or not has_gradient:
                continue
            g, at = self.grads[i], self.mask.positions[i]
            if g is not None and at is not None:
                e.add_(g)
            if is_rounded:
                self.ops.write_at(e, at, mean.rounding_error_parts[i])
            elif at is not None:
                self.ops.clear_at(e, at)
            else:
                e.zero_()
        remains = is_rounded or not self.selects_all
        self.bucket.cache["has_residual"] = remains or (
            self.sends_residuals and not all(have_gradients)
        )

    def next_state(self, i: int) -> dict[str, Tensor]:
        return {}
