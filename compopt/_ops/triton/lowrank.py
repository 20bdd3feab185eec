"""SEPARATE with tracked columns by Triton kernels: the products of ``_lowrank.stacks.multiply``,
``_lowrank.stacks.orthonormalize_columns``, and lines 4 and 5 with AdamW,
``separate.update_tensors``.

Tables of addresses serve again while all that they hold is in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.residuals import Residuals
from ..._wire.payload import Payload, float_dtype
from ..operations import HYPER
from ..update_helpers import FactoredAverages
from .tables import (
    KernelOps,
    Key,
    bucket_key,
    contiguous_weights,
    copy_back,
    flatten,
    gradients_key,
    make_key,
    payload_key,
    published_parameter,
)
from .updates import Calls, LaunchGroup, launch_groups_of


def can_project(ops: KernelOps, bucket: Bucket) -> bool:
    """True if kernels can project this bucket's gradients on tracked columns; offloaded residuals
    are not on the device.
    """
    group = bucket.group
    sent = float_dtype(group.get("payload_dtype")) or bucket.grad_dtype
    return (
        group.get("projection") == "tracked"
        and bucket.device.type == ops.device
        and bucket.offload is None
        and torch.float64 not in (sent, bucket.dtype)
    )


def can_orthonormalize(ops: KernelOps, bucket: Bucket) -> bool:
    """True if kernels can orthonormalize columns of this bucket's rank."""
    return can_project(ops, bucket) and (bucket.group["rank"] or 0) <= kernels.MAX_RANK


def _places(tensors: Sequence[Tensor]) -> Key:
    """Return what the addresses of all parts of these tensors follow from."""
    return tuple((t.data_ptr(), t.stride(), t.dtype) for t in tensors)


# Products


def multiply_stacks(
    bucket: Bucket,
    ops: Any,
    stacks: Sequence[Any],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    local_factor: float,
    transposed: bool,
    header: Payload | None,
) -> None:
    """Write ``h Q``, or ``h^T R``, of every tensor of the stacks; the marks of projected gradients
    by the same launch.

    It is the first where ``transposed``: H is the transpose of the tensor.
    """
    marks = None
    if header is not None:
        marks, in_stacks = header.header, {i for stack in stacks for i in stack.indices}
        grads = bucket.grads()
        others = [None if i in in_stacks else g for i, g in enumerate(grads)]
        ops.write_marks(header, grads, others)
    grads = [g for stack in stacks for g in stack.grads]
    residuals = [stack.residual.read() for stack in stacks]
    copies: list[Tensor | None] = []  # they have to live until the kernel was launched

    def make() -> tuple[kernels.Tiles, kernels.Table]:
        copies.extend(flatten(grads))
        rows = list(project_rows(stacks, residuals, right, out, copies))
        shapes = tuple((row.rows, row.columns, row.r) for row in rows)
        tiles = kernels.project_tiles(shapes, not transposed, bucket.device)
        return tiles, kernels.project_table(rows, tiles, marks, not transposed)

    places = _places([*residuals, *right, *out, *([] if marks is None else [marks])])
    members = tuple((stack.indices, stack.projection) for stack in stacks)
    key = make_key(members, places, gradients_key(grads))
    tiles, table = ops.tables(("project", bucket.index, transposed), key, make)
    kernels.project(table, tiles, marks, local_factor)


def project_rows(
    stacks: Sequence[Any],
    residuals: Sequence[Tensor],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    grads: Sequence[Any],
) -> list[kernels.ProjectRow]:
    """Return a row for each tensor of the stacks, whose gradients are ``grads``."""
    rows: list[kernels.ProjectRow] = []
    given = iter(grads)
    for stack, e_stack, R, p in zip(stacks, residuals, right, out, strict=True):
        q = stack.projection
        tensors = zip(stack.indices, R, p.mT, e_stack, strict=True)
        for i, narrow, product, e in tensors:
            shape = q.rows, q.columns, q.r
            rows.append(
                kernels.ProjectRow(*shape, *narrow.stride(), i, narrow, product, e, next(given))
            )
    return rows


