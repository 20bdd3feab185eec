"""Commits of whole buckets by Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import compopt_kernels as kernels
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import Mask, Tensors
from ..._wire.requests import Payload
from ..commits import keep_absent, momenta_apart, owe_again, scores
from ..math import kept
from ..ops import HYPER
from .selection import TritonSelection
from .tables import (
    blocks_of,
    bring_back,
    contiguous_weights,
    count_up,
    flattened,
    published,
    starts_of,
)

if TYPE_CHECKING:
    from .ops import TritonOps


def radius_commit(
    bucket: Bucket, ops: TritonOps, mean: Payload, phase: str, mask: Mask, grads: Tensors
) -> list[Tensor]:
    """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks."""
    h, state, present = bucket.group, bucket.state, bucket.present(mean)
    compressed = [c and phase != "dense" for c in bucket.compressed]
    chosen = scores(bucket, ops, phase)
    weights, own = contiguous_weights(bucket), flattened(grads)
    rows = [
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
    count_up(bucket, present)
    hyper = {name: h[name] for name in HYPER}
    kernels.adamw(blocks_of(bucket), starts_of(bucket, mask), rows, lr=float(h["lr"]), **hyper)
    bring_back(bucket, weights, present)
    owe_again(bucket, ops, mean, mask)
    return ops.largest(chosen.values(), [kept(h["density"], len(x)) for x in chosen.values()])


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
    count_up(bucket, present)
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
