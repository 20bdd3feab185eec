"""Commits of whole buckets by Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket, Gate
from ..._state.masks import Tensors
from ..._wire.requests import Together
from ..commits import keep_absent, owe_again, scores
from ..fused import HYPER
from ..math import kept
from .places import (
    Before,
    Key,
    bits_places,
    gates_known,
    known,
    message,
    places,
    read_places,
)
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

# Of one bucket weights and gradients that are contiguous: copies, where they were not. They have to
# live until a kernel has been launched.
Copies = tuple[list[Tensor], Tensors]


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
    buckets = [one.bucket for one in asked]
    blocks, h = blocks_of_all(buckets), buckets[0].group
    gates = [one.bucket.gates(one.args[0]) for one in asked]
    chosen = [scores(one.bucket, ops, one.args[1]) for one in asked]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.AdamWRow] = []
        for one, own_gates, score in zip(asked, gates, chosen, strict=True):
            rows += _radius_rows(one, own_gates, score, copies)
        return kernels.adamw_table(blocks, rows)

    known_to_lie = [
        known(
            _places(one, own),
            one.args[1],
            bits_places(one.bucket, one.args[2]),
            read_places(one.args[3]),
        )
        for one, own, score in zip(asked, gates, chosen, strict=True)
        if not score
    ]
    key = known(*known_to_lie) if len(known_to_lie) == len(asked) else None
    rows = ops.tables(("radius", asked[0].bucket.index), key, table)
    count_up(asked)
    hyper = {name: h[name] for name in HYPER}
    starts = starts_of_all(buckets, [one.args[2] for one in asked])
    squares = _squares(buckets, blocks)
    kernels.adamw(blocks, starts, rows, lr=float(h["lr"]), squares=squares, **hyper)
    _note_norm(buckets, squares)
    for n, (one, score) in enumerate(zip(asked, chosen, strict=True)):
        bucket = one.bucket
        if key is None:
            bring_back(bucket, copies[n][0], gates[n])
        owe_again(bucket, ops, one.args[0], one.args[2])
        ks = [kept(h["density"], len(x)) for x in score.values()]
        yield one, ops.largest(score.values(), ks)


def _radius_rows(
    one: Together, gates: list[Gate], score: dict[int, Tensor], copies: list[Copies]
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
            updated(gates[i]),
            state["residual"][i] if compressed[i] else None,
            own[i],
            score.get(i),
            published(bucket, i),
        )
        for i, n in enumerate(bucket.lengths)
    ]


def adams_commits(ops: TritonOps, asked: list[Together]) -> list[None]:
    """AdamS, equation 2, for all tensors."""
    for own in alike(asked):
        _adams_commits(ops, own)
    return [None] * len(asked)


def _adams_commits(ops: TritonOps, asked: list[Together]) -> None:
    """For buckets that one launch takes."""
    buckets = [one.bucket for one in asked]
    blocks, h = blocks_of_all(buckets), buckets[0].group
    gates = [one.bucket.gates(one.args[0]) for one in asked]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.ScapeRow] = []
        for one, own in zip(asked, gates, strict=True):
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
                    updated(own[i]),
                    public=published(bucket, i),
                )
                for i, n in enumerate(bucket.lengths)
            ]
        return kernels.scape_table(blocks, rows)

    key = known(*(_places(*pair) for pair in zip(asked, gates, strict=True)))
    rows = ops.tables(("adams", asked[0].bucket.index), key, table)
    count_up(asked)
    hyper = {name: h[name] for name in ("betas", "eps", "weight_decay", "bias_correction")}
    squares, firsts = _squares(buckets, blocks), blocks.firsts
    kernels.scape(blocks, firsts, firsts, rows, lr=float(h["lr"]), squares=squares, **hyper)
    _note_norm(buckets, squares)
    if key is None:
        for one, (weights, _), own in zip(asked, copies, gates, strict=True):
            bring_back(one.bucket, weights, own)


def _squares(buckets: list[Bucket], blocks: kernels.Blocks) -> Tensor | None:
    """Memory for the parts of the norm that the commit is to find, if it is."""
    if buckets[0].squares is None:
        return None
    return torch.empty(blocks.count, dtype=torch.float64, device=blocks.where.device)


def _note_norm(buckets: list[Bucket], squares: Tensor | None) -> None:
    if squares is not None and buckets[0].squares is not None:
        buckets[0].squares.append(squares.sum())


def _places(one: Together, gates: list[Gate]) -> Key:
    """What tells where the tensors lie that a commit writes, and the average that it reads."""
    return known(places(one.bucket), message(one.args[0]), gates_known(gates))


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
        _scape_commits(ops, own, olds)
        for one, old in zip(own, olds, strict=True):
            bucket = one.bucket
            if bucket.behind is not None:  # the new momenta are where the old ones were
                continue
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


def _scape_commits(ops: TritonOps, asked: list[Together], olds: list[Before]) -> None:
    """All but the selection, for buckets that one launch takes."""
    buckets = [one.bucket for one in asked]
    blocks, h, factor = blocks_of_all(buckets), buckets[0].group, asked[0].args[3]
    gates = [one.bucket.gates(one.args[0]) for one in asked]
    grads = [one.bucket.grads() for one in asked]
    copies: list[Copies] = []

    def table() -> kernels.Table:
        rows: list[kernels.ScapeRow] = []
        for row in zip(asked, olds, gates, grads, strict=True):
            rows += _scape_rows(*row, copies)
        return kernels.scape_table(blocks, rows)

    key = known(
        *(
            known(
                _places(one, own),
                old.places,
                read_places(g),
                bits_places(one.bucket, one.args[1]),
                bits_places(one.bucket, one.bucket.cache["mask"]),
            )
            for one, old, own, g in zip(asked, olds, gates, grads, strict=True)
        )
    )
    rows = ops.tables(("scape", asked[0].bucket.index), key, table)
    count_up(asked)
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
        for one, (weights, _), own in zip(asked, copies, gates, strict=True):
            bring_back(one.bucket, weights, own)


def _scape_rows(
    one: Together,
    before: Before,
    gates: list[Gate],
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
            updated(gates[i]),
            state["residual"][i],
            own[i],
            published(bucket, i),
            dropped=rests[i],
        )
        for i, n in enumerate(bucket.lengths)
    ]
