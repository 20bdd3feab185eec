"""Commits of whole buckets by Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._wire.requests import Together
from ..commits import keep_absent, owe_again, scores
from ..fused import HYPER
from ..math import kept
from .selection import Taken, take
from .tables import (
    alike,
    blocks_of_all,
    bring_back,
    contiguous_weights,
    count_up,
    flattened,
    published,
    starts_of_all,
    updated,
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
    back = []
    for one in asked:
        bucket, (mean, phase, mask, grads) = one.bucket, one.args
        h, state, gates = bucket.group, bucket.state, bucket.gates(mean)
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
                updated(gates[i]),
                state["residual"][i] if compressed[i] else None,
                own[i],
                chosen.get(i),
                published(bucket, i),
            )
            for i, n in enumerate(bucket.lengths)
        ]
        back.append((bucket, weights, gates, chosen))
    count_up(asked)
    hyper = {name: h[name] for name in HYPER}
    starts = starts_of_all(asked, [one.args[2] for one in asked])
    kernels.adamw(blocks_of_all(asked), starts, rows, lr=float(h["lr"]), **hyper)
    for one, (bucket, weights, gates, chosen) in zip(asked, back, strict=True):
        bring_back(bucket, weights, gates)
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
            gates, m, step = bucket.gates(mean), bucket.state["exp_avg"], bucket.state["step"]
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
                    updated(gates[i]),
                    public=published(bucket, i),
                )
                for i, n in enumerate(bucket.lengths)
            ]
            back.append((bucket, weights, gates))
        count_up(own)
        blocks, h = blocks_of_all(own), own[0].bucket.group
        names = ("betas", "eps", "weight_decay", "bias_correction")
        hyper = {name: h[name] for name in names}
        kernels.scape(blocks, blocks.firsts, blocks.firsts, rows, lr=float(h["lr"]), **hyper)
        for row in back:
            bring_back(*row)
    return [None] * len(asked)


def scape_commits(ops: TritonOps, asked: list[Together]) -> list[None]:
    """SCAPE, lines 10, 11 and 16 to 21, for all tensors, and line 15 where selections are given.

    Of each bucket: what was exchanged, its mask; the momenta of before, where they were held; a
    factor on G in v, the same for all; the selection.
    """
    for own in alike(asked):
        olds = _momenta_apart(own)
        taken = [
            Taken(one.args[4], one.bucket.grads(), old)
            for one, old in zip(own, olds, strict=True)
            if one.args[4]
        ]
        if taken:
            take(taken)
        _scape_commits(own, olds)
        for one, old in zip(own, olds, strict=True):
            if one.bucket.behind is None:  # else the new momenta are where the old ones were
                keep_absent(old, one.bucket.state["exp_avg"], one.bucket.present(one.args[0]))
    return [None] * len(asked)


def _momenta_apart(asked: list[Together]) -> list[list[Tensor]]:
    """The momenta of before of each bucket, in memory of their own where places change."""
    olds: list[list[Tensor]] = [one.args[2] for one in asked]
    moved = [
        n
        for n, (one, old) in enumerate(zip(asked, olds, strict=True))
        if old is one.bucket.state["exp_avg"]
        and (one.args[1].sparse or one.bucket.cache["mask"].sparse)
    ]
    flats = [asked[n].bucket.flat["exp_avg"] for n in moved]
    copies = [torch.empty_like(flat) for flat in flats]
    if flats:
        torch._foreach_copy_(copies, flats)
    for n, copy in zip(moved, copies, strict=True):
        olds[n] = list(copy.split([m.numel() for m in olds[n]]))
    return olds


def _scape_commits(asked: list[Together], olds: list[list[Tensor]]) -> None:
    """All but the selection, for buckets that one launch takes."""
    rows: list[kernels.ScapeRow] = []
    back = []
    for one, old in zip(asked, olds, strict=True):
        bucket, (mean, mask, *_) = one.bucket, one.args
        state, held, gates = bucket.state, bucket.cache["mask"], bucket.gates(mean)
        weights, own = contiguous_weights(bucket), flattened(bucket.grads())
        rests = mean.dropped_parts or [None] * len(own)
        rows += [
            kernels.ScapeRow(
                n,
                mask.bits[i],
                held.bits[i],
                old[i],
                mean.parts[i],
                weights[i],
                state["exp_avg"][i],
                state["step"][i],
                updated(gates[i]),
                state["residual"][i],
                own[i],
                published(bucket, i),
                dropped=rests[i],
            )
            for i, n in enumerate(bucket.lengths)
        ]
        back.append((bucket, weights, gates))
    count_up(asked)
    h, factor = asked[0].bucket.group, asked[0].args[3]
    names = ("betas", "eps", "weight_decay", "bias_correction", "maximize")
    kernels.scape(
        blocks_of_all(asked),
        starts_of_all(asked, [one.args[1] for one in asked]),
        starts_of_all(asked, [one.bucket.cache["mask"] for one in asked]),
        rows,
        lr=float(h["lr"]),
        clip=factor,
        **{name: h[name] for name in names},
    )
    for row in back:
        bring_back(*row)
