"""Updates by Triton kernels: of all buckets in one launch for each group of options and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.masks import Tensors, selection_size
from ..._wire.requests import RunBatched
from ..operations import HYPER
from ..updates import feed_back_rounding, keep_absent_momenta, resize_momenta, score_memory
from .selection import SelectionInputs, select_all
from .tables import (
    KernelOps,
    Key,
    OldMomenta,
    block_offsets_of_all,
    blocks_of_all,
    commit_key,
    contiguous_weights,
    copy_back,
    count_all_steps,
    flatten,
    gradients_key,
    group_by_launch,
    make_key,
    mask_key,
    published_parameter,
)

Row = Any  # kernels.AdamWRow or kernels.ScapeRow


class Batch:
    """Buckets with the same options and dtypes, which are updated in one launch."""

    def __init__(self, ops: KernelOps, requests: list[RunBatched]):
        self.ops, self.requests = ops, requests
        self.buckets = [request.bucket for request in requests]
        self.group = self.buckets[0].group
        self.blocks = blocks_of_all(self.buckets)
        self.present = [one.bucket.present(one.args[0]) for one in requests]

    def launch(
        self,
        kernel: Callable[[kernels.Table], None],
        make_table: Callable[[kernels.Blocks, list[Row]], kernels.Table],
        rows_of: Callable[..., Iterable[Row]],
        *columns: Sequence[Any],
        keys: Iterable[Key],
    ) -> None:
        """Count the steps, and launch the kernel on a table of ``rows_of(request, present, ...)``
        of all buckets; ``columns`` are the further arguments, one for each bucket.

        The table of the step before serves again if all that it holds is in the same place: a
        bucket's state, parameters and average, and what its key tells.
        """
        rows: list[Row] = []  # copies in them have to live until the kernel was launched

        def table() -> kernels.Table:
            arguments = zip(self.requests, self.present, *columns, strict=True)
            rows.extend(row for one in arguments for row in rows_of(*one))
            return make_table(self.blocks, rows)

        commits = zip(self.requests, self.present, keys, strict=True)
        key = make_key(*(make_key(commit_key(one, own), key) for one, own, key in commits))
        cached = self.ops.tables((rows_of.__name__, self.buckets[0].index), key, table)
        count_all_steps(self.requests)
        kernel(cached)
        if key is None:
            tensors = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.lengths))]
            for (bucket, i), row in zip(tensors, rows, strict=True):
                if row.update:
                    copy_back(bucket, i, row.w)


# Radius


def update_radius(ops: KernelOps, requests: list[RunBatched]) -> list[list[Tensor]]:
    """Do Radius's lines 10, 15, 16 and 21 to 25 for all tensors; return the masks of line 22.

    A resample step goes bucket by bucket: memory for scores is reused.
    """
    if any(phase == "resample" for _, phase, _, _ in (request.args for request in requests)):
        groups = [[request] for request in requests]
    else:
        groups = group_by_launch(requests)
    masks = {id(one): masks for group in groups for one, masks in _update_radius(ops, group)}
    return [masks[id(request)] for request in requests]


def _update_radius(
    ops: KernelOps, requests: list[RunBatched]
) -> Iterator[tuple[RunBatched, list[Tensor]]]:
    batch, h = Batch(ops, requests), requests[0].bucket.group
    scores = [score_memory(one.bucket, ops, one.args[1]) for one in requests]
    keys: list[Key] = []
    for one, score in zip(requests, scores, strict=True):
        _, phase, mask, grads = one.args
        key = make_key(phase, mask_key(one.bucket, mask), gradients_key(grads))
        keys.append(None if score else key)

    def kernel(table: kernels.Table) -> None:
        offsets = block_offsets_of_all(batch.buckets, [one.args[2] for one in requests])
        hyper = {name: h[name] for name in HYPER}
        kernels.adamw(batch.blocks, offsets, table, lr=float(h["lr"]), **hyper)

    batch.launch(kernel, kernels.adamw_table, radius_rows, scores, keys=keys)
    for one, score in zip(requests, scores, strict=True):
        feed_back_rounding(one.bucket, ops, one.args[0], one.args[2])
        ks = [selection_size(h["density"], len(x)) for x in score.values()]
        yield one, ops.top_k_masks(score.values(), ks)


def radius_rows(
    request: RunBatched, present: list[bool], score: dict[int, Tensor]
) -> Iterator[kernels.AdamWRow]:
    """Yield the rows of one bucket."""
    bucket, (mean, phase, mask, grads) = request.bucket, request.args
    state, own = bucket.state, flatten(grads)
    m, v, steps = state["exp_avg"], state["exp_avg_sq"], state["step"]
    for i, weight in enumerate(contiguous_weights(bucket)):
        tensors = mask.bits[i], mean.parts[i], weight, m[i], v[i], steps[i]
        has_residual = bucket.compressed[i] and phase != "dense"
        yield kernels.AdamWRow(
            bucket.lengths[i],
            *tensors,
            update=int(present[i]),
            residual=state["residual"][i] if has_residual else None,
            grad=own[i],
            score=score.get(i),
            public=published_parameter(bucket, i),
        )


# AdamS


def update_adams(ops: KernelOps, requests: list[RunBatched]) -> list[None]:
    """Do AdamS (equation 2) for all tensors."""
    for group in group_by_launch(requests):
        _update_adams(Batch(ops, group))
    return [None] * len(requests)


def _update_adams(batch: Batch) -> None:
    h, blocks = batch.group, batch.blocks

    def kernel(table: kernels.Table) -> None:
        hyper = {name: h[name] for name in ("betas", "eps", "weight_decay", "bias_correction")}
        kernels.scape(blocks, blocks.firsts, blocks.firsts, table, lr=float(h["lr"]), **hyper)

    batch.launch(kernel, kernels.scape_table, adams_rows, keys=[()] * len(batch.requests))


def adams_rows(request: RunBatched, present: list[bool]) -> Iterator[kernels.ScapeRow]:
    """Yield the rows of one bucket."""
    bucket, (mean,) = request.bucket, request.args
    momenta, steps = bucket.state["exp_avg"], bucket.state["step"]
    for i, (m, weight) in enumerate(zip(momenta, contiguous_weights(bucket), strict=True)):
        tensors = None, None, m, mean.parts[i], weight, m, steps[i]
        public = published_parameter(bucket, i)
        yield kernels.ScapeRow(bucket.lengths[i], *tensors, update=int(present[i]), public=public)


# SCAPE


def update_scape(ops: KernelOps, requests: list[RunBatched]) -> list[None]:
    """Do SCAPE's lines 10, 11 and 16 to 21 for all tensors, and line 15 with selections."""
    for group in group_by_launch(requests):
        old = _old_momenta(group)
        inputs = [
            SelectionInputs(selection, one.bucket.grads(), own)
            for one, own in zip(group, old, strict=True)
            if (selection := one.args[3])
        ]
        if inputs:
            select_all(inputs)
        batch = Batch(ops, group)
        _update_scape(batch, old)
        for bucket, own, present in zip(batch.buckets, old, batch.present, strict=True):
            if not all(present):
                keep_absent_momenta(own.tensors, bucket.state["exp_avg"], present)
    return [None] * len(requests)


