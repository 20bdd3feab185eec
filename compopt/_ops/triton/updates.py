"""Commits by Triton kernels: of all buckets in one launch for each group of options and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.masks import Tensors, selection_size
from ..._wire.requests import Together
from ..operations import HYPER
from ..updates import feed_back_rounding, keep_absent_momenta, resize_momenta, score_memory
from .selection import SelectionInputs, select_all
from .tables import (
    Copies,
    KernelOps,
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

# Radius


def update_radius(ops: KernelOps, requests: list[Together]) -> list[list[Tensor]]:
    """Do Radius's lines 10, 15, 16 and 21 to 25 for all tensors; return the masks of line 22.

    A resample step goes bucket by bucket: memory for scores is reused.
    """
    if any(phase == "resample" for _, phase, _, _ in (request.args for request in requests)):
        groups = [[request] for request in requests]
    else:
        groups = group_by_launch(requests)
    masks = {id(one): masks for group in groups for one, masks in _launch_radius(ops, group)}
    return [masks[id(request)] for request in requests]


def _launch_radius(
    ops: KernelOps, requests: list[Together]
) -> Iterator[tuple[Together, list[Tensor]]]:
    buckets = [request.bucket for request in requests]
    blocks, h = blocks_of_all(buckets), buckets[0].group
    present = [one.bucket.present(one.args[0]) for one in requests]
    scores = [score_memory(one.bucket, ops, one.args[1]) for one in requests]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.AdamWRow] = []
        for row in zip(requests, present, scores, strict=True):
            rows += _radius_rows(*row, copies)
        return kernels.adamw_table(blocks, rows)

    keys = [
        make_key(
            commit_key(one, own),
            one.args[1],
            mask_key(one.bucket, one.args[2]),
            gradients_key(one.args[3]),
        )
        for one, own, score in zip(requests, present, scores, strict=True)
        if not score
    ]
    key = make_key(*keys) if len(keys) == len(requests) else None
    rows = ops.tables(("radius", requests[0].bucket.index), key, table)
    count_all_steps(requests)
    hyper = {name: h[name] for name in HYPER}
    offsets = block_offsets_of_all(buckets, [one.args[2] for one in requests])
    kernels.adamw(blocks, offsets, rows, lr=float(h["lr"]), **hyper)
    for n, (one, score) in enumerate(zip(requests, scores, strict=True)):
        bucket, (mean, _, mask, _) = one.bucket, one.args
        if key is None:
            copy_back(bucket, copies[n][0], present[n])
        feed_back_rounding(bucket, ops, mean, mask)
        ks = [selection_size(h["density"], len(x)) for x in score.values()]
        yield one, ops.top_k_masks(score.values(), ks)


def _radius_rows(
    request: Together, present: list[bool], score: dict[int, Tensor], copies: list[Copies]
) -> list[kernels.AdamWRow]:
    """Return the rows of one bucket; ``copies`` keeps what they read alive."""
    bucket, (mean, phase, mask, grads) = request.bucket, request.args
    state, parts = bucket.state, mean.parts
    has_residual = [c and phase != "dense" for c in bucket.compressed]
    weights, own = contiguous_weights(bucket), flatten(grads)
    copies.append((weights, own))
    return [
        kernels.AdamWRow(
            n,
            mask.bits[i],
            parts[i],
            weights[i],
            state["exp_avg"][i],
            state["exp_avg_sq"][i],
            state["step"][i],
            int(present[i]),
            state["residual"][i] if has_residual[i] else None,
            own[i],
            score.get(i),
            published_parameter(bucket, i),
        )
        for i, n in enumerate(bucket.lengths)
    ]


# AdamS


def update_adams(ops: KernelOps, requests: list[Together]) -> list[None]:
    """Do AdamS (equation 2) for all tensors."""
    for group in group_by_launch(requests):
        _launch_adams(ops, group)
    return [None] * len(requests)


def _launch_adams(ops: KernelOps, requests: list[Together]) -> None:
    buckets = [request.bucket for request in requests]
    blocks, h = blocks_of_all(buckets), buckets[0].group
    present = [one.bucket.present(one.args[0]) for one in requests]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.ScapeRow] = []
        for one, own in zip(requests, present, strict=True):
            rows += _adams_rows(one, own, copies)
        return kernels.scape_table(blocks, rows)

    key = make_key(*(commit_key(*pair) for pair in zip(requests, present, strict=True)))
    rows = ops.tables(("adams", requests[0].bucket.index), key, table)
    count_all_steps(requests)
    hyper = {name: h[name] for name in ("betas", "eps", "weight_decay", "bias_correction")}
    kernels.scape(blocks, blocks.firsts, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
    if key is None:
        for one, (weights, _), own in zip(requests, copies, present, strict=True):
            copy_back(one.bucket, weights, own)


def _adams_rows(
    request: Together, present: list[bool], copies: list[Copies]
) -> list[kernels.ScapeRow]:
    bucket, (mean,) = request.bucket, request.args
    m, step, weights = bucket.state["exp_avg"], bucket.state["step"], contiguous_weights(bucket)
    copies.append((weights, []))
    return [
        kernels.ScapeRow(
            n,
            None,
            None,
            m[i],
            mean.parts[i],
            weights[i],
            m[i],
            step[i],
            int(present[i]),
            public=published_parameter(bucket, i),
        )
        for i, n in enumerate(bucket.lengths)
    ]


# SCAPE


def update_scape(ops: KernelOps, requests: list[Together]) -> list[None]:
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
        _launch_scape(ops, group, old)
        for one, own in zip(group, old, strict=True):
            present = one.bucket.present(one.args[0])
            if not all(present):
                keep_absent_momenta(own.tensors, one.bucket.state["exp_avg"], present)
    return [None] * len(requests)


def _old_momenta(requests: list[Together]) -> list[OldMomenta]:
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


def _launch_scape(ops: KernelOps, requests: list[Together], old: list[OldMomenta]) -> None:
    """Do all but the selection."""
    buckets = [request.bucket for request in requests]
    blocks, h, on_v = blocks_of_all(buckets), buckets[0].group, requests[0].args[2]
    present = [one.bucket.present(one.args[0]) for one in requests]
    grads = [bucket.grads() for bucket in buckets]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.ScapeRow] = []
        for row in zip(requests, old, present, grads, strict=True):
            rows += _scape_rows(*row, copies)
        return kernels.scape_table(blocks, rows)

    key = make_key(
        *(
            make_key(
                commit_key(one, own),
                momenta.key,
                gradients_key(g),
                mask_key(one.bucket, one.args[1]),
                mask_key(one.bucket, one.bucket.cache["mask"]),
            )
            for one, momenta, own, g in zip(requests, old, present, grads, strict=True)
        )
    )
    rows = ops.tables(("scape", requests[0].bucket.index), key, table)
    count_all_steps(requests)
    names = ("betas", "eps", "weight_decay", "bias_correction", "maximize")
    kernels.scape(
        blocks,
        block_offsets_of_all(buckets, [one.args[1] for one in requests]),
        block_offsets_of_all(buckets, [bucket.cache["mask"] for bucket in buckets]),
        rows,
        lr=float(h["lr"]),
        clip=on_v,
        **{name: h[name] for name in names},
    )
    if key is None:
        for one, (weights, _), own in zip(requests, copies, present, strict=True):
            copy_back(one.bucket, weights, own)


def _scape_rows(
    request: Together,
    old: OldMomenta,
    present: list[bool],
    grads: Tensors,
    copies: list[Copies],
) -> list[kernels.ScapeRow]:
    """Return the rows of one bucket; ``copies`` keeps what they read alive."""
    bucket, (mean, mask, *_) = request.bucket, request.args
    state, held, old_momenta = bucket.state, bucket.cache["mask"], old.tensors
    weights, own = contiguous_weights(bucket), flatten(grads)
    copies.append((weights, own))
    dropped = mean.dropped_parts or [None] * len(own)
    return [
        kernels.ScapeRow(
            n,
            mask.bits[i],
            held.bits[i],
            old_momenta[i],
            mean.parts[i],
            weights[i],
            state["exp_avg"][i],
            state["step"][i],
            int(present[i]),
            state["residual"][i],
            own[i],
            published_parameter(bucket, i),
            dropped=dropped[i],
        )
        for i, n in enumerate(bucket.lengths)
    ]


# SEPARATE with a tracked projection


def commit_separate(ops: KernelOps, requests: list[Together]) -> list[None]:
    """Do lines 4 and 5 and AdamW's step: tensors whose average is a product in one launch, tensors
    that were sent whole in another.
    """
    for group in group_by_launch(requests):
        count_all_steps(group)
        _launch_factored(group)
        _launch_whole(group)
    return [None] * len(requests)


def _launch_factored(requests: list[Together]) -> None:
    rows: list[kernels.FactoredRow] = []
    updated = []
    for request in requests:
        bucket, (mean, factors, _, flags, _) = request.bucket, request.args
        present = [i for i, is_present in enumerate(flags) if is_present]
        state, weights, grads = bucket.state, contiguous_weights(bucket), flatten(bucket.grads())
        products = factors.factored(mean, present)
        rows += [
            kernels.FactoredRow(
                own.rows,
                own.columns,
                own.R.shape[1],
                own.R,
                *own.R.stride(),
                own.p,
                own.own,
                weights[own.i],
                state["exp_avg"][own.i],
                state["exp_avg_sq"][own.i],
                state["step"][own.i],
                state["residual"][own.i],
                own.dropped,
                grads[own.i],
                published_parameter(bucket, own.i),
            )
            for own in products
        ]
        updated.append((bucket, weights, [own.i for own in products]))
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
    for bucket, weights, tensors in updated:
        copy_back(bucket, weights, [i in tensors for i in range(len(weights))])


def _launch_whole(requests: list[Together]) -> None:
    rows: list[kernels.AdamWRow] = []
    updated = []
    for request in requests:
        bucket, (mean, factors, _, flags, factor) = request.bucket, request.args
        tensors = factors.whole([i for i, is_present in enumerate(flags) if is_present])
        state, weights = bucket.state, contiguous_weights(bucket)
        if factor != 1 and tensors:
            torch._foreach_mul_([mean.parts[i] for i in tensors], factor)
        rows += [
            kernels.AdamWRow(
                bucket.lengths[i],
                None,
                mean.parts[i],
                weights[i],
                state["exp_avg"][i],
                state["exp_avg_sq"][i],
                state["step"][i],
                1,
                public=published_parameter(bucket, i),
            )
            for i in tensors
        ]
        updated.append((bucket, weights, tensors))
    if not rows:
        return
    h, device = requests[0].bucket.group, rows[0].w.device
    blocks = kernels.make_blocks(tuple(row.n for row in rows), device)
    hyper = {name: h[name] for name in HYPER}
    kernels.adamw(blocks, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
    for (bucket, weights, tensors), request in zip(updated, requests, strict=True):
        copy_back(bucket, weights, [i in tensors for i in range(len(weights))])
        mean, factors, _, _, factor = request.args
        for i in tensors:
            factors.feed_back(i, mean, factor)
