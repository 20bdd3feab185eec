"""Commits of whole buckets by Triton kernels: Radius and AdamS."""

from __future__ import annotations

from collections.abc import Iterator

import compopt_kernels as kernels
from torch import Tensor

from ..._wire.requests import Together
from ..commits import owe_again, scores
from ..fused import HYPER
from ..math import kept
from .places import Copies, bits_places, commit_places, known, read_places
from .tables import (
    KernelOps,
    alike,
    blocks_of_all,
    bring_back,
    contiguous_weights,
    count_all_steps,
    flattened,
    published,
    starts_of_all,
)


def radius_commits(ops: KernelOps, asked: list[Together]) -> list[list[Tensor]]:
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
    ops: KernelOps, asked: list[Together]
) -> Iterator[tuple[Together, list[Tensor]]]:
    """For buckets that one launch takes."""
    buckets = [one.bucket for one in asked]
    blocks, h = blocks_of_all(buckets), buckets[0].group
    present = [one.bucket.present(one.args[0]) for one in asked]
    chosen = [scores(one.bucket, ops, one.args[1]) for one in asked]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.AdamWRow] = []
        for one, own, score in zip(asked, present, chosen, strict=True):
            rows += _radius_rows(one, own, score, copies)
        return kernels.adamw_table(blocks, rows)

    known_to_lie = [
        known(
            commit_places(one, own),
            one.args[1],
            bits_places(one.bucket, one.args[2]),
            read_places(one.args[3]),
        )
        for one, own, score in zip(asked, present, chosen, strict=True)
        if not score
    ]
    key = known(*known_to_lie) if len(known_to_lie) == len(asked) else None
    rows = ops.tables(("radius", asked[0].bucket.index), key, table)
    count_all_steps(asked)
    hyper = {name: h[name] for name in HYPER}
    starts = starts_of_all(buckets, [one.args[2] for one in asked])
    kernels.adamw(blocks, starts, rows, lr=float(h["lr"]), **hyper)
    for n, (one, score) in enumerate(zip(asked, chosen, strict=True)):
        bucket = one.bucket
        if key is None:
            bring_back(bucket, copies[n][0], present[n])
        owe_again(bucket, ops, one.args[0], one.args[2])
        ks = [kept(h["density"], len(x)) for x in score.values()]
        yield one, ops.largest(score.values(), ks)


def _radius_rows(
    one: Together, present: list[bool], score: dict[int, Tensor], copies: list[Copies]
) -> list[kernels.AdamWRow]:
    """Those of one bucket; ``copies`` keeps what they read alive."""
    bucket, (mean, phase, mask, grads) = one.bucket, one.args
    state, parts = bucket.state, mean.parts
    compressed = [c and phase != "dense" for c in bucket.compressed]
    weights, own = contiguous_weights(bucket), flattened(grads)
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
            state["residual"][i] if compressed[i] else None,
            own[i],
            score.get(i),
            published(bucket, i),
        )
        for i, n in enumerate(bucket.lengths)
    ]


def adams_commits(ops: KernelOps, asked: list[Together]) -> list[None]:
    """AdamS, equation 2, for all tensors."""
    for own in alike(asked):
        _adams_commits(ops, own)
    return [None] * len(asked)


def _adams_commits(ops: KernelOps, asked: list[Together]) -> None:
    """For buckets that one launch takes."""
    buckets = [one.bucket for one in asked]
    blocks, h = blocks_of_all(buckets), buckets[0].group
    present = [one.bucket.present(one.args[0]) for one in asked]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.ScapeRow] = []
        for one, own in zip(asked, present, strict=True):
            bucket, (mean,) = one.bucket, one.args
            m, step, weights = (
                bucket.state["exp_avg"],
                bucket.state["step"],
                contiguous_weights(bucket),
            )
            copies.append((weights, []))
            rows += [
                kernels.ScapeRow(
                    n,
                    None,
                    None,
                    m[i],
                    mean.parts[i],
                    weights[i],
                    m[i],
                    step[i],
                    int(own[i]),
                    public=published(bucket, i),
                )
                for i, n in enumerate(bucket.lengths)
            ]
        return kernels.scape_table(blocks, rows)

    key = known(*(commit_places(*pair) for pair in zip(asked, present, strict=True)))
    rows = ops.tables(("adams", asked[0].bucket.index), key, table)
    count_all_steps(asked)
    hyper = {name: h[name] for name in ("betas", "eps", "weight_decay", "bias_correction")}
    kernels.scape(blocks, blocks.firsts, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
    if key is None:
        for one, (weights, _), own in zip(asked, copies, present, strict=True):
            bring_back(one.bucket, weights, own)
