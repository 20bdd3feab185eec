"""SEPARATE with tracked columns by Triton kernels: the products of ``separate.stacks.multiply``,
``separate.stacks.orthonormalize_columns``, and lines 4 and 5 with AdamW,
``separate.update_tensors``.

``triton_ops`` registers these as fused implementations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._ops.operations import HYPER
from ..._state.bucket import Bucket
from ..._state.masks import Tensors
from ..._state.residuals import Residuals
from ..._wire.payload import Payload
from ...separate.projection_options import projects_tracked
from ...separate.projection_reducer import ProjectionReducer
from ...separate.stacks import ProjectedStack
from .tables import (
    KernelOps,
    bucket_key,
    contiguous_weights,
    copy_back,
    flatten,
    published_parameter,
)
from .triton_updates import Calls, LaunchGroup, launch_groups_of


def can_project(ops: KernelOps, bucket: Bucket) -> bool:
    """True if kernels can project this bucket's gradients on tracked columns; offloaded residuals
    are not on the device.
    """
    fits = projects_tracked(bucket) and bucket.group["rank"] <= kernels.MAX_NARROW
    return fits and bucket.device.type == ops.device and bucket.offload is None


def can_orthonormalize(ops: KernelOps, bucket: Bucket) -> bool:
    """True if kernels can orthonormalize columns of this bucket's rank."""
    return can_project(ops, bucket) and bucket.group["rank"] <= kernels.MAX_RANK


# Products


def multiply_stacks(
    bucket: Bucket,
    ops: Any,
    stacks: Sequence[ProjectedStack],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    makes_P: bool,
    payload: Payload | None,
) -> None:
    """Do lines 1 and 2a, ``h Q``, if ``makes_P``, else 1 and 2c, ``h^T R``; the flags of projected
    gradients by the same launch.
    """
    flags = None
    if payload is not None:
        flags, in_stacks = payload.header, {i for stack in stacks for i in stack.indices}
        grads = bucket.grads()
        others = [None if i in in_stacks else g for i, g in enumerate(grads)]
        ops.write_flags(payload, grads, others)
    grads = flatten([g for stack in stacks for g in stack.grads])  # copies live until the launch
    residuals = [stack.residual.read() for stack in stacks]
    rows = project_rows(stacks, residuals, right, out, grads)
    flags_dtype = torch.float32 if flags is None else flags.dtype
    types = kernels.ProjectTypes(right[0].dtype, out[0].dtype, dtype_of(grads), flags_dtype)
    shapes = tuple((row.rows, row.columns, row.r) for row in rows)
    tiles = kernels.project_tiles(shapes, not makes_P, bucket.device)
    table = kernels.project_table(rows, tiles, types, not makes_P)
    kernels.project(table, tiles, flags)


def project_rows(
    stacks: Sequence[ProjectedStack],
    residuals: Sequence[Tensor],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    grads: Tensors,
) -> list[kernels.ProjectRow]:
    """Return a row for each tensor of the stacks, whose gradients are ``grads``."""
    rows: list[kernels.ProjectRow] = []
    of_grads = iter(addresses_of(grads))
    for stack, e_stack, R, p in zip(stacks, residuals, right, out, strict=True):
        q, (_, down, across) = stack.projection, R.stride()
        columns = (
            kernels.addresses_in_turn(x) for x in (R, p.view(len(stack.indices), -1), e_stack)
        )
        for i, narrow, product, e in zip(stack.indices, *columns, strict=True):
            g = next(of_grads)
            row = q.rows, q.columns, q.r, down, across, i, narrow, product, e, g
            rows.append(kernels.ProjectRow(*row))
    return rows


def dtype_of(grads: Tensors) -> torch.dtype:
    """Return the dtype of gradients, which all have; float32 if there is none."""
    return next((g.dtype for g in grads if g is not None), torch.float32)


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the address of each tensor, 0 for None."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def orthonormalize_columns(
    bucket: Bucket,
    ops: Any,
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, int, int]],
    use: int = 0,
) -> list[Tensor]:
    """Return orthonormal columns that span those of matrices (k, n, r), stored by columns, in
    float32.
    """
    stacks = [x.view(k, r, n).mT.float() for x, (k, n, r) in zip(parts, shapes, strict=True)]
    results = [stack.new_empty(stack.shape) for stack in stacks]
    kernels.orthonormalize(kernels.prepare_orthonormalize(stacks, results))
    return results


# Lines 4 and 5 with AdamW


class SeparateCall(NamedTuple):
    bucket: Bucket
    reducer: ProjectionReducer
    update: Any
    have_gradients: list[bool]
    factor: float

    @property
    def mean(self) -> Payload:
        return self.reducer.mean