def _old_momenta(requests: list[RunBatched]) -> list[OldMomenta]:
    """Resize momenta; return those before this step, in other memory where positions change."""
    momenta = [resize_momenta(one.bucket, *one.args[:2]) for one in requests]
    old = [OldMomenta(one.bucket, own) for one, own in zip(requests, momenta, strict=True)]
    moved = [
        n
        for n, (one, own) in enumerate(zip(requests, momenta, strict=True))
        if own is one.bucket.state["exp_avg"]
        and (one.args[1].is_sparse or one.bucket.cache["mask"].is_sparse)
    ]
    flats = [requests[n].bucket.flat["exp_avg"] for n in moved]
    copies = [torch.empty_like(flat) for flat in flats]
    if flats:
        torch._foreach_copy_(copies, flats)
    for n, copy in zip(moved, copies, strict=True):
        old[n] = OldMomenta(requests[n].bucket, None, copy)
    return old


def _update_scape(batch: Batch, old: list[OldMomenta]) -> None:
    """Do all but the selection."""
    h, requests, buckets = batch.group, batch.requests, batch.buckets
    masks, held = [one.args[1] for one in requests], [bucket.cache["mask"] for bucket in buckets]
    grads = [bucket.grads() for bucket in buckets]
    keys = [
        make_key(own.key, gradients_key(g), mask_key(bucket, mask), mask_key(bucket, mask_before))
        for own, g, bucket, mask, mask_before in zip(old, grads, buckets, masks, held, strict=True)
    ]

    def kernel(table: kernels.Table) -> None:
        names = ("betas", "eps", "weight_decay", "bias_correction", "maximize")
        offsets = [block_offsets_of_all(buckets, chosen) for chosen in (masks, held)]
        hyper = {name: h[name] for name in names} | {"clip": requests[0].args[2]}
        kernels.scape(batch.blocks, *offsets, table, lr=float(h["lr"]), **hyper)

    batch.launch(kernel, kernels.scape_table, scape_rows, old, grads, keys=keys)


