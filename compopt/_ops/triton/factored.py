"""SEPARATE's commit by Triton kernels, of all buckets whose projections are tracked."""

from __future__ import annotations

import compopt_kernels as kernels
import torch

from ..._wire.requests import Payload, Together
from ..factored import Factors
from ..fused import HYPER
from .tables import (
    KernelOps,
    alike,
    bring_back,
    contiguous_weights,
    count_all_steps,
    flattened,
    published,
)


def separate_commits(ops: KernelOps, asked: list[Together]) -> list[None]:
    """Lines 4 and 5 and AdamW's step: what is a product in one launch, what was sent whole in
    another.
    """
    for own in alike(asked):
        count_all_steps(own)
        _factored(own)
        _whole(own)
    return [None] * len(asked)


def _factored(asked: list[Together]) -> None:
    rows: list[kernels.FactoredRow] = []
    back = []
    for one in asked:
        bucket, (mean, factors, _, present, _) = one.bucket, one.args
        present = [i for i, is_present in enumerate(present) if is_present]
        state, weights, grads = bucket.state, contiguous_weights(bucket), flattened(bucket.grads())
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
                published(bucket, own.i),
            )
            for own in products
        ]
        back.append((bucket, weights, [own.i for own in products]))
    if not rows:
        return
    h, factors, factor = asked[0].bucket.group, asked[0].args[1], asked[0].args[4]
    share = max(one.args[1].share(factor) for one in asked)
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
    for bucket, weights, there in back:
        bring_back(bucket, weights, [i in there for i in range(len(weights))])


def _whole(asked: list[Together]) -> None:
    rows: list[kernels.AdamWRow] = []
    back = []
    for one in asked:
        bucket, (mean, factors, _, present, factor) = one.bucket, one.args
        there = factors.whole([i for i, is_present in enumerate(present) if is_present])
        state, weights = bucket.state, contiguous_weights(bucket)
        if factor != 1 and there:
            torch._foreach_mul_([mean.parts[i] for i in there], factor)
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
                public=published(bucket, i),
            )
            for i in there
        ]
        back.append((bucket, weights, there))
    if not rows:
        return
    h, blocks = asked[0].bucket.group, kernels.cut(tuple(row.n for row in rows), rows[0].w.device)
    hyper = {name: h[name] for name in HYPER}
    kernels.adamw(blocks, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
    for (bucket, weights, there), one in zip(back, asked, strict=True):
        bring_back(bucket, weights, [i in there for i in range(len(weights))])
        _feed_back(one.args[1], one.args[0], there, one.args[4])


def _feed_back(factors: Factors, mean: Payload, there: list[int], factor: float) -> None:
    """What remains of tensors that were sent whole."""
    for i in there:
        factors.feed_back(i, mean, factor)