def orthonormalize_columns(bucket: Bucket, ops: Any, stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return orthonormal columns that span those of each stack, in float32."""
    results = [torch.empty_like(stack, dtype=torch.float32) for stack in stacks]
    key = _places([*stacks, *results]), tuple(stack.shape for stack in stacks)
    use = "orthonormalize", bucket.index, key[1]
    prepared = ops.tables(use, key, lambda: kernels.prepare_orthonormalize(stacks, results))
    kernels.orthonormalize(prepared)
    return results


# Lines 4 and 5 with AdamW


class SeparateCall(NamedTuple):
    bucket: Bucket
    mean: Payload
    reducer: FactoredAverages
    update: Any
    have_gradients: list[bool]
    factor: float

    def key(self) -> Key:
        """Return what determines the addresses of all that this call reads and writes."""
        return make_key(
            bucket_key(self.bucket),
            payload_key(self.mean),
            gradients_key(self.bucket.grads()),
            _places(self.reducer.list_factors()),
            tuple(self.have_gradients),
        )


def update_separate(ops: KernelOps, calls: Calls) -> list[None]:
    """Do lines 4 and 5 and AdamW's step: tensors whose average is a product in one launch, tensors
    that were sent dense in another.
    """
    for batch in launch_groups_of(ops, [SeparateCall(*call) for call in calls]):
        key = make_key(*(call.key() for call in batch.calls))
        batch.count_steps()
        _update_factored(batch, key)
        _update_dense(batch, key)
    return [None] * len(calls)


def _update_factored(batch: LaunchGroup, key: Key) -> None:
    group, calls, factor = batch.group, batch.calls, batch.calls[0].factor
    rows: list[kernels.FactoredRow] = []  # copies in them have to live until the launch
    updated: list[tuple[Bucket, int, Tensor]] = []

    def make() -> tuple[tuple[tuple[int, int], ...], kernels.Table | None]:
        for call in calls:
            new, places = _factored_rows(call)
            rows.extend(new)
            updated.extend(places)
        shapes = tuple((row.rows, row.columns) for row in rows)
        return shapes, kernels.factored_table(rows) if rows else None

    shapes, table = batch.ops.tables(("factored", batch.buckets[0].index), key, make)
    if table is None:
        return
    share = max(call.reducer.error_share(factor) for call in calls)
    kernels.factored(
        shapes,
        table,
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        of_average=-factor if group["maximize"] else factor,
        of_sent=share,
        of_grad=share * calls[0].reducer.local_factor,
    )
    if key is None:
        for bucket, i, weight in updated:
            copy_back(bucket, i, weight)


def _factored_rows(
    call: SeparateCall,
) -> tuple[list[kernels.FactoredRow], list[tuple[Bucket, int, Tensor]]]:
    bucket, state, grads = call.bucket, call.bucket.state, flatten(call.bucket.grads())
    weights, residuals = contiguous_weights(bucket), Residuals(bucket).stored
    rows, updated = [], []
    for product in call.reducer.list_factored(call.mean, _numbers_of(call.have_gradients)):
        i, R = product.i, product.R
        row = kernels.FactoredRow(
            *(product.rows, product.columns, R.shape[1]),
            *(R, *R.stride(), product.p, product.sent),
            *(weights[i], state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]),
            residual=residuals[i],
            grad=grads[i],
            public=published_parameter(bucket, i),
        )
        rows.append(row)
        updated.append((bucket, i, weights[i]))
    return rows, updated


def _update_dense(batch: LaunchGroup, key: Key) -> None:
    group, dense = batch.group, []
    for call in batch.calls:
        tensors = call.reducer.list_dense(_numbers_of(call.have_gradients))
        if call.factor != 1 and tensors:
            torch._foreach_mul_([call.mean.parts[i] for i in tensors], call.factor)
        call.reducer.feed_back_dense(tensors, call.mean, call.factor)
        dense += [(call, i) for i in tensors]
    if not dense:
        return
    rows: list[kernels.AdamWRow] = []

    def make() -> kernels.Table:
        weights = {id(bucket): contiguous_weights(bucket) for bucket in batch.buckets}
        for call, i in dense:
            bucket, state = call.bucket, call.bucket.state
            moments = state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]
            tensors = None, call.mean.parts[i], weights[id(bucket)][i], *moments
            public = published_parameter(bucket, i)
            rows.append(kernels.AdamWRow(bucket.lengths[i], *tensors, 1, public=public))
        return kernels.adamw_table(blocks, rows)

    lengths = tuple(call.bucket.lengths[i] for call, i in dense)
    blocks = kernels.make_blocks(lengths, batch.buckets[0].device)
    table = batch.ops.tables(("dense beside factored", batch.buckets[0].index), key, make)
    hyper = {name: group[name] for name in HYPER}
    kernels.adamw(blocks, blocks.firsts, table, lr=float(group["lr"]), **hyper)
    if key is None:
        for (call, i), row in zip(dense, rows, strict=True):
            copy_back(call.bucket, i, row.w)


def _numbers_of(flags: list[bool]) -> list[int]:
    return [i for i, is_set in enumerate(flags) if is_set]
