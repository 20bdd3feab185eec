"""Commits of whole buckets by Triton kernels: SCAPE."""

from __future__ import annotations

import compopt_kernels as kernels
import torch

from ..._state.masks import Tensors
from ..._wire.requests import Together
from ..commits import keep_absent
from .places import Before, Copies, bits_places, commit_places, known, read_places
from .selection import Taken, take
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


def scape_commits(ops: KernelOps, asked: list[Together]) -> list[None]:
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
        _scape_commits(ops, own, olds)
        for one, old in zip(own, olds, strict=True):
            bucket = one.bucket
            present = bucket.present(one.args[0])
            if not all(present):
                keep_absent(old.tensors, bucket.state["exp_avg"], present)
    return [None] * len(asked)


def _momenta_apart(asked: list[Together]) -> list[Before]:
    """The momenta of before of each bucket, in memory of their own where places change."""
    olds = [Before(one.bucket, one.args[2]) for one in asked]
    moved = [
        n
        for n, one in enumerate(asked)
        if one.args[2] is one.bucket.state["exp_avg"]
        and (one.args[1].sparse or one.bucket.cache["mask"].sparse)
    ]
    flats = [asked[n].bucket.flat["exp_avg"] for n in moved]
    copies = [torch.empty_like(flat) for flat in flats]
    if flats:
        torch._foreach_copy_(copies, flats)
    for n, copy in zip(moved, copies, strict=True):
        olds[n] = Before(asked[n].bucket, None, copy)
    return olds


def _scape_commits(ops: KernelOps, asked: list[Together], olds: list[Before]) -> None:
    """All but the selection, for buckets that one launch takes."""
    buckets = [one.bucket for one in asked]
    blocks, h, factor = blocks_of_all(buckets), buckets[0].group, asked[0].args[3]
    present = [one.bucket.present(one.args[0]) for one in asked]
    grads = [one.bucket.grads() for one in asked]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.ScapeRow] = []
        for row in zip(asked, olds, present, grads, strict=True):
            rows += _scape_rows(*row, copies)
        return kernels.scape_table(blocks, rows)

    key = known(
        *(
            known(
                commit_places(one, own),
                old.places,
                read_places(g),
                bits_places(one.bucket, one.args[1]),
                bits_places(one.bucket, one.bucket.cache["mask"]),
            )
            for one, old, own, g in zip(asked, olds, present, grads, strict=True)
        )
    )
    rows = ops.tables(("scape", asked[0].bucket.index), key, table)
    count_all_steps(asked)
    names = ("betas", "eps", "weight_decay", "bias_correction", "maximize")
    kernels.scape(
        blocks,
        starts_of_all(buckets, [one.args[1] for one in asked]),
        starts_of_all(buckets, [bucket.cache["mask"] for bucket in buckets]),
        rows,
        lr=float(h["lr"]),
        clip=factor,
        **{name: h[name] for name in names},
    )
    if key is None:
        for one, (weights, _), own in zip(asked, copies, present, strict=True):
            bring_back(one.bucket, weights, own)


def _scape_rows(
    one: Together,
    before: Before,
    present: list[bool],
    grads: Tensors,
    copies: list[Copies],
) -> list[kernels.ScapeRow]:
    """Those of one bucket; ``copies`` keeps what they read alive."""
    bucket, (mean, mask, *_) = one.bucket, one.args
    state, held, old, parts = bucket.state, bucket.cache["mask"], before.tensors, mean.parts
    weights, own = contiguous_weights(bucket), flattened(grads)
    copies.append((weights, own))
    rests = mean.dropped_parts or [None] * len(own)
    return [
        kernels.ScapeRow(
            n,
            mask.bits[i],
            held.bits[i],
            old[i],
            parts[i],
            weights[i],
            state["exp_avg"][i],
            state["step"][i],
            int(present[i]),
            state["residual"][i],
            own[i],
            published(bucket, i),
            dropped=rests[i],
        )
        for i, n in enumerate(bucket.lengths)
    ]