def scape_rows(
    request: RunBatched, present: list[bool], old: OldMomenta, grads: Tensors
) -> Iterator[kernels.ScapeRow]:
    """Yield the rows of one bucket."""
    bucket, (mean, mask, *_) = request.bucket, request.args
    state, held, own = bucket.state, bucket.cache["mask"], flatten(grads)
    dropped = mean.dropped_parts or [None] * len(own)
    rows = zip(contiguous_weights(bucket), old.tensors, state["exp_avg"], strict=True)
    for i, (weight, before, m) in enumerate(rows):
        tensors = mask.bits[i], held.bits[i], before, mean.parts[i], weight, m, state["step"][i]
        yield kernels.ScapeRow(
            bucket.lengths[i],
            *tensors,
            update=int(present[i]),
            residual=state["residual"][i],
            grad=own[i],
            public=published_parameter(bucket, i),
            dropped=dropped[i],
        )


# SEPARATE with a tracked projection


def commit_separate(ops: KernelOps, requests: list[RunBatched]) -> list[None]:
    """Do lines 4 and 5 and AdamW's step: tensors whose average is a product in one launch, tensors
    that were sent whole in another.
    """
    for group in group_by_launch(requests):
        count_all_steps(group)
        _update_factored(group)
        _update_whole(group)
    return [None] * len(requests)


def _update_factored(requests: list[RunBatched]) -> None:
    rows: list[kernels.FactoredRow] = []
    updated = []
    for request in requests:
        bucket, (mean, factors, _, flags, _) = request.bucket, request.args
        state, weights, grads = bucket.state, contiguous_weights(bucket), flatten(bucket.grads())
        for own in factors.factored(mean, _numbers_of(flags)):
            i, shape = own.i, (own.rows, own.columns, own.R.shape[1])
            moments = state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]
            row = kernels.FactoredRow(
                *shape,
                own.R,
                *own.R.stride(),
                own.p,
                own.own,
                weights[i],
                *moments,
                state["residual"][i],
                own.dropped,
                grads[i],
                published_parameter(bucket, i),
            )
            rows.append(row)
            updated.append((bucket, i, weights[i]))
    if not rows:
        return
    h, factors, factor = requests[0].bucket.group, requests[0].args[1], requests[0].args[4]
    share = max(request.args[1].share(factor) for request in requests)
    kernels.factored(
        rows,
        lr=float(h["lr"]),
        betas=h["betas"],
        eps=h["eps"],
        weight_decay=h["weight_decay"],
        of_average=-factor if h["maximize"] else factor,
        of_sent=share,
        of_grad=share * factors.clipped,
    )
    for bucket, i, weight in updated:
        copy_back(bucket, i, weight)


def _update_whole(requests: list[RunBatched]) -> None:
    rows: list[kernels.AdamWRow] = []
    updated = []
    for request in requests:
        bucket, (mean, factors, _, flags, factor) = request.bucket, request.args
        tensors = factors.whole(_numbers_of(flags))
        state, weights = bucket.state, contiguous_weights(bucket)
        if factor != 1 and tensors:
            torch._foreach_mul_([mean.parts[i] for i in tensors], factor)
        for i in tensors:
            moments = state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]
            public = published_parameter(bucket, i)
            row = (bucket.lengths[i], None, mean.parts[i], weights[i], *moments, 1)
            rows.append(kernels.AdamWRow(*row, public=public))
            updated.append((request, i, weights[i]))
    if not rows:
        return
    h, device = requests[0].bucket.group, rows[0].w.device
    blocks = kernels.make_blocks(tuple(row.n for row in rows), device)
    hyper = {name: h[name] for name in HYPER}
    kernels.adamw(blocks, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
    for request, i, weight in updated:
        mean, factors, _, _, factor = request.args
        copy_back(request.bucket, i, weight)
        factors.feed_back_whole(i, mean, factor)


def _numbers_of(flags: list[bool]) -> list[int]:
    return [i for i, is_set in enumerate(flags) if is_set]
