"""Updates by Triton kernels: of all buckets in one launch for each group of options and dtypes.

A bucket's arguments are a named tuple with the parameters of the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.bucket import Bucket
from ..._state.masks import Mask, Tensors
from ..._state.residuals import Residuals
from ..._wire.payload import Payload
from ..operations import HYPER
from ..shared_steps import (
    MaskedAverage,
    keep_absent_momenta,
    resize_momenta,
)
from .tables import (
    KernelOps,
    Key,
    addresses,
    block_offsets_of_all,
    blocks_of_all,
    bucket_key,
    contiguous_weights,
    copy_back,
    flatten,
    gradients_key,
    make_key,
    mask_key,
    payload_key,
    published_parameter,
)
from .triton_selection import TritonSelection

Row = Any  # kernels.AdamWRow or kernels.ScapeRow
Calls = list[tuple[Any, ...]]  # the arguments of each bucket


class LaunchGroup:
    """Buckets with the same options, dtypes and device, which one launch updates."""

    def __init__(self, ops: KernelOps, calls: Sequence[Any]):
        self.ops, self.calls = ops, calls
        self.buckets: list[Bucket] = [call.bucket for call in calls]
        self.group = self.buckets[0].group
        self.blocks = blocks_of_all(self.buckets)
        self.have_gradients = [call.mean.have_gradients for call in calls]

    def launch(
        self,
        kernel: Callable[[kernels.Table], None],
        make_table: Callable[[kernels.Blocks, list[Row]], kernels.Table],
        rows_of: Callable[..., Iterable[Row]],
        *columns: Sequence[Any],
        keys: Iterable[Key],
    ) -> None:
        """Count the steps, and launch the kernel on a table of ``rows_of(call, have_gradients,
        ...)`` of all buckets; ``columns`` are the further arguments, one for each bucket.

        The table of the step before serves again if all that it holds is in the same place: a
        bucket's state, parameters and average, and what its key tells.
        """
        rows: list[Row] = []  # copies in them have to live until the kernel was launched

        def table() -> kernels.Table:
            arguments = zip(self.calls, self.have_gradients, *columns, strict=True)
            rows.extend(row for bucket in arguments for row in rows_of(*bucket))
            return make_table(self.blocks, rows)

        key = make_key(
            *(
                make_key(
                    bucket_key(call.bucket), payload_key(call.mean), tuple(have_gradients), key
                )
                for call, have_gradients, key in zip(
                    self.calls, self.have_gradients, keys, strict=True
                )
            )
        )
        cached = self.ops.tables((rows_of.__name__, self.buckets[0].index), key, table)
        self.count_steps()
        kernel(cached)
        if key is None:
            tensors = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.lengths))]
            for (bucket, i), row in zip(tensors, rows, strict=True):
                if row.update:
                    copy_back(bucket, i, row.w)

    def count_steps(self) -> None:
        """Count one step more of each tensor that any rank has a gradient of."""
        have_gradients = [has_gradient for bucket in self.have_gradients for has_gradient in bucket]
        counts = [bucket.step_counts for bucket in self.buckets]
        flat = [count for count in counts if count is not None]
        if len(flat) == len(counts) and all(have_gradients):
            torch._foreach_add_(flat, 1)
            return
        steps = [step for bucket in self.buckets for step in bucket.state["step"]]
        pairs = zip(steps, have_gradients, strict=True)
        if counted := [step for step, has_gradient in pairs if has_gradient]:
            torch._foreach_add_(counted, 1)


def launch_groups_of(ops: KernelOps, calls: Sequence[Any]) -> list[LaunchGroup]:
    """Group the buckets that one launch can update."""
    groups: dict[object, list[Any]] = {}
    for call in calls:
        bucket, sent = call.bucket, call.mean.flat.dtype
        key = id(bucket.group), bucket.dtype, bucket.grad_dtype, sent, bucket.device
        groups.setdefault(key, []).append(call)
    return [LaunchGroup(ops, group) for group in groups.values()]


# Averages that are sent on a mask, by AdamW and AdamS


class AverageCall(NamedTuple):
    bucket: Bucket
    reducer: MaskedAverage

    @property
    def mean(self) -> Payload:
        return self.reducer.mean


def step_adamw(ops: KernelOps, calls: Calls) -> list[None]:
    """Do ``_engine.reducer.step_adamw`` for all tensors; called by ``run_batched_requests`` for
    Radius.
    """
    for batch in launch_groups_of(ops, [AverageCall(*call) for call in calls]):
        reducers = [call.reducer for call in batch.calls]
        keys = [
            make_key(
                reducer.changes_residual,
                mask_key(reducer.bucket, reducer.mask),
                gradients_key(reducer.grads),
            )
            for reducer in reducers
        ]
        masks = [reducer.mask for reducer in reducers]
        offsets = block_offsets_of_all(ops.tables, batch.buckets, masks)
        hyper = {name: batch.group[name] for name in HYPER} | {"lr": float(batch.group["lr"])}
        kernel = functools.partial(kernels.adamw, batch.blocks, offsets, **hyper)
        batch.launch(kernel, kernels.adamw_table, adamw_rows, keys=keys)
        for reducer, have_gradients in zip(reducers, batch.have_gradients, strict=True):
            reducer.note_residual(have_gradients)
    return [None] * len(calls)


def adamw_rows(call: AverageCall, have_gradients: list[bool]) -> Iterator[kernels.AdamWRow]:
    bucket, reducer, state = call.bucket, call.reducer, call.bucket.state
    m, v, steps, grads = (
        state["exp_avg"],
        state["exp_avg_sq"],
        state["step"],
        flatten(reducer.grads),
    )
    rounding_errors: Tensors = [*call.mean.rounding_error_parts] or [None] * len(grads)
    residuals = Residuals(bucket).stored if reducer.changes_residual else [None] * len(grads)
    for i, weight in enumerate(contiguous_weights(bucket)):
        tensors = reducer.mask.bits[i], call.mean.parts[i], weight, m[i], v[i], steps[i]
        yield kernels.AdamWRow(
            bucket.lengths[i],
            *tensors,
            update=int(have_gradients[i]),
            residual=residuals[i],
            grad=grads[i],
            public=published_parameter(bucket, i),
            rounding_errors=rounding_errors[i],
        )


def step_adams(ops: KernelOps, calls: Calls) -> list[None]:
    """Do ``_engine.reducer.step_adams`` for all tensors; called by ``run_batched_requests`` for
    AdamS.
    """
    names = ("betas", "eps", "weight_decay")
    for batch in launch_groups_of(ops, [AverageCall(*call) for call in calls]):
        group, firsts = batch.group, batch.blocks.firsts
        hyper = {name: group[name] for name in names} | {"lr": float(group["lr"])}
        kernel = functools.partial(kernels.scape, batch.blocks, firsts, firsts, **hyper)
        batch.launch(kernel, kernels.scape_table, adams_rows, keys=[()] * len(batch.calls))
        for call, have_gradients in zip(batch.calls, batch.have_gradients, strict=True):
            call.reducer.keep_unsent(have_gradients)
    return [None] * len(calls)


def adams_rows(call: AverageCall, have_gradients: list[bool]) -> Iterator[kernels.ScapeRow]:
    bucket, momenta, steps = call.bucket, call.bucket.state["exp_avg"], call.bucket.state["step"]
    for i, (m, weight) in enumerate(zip(momenta, contiguous_weights(bucket), strict=True)):
        tensors = None, None, m, call.mean.parts[i], weight, m, steps[i]
        public = published_parameter(bucket, i)
        yield kernels.ScapeRow(
            bucket.lengths[i], *tensors, update=int(have_gradients[i]), public=public
        )


# SCAPE


class ScapeCall(NamedTuple):
    bucket: Bucket
    mean: Payload
    mask: Mask
    clip_factor_in_v: float
    selection: TritonSelection | None


def step_scape(ops: KernelOps, calls: Calls) -> list[None]:
    """Do ``scape.step_scape`` for all tensors; called by ``run_batched_requests`` for SCAPE."""
    names = ("betas", "eps", "weight_decay", "maximize")
    for batch in launch_groups_of(ops, [ScapeCall(*call) for call in calls]):
        group, buckets = batch.group, batch.buckets
        momenta = [resize_momenta(call.bucket, call.mean, call.mask) for call in batch.calls]
        grads = [bucket.grads() for bucket in buckets]
        for call, g, m in zip(batch.calls, grads, momenta, strict=True):
            if call.selection:
                call.selection.select(g, m)
        masks = [call.mask for call in batch.calls]
        momentum_masks = [bucket.cache["momentum_mask"] for bucket in buckets]
        columns = zip(momenta, grads, buckets, masks, momentum_masks, strict=True)
        keys = [
            make_key(addresses(m), gradients_key(g), mask_key(bucket, new), mask_key(bucket, last))
            for m, g, bucket, new, last in columns
        ]
        tables, pairs = ops.tables, (masks, momentum_masks)
        offsets = [block_offsets_of_all(tables, buckets, chosen) for chosen in pairs]
        hyper = {name: group[name] for name in names} | {"lr": float(group["lr"])}
        hyper["clip"] = batch.calls[0].clip_factor_in_v
        kernel = functools.partial(kernels.scape, batch.blocks, *offsets, **hyper)
        batch.launch(kernel, kernels.scape_table, scape_rows, momenta, grads, keys=keys)
        for bucket, old, have_gradients in zip(buckets, momenta, batch.have_gradients, strict=True):
            if not all(have_gradients):
                keep_absent_momenta(old, bucket.state["exp_avg"], have_gradients)
    return [None] * len(calls)


def scape_rows(
    call: ScapeCall, have_gradients: list[bool], old: list[Tensor], grads: Tensors
) -> Iterator[kernels.ScapeRow]:
    bucket, mask, mean = call.bucket, call.mask, call.mean
    momentum_mask = bucket.cache["momentum_mask"]
    state, grads, residuals = bucket.state, flatten(grads), Residuals(bucket).stored
    rounding_errors: Tensors = [*mean.rounding_error_parts] or [None] * len(grads)
    rows = zip(contiguous_weights(bucket), old, state["exp_avg"], strict=True)
    for i, (weight, before, m) in enumerate(rows):
        tensors = (
            mask.bits[i],
            momentum_mask.bits[i],
            before,
            mean.parts[i],
            weight,
            m,
            state["step"][i],
        )
        yield kernels.ScapeRow(
            bucket.lengths[i],
            *tensors,
            update=int(have_gradients[i]),
            residual=residuals[i],
            grad=grads[i],
            public=published_parameter(bucket, i),
            rounding_errors=rounding_errors[i],
        )
