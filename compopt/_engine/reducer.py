"""Reducers: what is sent for a bucket, and how the average is read back. Updates: what is done with
it.

A reducer encodes this rank's gradients and residuals, exchanges what it has encoded, decodes the
average, and keeps in the residuals what was not sent. It is used wherever gradients are
averaged: under DistributedDataParallel, with sharded state, and inside FSDP2.

Where the bucket is cut into shards a reducer may send each rank only what that rank owns; the
average is then this rank's part of every tensor.

A generator writes averages to the update's memory (``memory_for``), and then calls ``apply``.
``AdamWUpdate`` and ``AdamSUpdate`` update the tensors there; ``bases.WrappedUpdate`` steps a torch
optimizer once per step, after all buckets have committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._ops.norms import scale_, scale_all_, squared_norm
from .._ops.operations import Ops, flag_gradients
from .._state.bucket import Bucket
from .._state.masks import Mask
from .._state.residuals import Residuals
from .._wire.payload import Payload, PayloadDtype
from .._wire.requests import AllReduceMean, Phase, ReduceScatterMean, RequestGenerator

# Updates: what is done with the average


class Update(Protocol):
    """An optimizer's update of some tensors of a bucket, by their ``indices``."""

    def memory_for(
        self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return the memory for the averages of these tensors, in their shapes.

        ``averages``: the memory that holds each already, if any; it may be returned.
        """

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        """Return memory for the averages of neighbours of one shape, as one tensor."""

    def apply(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        """Update tensors by their averages, which are in the memory for them."""


def write_averages(memory: list[Tensor], averages: Sequence[Tensor]) -> list[Tensor]:
    """Copy those averages to their memory that are elsewhere; return the memory."""
    pairs = [
        (to, average.view(to.shape))
        for to, average in zip(memory, averages, strict=True)
        if to.data_ptr() != average.data_ptr()
    ]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [average for _, average in pairs])
    return memory


class OwnUpdate:
    """An update whose moments are state of the bucket."""

    def memory_for(
        self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor | None]
    ) -> list[Tensor]:
        weights = bucket.weights
        pairs = [(weights[i], g) for i, g in zip(indices, averages, strict=True)]
        fits = [g is not None and g.dtype == w.dtype for w, g in pairs]
        sizes = [0 if fit else w.numel() for (w, _), fit in zip(pairs, fits, strict=True)]
        dtype, device = weights[0].dtype, weights[0].device
        new = bucket.scratch("average", sum(sizes), dtype, device).split(sizes)
        return [
            (g if g is not None and fit else part).view(w.shape)
            for (w, g), fit, part in zip(pairs, fits, new, strict=True)
        ]

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        w = bucket.weight(indices[0])
        size = len(indices) * w.numel()
        memory = bucket.scratch("average", size, w.dtype, w.device)
        return memory.view(len(indices), *w.shape)


class AdamWUpdate(OwnUpdate):
    """AdamW."""

    def __init__(self, ops: Ops):
        self.apply = ops.update_adamw


class AdamSUpdate(OwnUpdate):
    """AdamS."""

    def __init__(self, ops: Ops):
        self.apply = ops.update_adams


# Reducers


class Reducer(Protocol):
    """Averages the gradients of one bucket, once."""

    @property
    def phase(self) -> Phase:
        """The name that ``stats`` give a step that sends this."""

    def reduce(self) -> RequestGenerator[Payload]:
        """Encode, exchange and decode. Returns the averaged message, whose header says which
        gradients there are.
        """

    def read_owned_averages(self, dtype: torch.dtype) -> Iterable[Tensor]:
        """The averaged gradient of what this rank owns of every tensor, as vectors."""

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        """Set the residual of every tensor with a gradient on any rank (``have_gradients``) to the
        part of gradient plus residual that was not sent. The other residuals stay.
        """


class ShardReducer(Reducer, Protocol):
    """A reducer whose average a sharded update reads."""

    @property
    def squared_norm(self) -> Tensor | None:
        """This rank's share of |G|^2; None if the averaged message has it."""

    def drop_absent(self, given: list[bool]) -> Tensor | None:
        """Set what the average has of tensors without a gradient on any rank to zero; return
        ``squared_norm`` anew.
        """

    @property
    def values(self) -> list[Tensor]:
        """The part of the average that this rank owns, as ``Ops.expand_average`` takes it."""

    @property
    def positions(self) -> Tensor | None:
        """The positions of the last of ``values``; None: all."""


class OwnerReducer:
    """A payload for every owner of a shard: its part of the tensors that are sent dense, in the
    order of ``sent_dense``, by default of all, and what a method encodes. Each owner receives the
    mean of what all ranks send it.

    ``sends_residuals``: whether residuals of dense tensors are sent too, by default where there are
    some.
    """

    owner_payloads: list[Payload]
    values: list[Tensor]
    positions: Tensor | None = None
    squared_norm: Tensor | None = None

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
        self.values = []  # of this rank, received; nothing may be sent dense, inside FSDP2
        self.sends_residuals = bucket.has_residual if sends_residuals is None else sends_residuals

    def average(
        self, gradient_flags: Tensor, dtype: PayloadDtype, encoded: Sequence[Tensor] = ()
    ) -> RequestGenerator[Payload]:
        """Send to every owner what it owns of the tensors that are sent dense, and what is
        ``encoded`` for it. Returns the mean of this rank's payload.
        """
        lengths = [[sizes[i] for i in self.sent_dense] for sizes in self.layout.sizes]
        parts: dict[int, list[tuple[Tensor, slice]]] = {i: [] for i in self.sent_dense}
        for of_rank, code in zip(lengths, encoded, strict=False):
            of_rank.append(len(code))
        self.owner_payloads, flat = self.bucket.make_payloads(lengths, dtype)
        headers = [payload.header for payload in self.owner_payloads]
        torch._foreach_copy_(headers, [gradient_flags] * len(headers))
        absent, to, sent = [], [], []
        for payload, ranges in zip(self.owner_payloads, self.layout.ranges, strict=True):
            for part, i in zip(payload.unrounded_parts, self.sent_dense, strict=False):
                if not part.numel():
                    continue
                g, owned = self.grads[i], slice(*ranges[i])
                parts[i].append((part, owned))
                if g is None:
                    absent.append(part)
                else:
                    to.append(part)
                    sent.append(g.reshape(-1)[owned])
        if encoded:
            to += [payload.unrounded_parts[-1] for payload in self.owner_payloads]
            sent += encoded
        if absent:
            torch._foreach_zero_(absent)
        if to:
            torch._foreach_copy_(to, sent)
        if self.sends_residuals:
            self._add_residuals(parts)
        for payload in self.owner_payloads:
            payload.round()
        received = yield ReduceScatterMean(flat, [x.flat.numel() for x in self.owner_payloads])
        return self.owner_payloads[self.layout.rank].with_flat(received)

    def drop_absent(self, given: list[bool]) -> Tensor | None:
        absent = [x for x, i in zip(self.values, self.sent_dense, strict=False) if not given[i]]
        if absent:
            torch._foreach_zero_(absent)
        return self.squared_norm

    def _add_residuals(self, parts: dict[int, list[tuple[Tensor, slice]]]) -> None:
        """Add residuals to ``parts`` of payloads, which have these elements of each tensor."""
        for batch in Residuals(self.bucket).batches(parts):
            rows = [(part, e.view(-1)[owned]) for i, e in batch for part, owned in parts[i]]
            if rows:
                torch._foreach_add_([part for part, _ in rows], [e for _, e in rows])

    def read_owned_averages(self, dtype: torch.dtype) -> list[Tensor]:
        return self.ops.expand_average(self.bucket, self.values, self.positions, dtype)


class ReduceScatterReducer(OwnerReducer):
    """Sends gradients dense, with the residuals of those that have any; each rank gets its shard.

    A residual is then what rounding to the payload's dtype has taken off.
    """

    @property
    def phase(self) -> Phase:
        return "rounded" if self.bucket.is_rounded else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        like = torch.empty(0, dtype=self.bucket.compute_dtype, device=self.bucket.device)
        gradient_flags = flag_gradients(self.grads, like)
        mean = yield from self.average(gradient_flags, self.bucket.group["payload_dtype"])
        self.values = mean.parts
        return mean

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        bucket, is_rounded = self.bucket, self.owner_payloads[0].rounding_errors is not None
        residuals = Residuals(bucket)
        sent = [(part, i) for part, i in enumerate(self.sent_dense) if have_gradients[i]]
        if is_rounded:
            for part, i in sent:
                errors = [payload.rounding_error_parts[part] for payload in self.owner_payloads]
                residuals.set([(i, torch.cat(errors))] if i in residuals else [])
        elif bucket.has_residual:
            residuals.scale([i for _, i in sent], 0)
        bucket.cache["has_residual"] = is_rounded or (
            bucket.has_residual and not all(have_gradients)
        )


class AllReduceReducer:
    """Sends gradients plus residuals on a mask that all ranks know, by one all-reduce.

    Every rank receives the whole average, and reads its shard of it where state is sharded.
    ``mask``: None for all elements. ``keeps_mask``: residuals on it are 0 but for rounding errors,
    as it is that of the step before.
    """

    grads: list[Tensor | None]
    mask: Mask
    mean: Payload
    sends_residuals: bool
    positions = None  # ``values`` are dense

    def __init__(
        self,
        bucket: Bucket,
        ops: Ops,
        mask: Mask | None = None,
        keeps_mask: bool = False,
    ):
        self.bucket, self.ops, self.keeps_mask = bucket, ops, keeps_mask
        self._given, self._is_sparse = mask, mask is not None and mask.is_sparse

    @property
    def phase(self) -> Phase:
        if self._is_sparse:
            return "sparse"
        return "rounded" if self.bucket.is_rounded else "dense"

    def reduce(self) -> RequestGenerator[Payload]:
        bucket = self.bucket
        self.grads, self.mask = bucket.grads(), self._given or Mask(bucket)
        adds = bucket.is_rounded or (not self.keeps_mask and bucket.has_residual)
        self.sends_residuals = adds
        sent = self.ops.encode(bucket, self.grads, self.mask, adds)
        self.mean = yield AllReduceMean(sent)
        return self.mean

    @property
    def squared_norm(self) -> Tensor:
        return squared_norm(self.mean.body) / self.bucket.shards.ranks

    def drop_absent(self, given: list[bool]) -> Tensor:
        self.mean.clear_parts(given)
        return self.squared_norm

    @property
    def values(self) -> list[Tensor]:
        return self.read_owned_averages(self.bucket.compute_dtype)

    def clip(self, factor: float) -> None:
        """Multiply the average by ``factor``, by which the step clips it."""
        scale_(self.mean.body, factor)

    def read_owned_averages(self, dtype: torch.dtype) -> list[Tensor]:
        shards, lengths = self.bucket.shards, self.bucket.lengths
        sizes = shards.own_sizes
        memory = self.bucket.get_memory("average", sum(sizes), dtype)
        owned: list[Tensor] = list(memory.split(sizes))
        whole = self.ops.scratch(memory, sum(lengths), use="whole average").split(lengths)
        self.ops.decode(self.mean.parts, self.mask.positions, whole)
        rows = zip(whole, shards.own_ranges, strict=True)
        torch._foreach_copy_(owned, [x[start:stop] for x, (start, stop) in rows])
        return owned

    def keep_unsent(self, have_gradients: list[bool]) -> None:
        errors, changes_residual = self.mean.rounding_errors, self.changes_residual
        indices = [i for i, has_gradient in enumerate(have_gradients) if has_gradient]
        self.note_residual(have_gradients)
        if errors is not None and self._replaces_residual(errors, have_gradients):
            Residuals(self.bucket).set_all(errors)
        elif errors is not None and not self._is_sparse:
            Residuals(self.bucket).set([(i, self.mean.rounding_error_parts[i]) for i in indices])
        elif changes_residual:
            self.ops.keep_unsent(self.bucket, indices, self.grads, self.mask, self.mean)

    @property
    def changes_residual(self) -> bool:
        """True if a step changes residuals."""
        is_rounded = self.mean.rounding_errors is not None
        return is_rounded or self._is_sparse or self.sends_residuals

    def _replaces_residual(self, errors: Tensor, have_gradients: list[bool]) -> bool:
        """True if rounding errors are the new residuals of all tensors."""
        if self._is_sparse or self.bucket.offload is not None or not all(have_gradients):
            return False
        return self.bucket.flat["residual"].numel() == errors.numel()

    def note_residual(self, have_gradients: list[bool]) -> None:
        """Note whether residuals may be non-zero after this step."""
        remains = self.mean.rounding_errors is not None or self._is_sparse
        self.bucket.cache["has_residual"] = remains or (
            self.sends_residuals and not all(have_gradients)
        )


# The step of a bucket: backends have fused implementations of ``step_adamw`` and ``step_adams``.


def step_by_average(
    bucket: Bucket, ops: Ops, reducer: AllReduceReducer, update: Update, factor: float = 1.0
) -> None:
    """Update all tensors with a gradient on any rank by their average, times ``factor``, and set
    their residuals.
    """
    mean, positions = reducer.mean, reducer.mask.positions
    indices = [i for i, has_gradient in enumerate(mean.have_gradients) if has_gradient]
    if indices:
        bucket.count_steps(mean.have_gradients)
        parts, at = [mean.parts[i] for i in indices], [positions[i] for i in indices]
        dense = [part if index is None else None for part, index in zip(parts, at, strict=True)]
        averages = update.memory_for(bucket, indices, dense)
        ops.decode(parts, at, averages)
        scale_all_(averages, factor)
        update.apply(bucket, indices, averages)
    reducer.keep_unsent(mean.have_gradients)


def step_adamw(bucket: Bucket, ops: Ops, reducer: AllReduceReducer) -> None:
    """Update a bucket by AdamW: see ``step_by_average``."""
    step_by_average(bucket, ops, reducer, AdamWUpdate(ops))


def step_adams(bucket: Bucket, ops: Ops, reducer: AllReduceReducer) -> None:
    """Update a bucket by AdamS: see ``step_by_average``."""
    step_by_average(bucket, ops, reducer, AdamSUpdate(ops))
