"""Commits of whole buckets by Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import compopt_kernels as kernels
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import Mask
from ..._wire.requests import Payload, Together
from ..commits import keep_absent, momenta_apart, owe_again, scores
from ..math import kept
from ..ops import HYPER
from .selection import TritonSelection
from .tables import (
    alike,
    blocks_of,
    blocks_of_all,
    bring_back,
    contiguous_weights,
    count_up,
    count_up_present,
    flattened,
    joined,
    published,
    starts_of,
)

if TYPE_CHECKING:
    from .ops import TritonOps


def radius_commits(ops: TritonOps, asked: list[Together]) -> list[list[Tensor]]:
    """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks.

    A resample step goes bucket by bucket: memory for scores is used again.
    """
    if any(phase == "resample" for _, phase, _, _ in (one.args for one in asked)):
        groups = [[one] for one in asked]
    else:
        groups = alike(asked)
    found = {id(one): masks for own in groups for one, masks in _radius_commits(ops, own)}
    return [found[id(one)] for one in asked]


def _radius_commits(
    ops: TritonOps, asked: list[Together]
) -> Iterator[tuple[Together, list[Tensor]]]:
    """For buckets that one launch takes."""
    rows: list[kernels.AdamWRow] = []
    starts, back = [], []
    for one in asked:
        bucket, (mean, phase, mask, grads) = one.bucket, one.args
        h, state, present = bucket.group, bucket.state, bucket.present(mean)
        compressed = [c and phase != "dense" for c in bucket.compressed]
        chosen = scores(bucket, ops, phase)
        weights, own = contiguous_weights(bucket), flattened(grads)
        rows += [
            kernels.AdamWRow(
                n,
                mask.bits[i],
                mean.parts[i],
                weights[i],
                state["exp_avg"][i],
                state["exp_avg_sq"][i],
                state["step"][i],
                int(present[i]),
                state["residual"][i] if compressed[i] else None,
                own[i],
                chosen.get(i),
                published(bucket, i),
            )
            for i, n in enumerate(bucket.lengths)
        ]
        starts.append(starts_of(bucket, mask))
        back.append((bucket, weights, present, chosen))
    count_up(asked)
    hyper = {name: h[name] for name in HYPER}
    kernels.adamw(blocks_of_all(asked), joined(starts), rows, lr=float(h["lr"]), **hyper)
    for one, (bucket, weights, present, chosen) in zip(asked, back, strict=True):
        bring_back(bucket, weights, present)
        owe_again(bucket, ops, one.args[0], one.args[2])
        ks = [kept(h["density"], len(x)) for x in chosen.values()]
        yield one, ops.largest(chosen.values(), ks)


def adams_commits(ops: TritonOps, asked: list[Together]) -> list[None]:
    """AdamS, equation 2, for all tensors."""
    for own in alike(asked):
        rows: list[kernels.ScapeRow] = []
        back = []
        for one in own:
            bucket, (mean,) = one.bucket, one.args
            present, m, step = bucket.present(mean), bucket.state["exp_avg"], bucket.state["step"]
            weights, parts = contiguous_weights(bucket), mean.parts
            rows += [
                kernels.ScapeRow(
                    n,
                    None,
                    None,
                    m[i],
                    parts[i],
                    weights[i],
                    m[i],
                    step[i],
                    int(present[i]),
                    public=published(bucket, i),
                )
                for i, n in enumerate(bucket.lengths)
            ]
            back.append((bucket, weights, present))
        count_up(own)
        blocks, h = blocks_of_all(own), own[0].bucket.group
        names = ("betas", "eps", "weight_decay", "bias_correction")
        hyper = {name: h[name] for name in names}
        kernels.scape(blocks, blocks.firsts, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
        for row in back:
            bring_back(*row)
    return [None] * len(asked)


def scape_commit(
    bucket: Bucket,
    ops: TritonOps,
    mean: Payload,
    mask: Mask,
    old: list[Tensor],
    factor: float,
    selection: TritonSelection | None,
) -> None:
    """SCAPE, lines 10, 11 and 16 to 21, for all tensors, and line 15 where a selection is given.

    ``mask``: what was exchanged; ``old``: the momenta of before, where they were held.
    """
    h, state, present = bucket.group, bucket.state, bucket.present(mean)
    new, held = state["exp_avg"], bucket.cache["mask"]
    if mask.sparse or held.sparse:  # places change: not in the same memory
        old = momenta_apart(bucket, old)
    if selection:
        selection.take(bucket.grads(), old)
    weights, own = contiguous_weights(bucket), flattened(bucket.grads())
    count_up_present(bucket, present)
    rows = [
        kernels.ScapeRow(
            n,
            mask.bits[i],
            held.bits[i],
            old[i],
            mean.parts[i],
            weights[i],
            new[i],
            state["step"][i],
            int(present[i]),
            state["residual"][i],
            own[i],
            published(bucket, i),
        )
        for i, n in enumerate(bucket.lengths)
    ]
    names = ("betas", "eps", "weight_decay", "bias_correction", "maximize")
    kernels.scape(
        blocks_of(bucket),
        starts_of(bucket, mask),
        starts_of(bucket, held),
        rows,
        lr=float(h["lr"]),
        clip=factor,
        **{name: h[name] for name in names},
    )
    keep_absent(old, new, present)
    bring_back(bucket, weights, present)
    owe_again(bucket, ops, mean, mask, 1 - h["betas"][0])