class Places(NamedTuple):
    """The addresses of the weights and state of all tensors of a bucket. Where a parameter is not
    contiguous ``copies`` are the weights, contiguous.
    """

    w: list[int]
    m: list[int]
    v: list[int]
    step: list[int]
    residual: list[int]
    public: list[int]
    copies: list[Tensor] | None


def find_places(ops: KernelOps, bucket: Bucket) -> Places:
    """Return the places of a bucket; those of the step before if nothing has moved."""
    key = bucket_key(bucket)

    def make() -> Places:
        weights, state = contiguous_weights(bucket), bucket.state
        public = [published_parameter(bucket, i) for i in range(len(weights))]
        return Places(
            w=addresses_of(weights),
            m=addresses_of(state["exp_avg"]),
            v=addresses_of(state["exp_avg_sq"]),
            step=addresses_of(state["step"]),
            residual=addresses_of(Residuals(bucket).stored),
            public=addresses_of(public),
            copies=weights if key is None else None,
        )

    places: Places = ops.tables(("places", bucket.index), key, make)
    return places


def update_separate(ops: KernelOps, calls: Calls) -> list[None]:
    """Do lines 4 and 5 and AdamW's step: tensors whose average is a product in one launch, tensors
    that were sent dense in another.
    """
    for batch in launch_groups_of(ops, [SeparateCall(*call) for call in calls]):
        places = [find_places(ops, bucket) for bucket in batch.buckets]
        batch.count_steps()
        _update_factored(batch, places)
        _update_dense(batch, places)
        for bucket, given in zip(batch.buckets, places, strict=True):
            for i, weight in enumerate(given.copies or ()):
                copy_back(bucket, i, weight)
    return [None] * len(calls)


def _update_factored(batch: LaunchGroup, places: list[Places]) -> None:
    group, calls, factor = batch.group, batch.calls, batch.calls[0].factor
    grads = [flatten(bucket.grads()) for bucket in batch.buckets]  # copies live until the launch
    given = zip(calls, places, grads, strict=True)
    rows = [row for columns in given for row in _factored_rows(*columns)]
    if not rows:
        return
    bucket = batch.buckets[0]
    share = max(call.reducer.error_share(factor) for call in calls)
    grad_dtype = dtype_of([g for of_bucket in grads for g in of_bucket])
    types = kernels.FactoredTypes(
        calls[0].mean.flat.dtype, bucket.compute_dtype, grad_dtype, bucket.params[0].dtype
    )
    kernels.factored(
        tuple((row.rows, row.columns) for row in rows),
        kernels.factored_table(rows, types, bucket.device),
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        of_average=-factor if group["maximize"] else factor,
        of_sent=share,
        of_grad=share,
    )


def _factored_rows(
    call: SeparateCall, places: Places, grads: Tensors
) -> Iterator[kernels.FactoredRow]:
    for stack in call.reducer.tracked_stacks:
        _, down, across = stack.R.stride()
        p, sent = (x.view(len(stack.R), -1) for x in (stack.mean, stack.sent))
        R, p, sent = (kernels.addresses_in_turn(x) for x in (stack.R, p, sent))
        shape = stack.projection.rows, stack.projection.columns, stack.R.shape[-1]
        for n, i in enumerate(stack.indices):
            if call.have_gradients[i]:
                columns = (places.w, places.m, places.v, places.step, places.residual)
                g = grads[i]
                yield kernels.FactoredRow(
                    *(*shape, R[n], down, across, p[n], sent[n]),
                    *(column[i] for column in columns),
                    grad=0 if g is None else g.data_ptr(),
                    public=places.public[i],
                )


def _update_dense(batch: LaunchGroup, places: list[Places]) -> None:
    group, device = batch.group, batch.buckets[0].device
    rows: list[kernels.AdamWRow] = []
    for call, of in zip(batch.calls, places, strict=True):
        lengths, parts = call.bucket.lengths, call.mean.parts
        given = [i for i, has_gradient in enumerate(call.have_gradients) if has_gradient]
        tensors = call.reducer.list_dense(given)
        call.reducer.keep_unsent_dense(tensors, call.mean, call.factor)
        for i in tensors:
            values = parts[i].data_ptr()
            row = lengths[i], 0, values, of.w[i], of.m[i], of.v[i], of.step[i], 1
            rows.append(kernels.AdamWRow(*row, public=of.public[i]))
    if not rows:
        return
    bucket = batch.buckets[0]
    blocks = kernels.make_blocks(tuple(row.n for row in rows), device)
    types = kernels.AdamWTypes(
        bucket.compute_dtype, batch.calls[0].mean.flat.dtype, public=bucket.params[0].dtype
    )
    table = kernels.adamw_table(blocks, rows, types)
    hyper = {name: group[name] for name in HYPER}
    scale = batch.calls[0].factor  # in float32: the average may be of 16 bits
    kernels.adamw(blocks, blocks.firsts, table, lr=float(group["lr"]), scale=scale, **hyper)
