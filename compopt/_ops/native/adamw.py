"""AdamW by a C pass (kernels/native/adamw.c): Radius's commit of a bucket, and single tensors of
sharded state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import Mask, Tensors
from ..._wire.requests import Payload
from ..commits import owe_again, scores, update_size
from ..math import kept
from ..ops import Group, Ops
from .tables import Options, Table, addresses, along, at, floats, over_rows, plain


class AdamWPasses(Ops):
    """What of ``Ops`` is AdamW."""

    library: ctypes.CDLL

    def adamw_ahead(
        self,
        group: Group,
        w: Tensor,
        g: Tensor,
        index: Tensor | None,
        m: Tensor,
        v: Tensor,
        step: Tensor,
        out: Tensor,
    ) -> None:
        if not plain(w, g, m, v, out, step):
            return super().adamw_ahead(group, w, g, index, m, v, step, out)
        self._adamw_part(
            group, w, g, index, m, v, step, at("what parameters become", out, w.numel()), 0
        )

    def adamw_moments(
        self,
        group: Group,
        w: Tensor,
        g: Tensor,
        index: Tensor | None,
        m: Tensor,
        v: Tensor,
        step: Tensor,
    ) -> None:
        if not plain(w, g, m, v, step):
            return super().adamw_moments(group, w, g, index, m, v, step)
        self._adamw_part(group, w, g, index, m, v, step, 0, 1)

    def _adamw_part(
        self,
        group: Group,
        w: Tensor,
        g: Tensor,
        index: Tensor | None,
        m: Tensor,
        v: Tensor,
        step: Tensor,
        ahead: int,
        moments: int,
    ) -> None:
        n, k = w.numel(), g.numel()
        index = None if index is None else index.int()
        table = Table(
            1,
            n=n,
            w=at("a parameter", w, n),
            m=at("exp_avg", m, n),
            v=at("exp_avg_sq", v, n),
            step=at("the number of steps", step, 1),
            mean=at("an averaged gradient", g, n if index is None else k),
            mask=0,
            index=at("positions", index, k, torch.int32),
            k=k,
            residual=0,
            g=0,
            score=0,
            ahead=ahead,
            moments=moments,
        )
        if self.library.adamw(table, 0, 1, adamw_options(group)) >= 0:
            raise RuntimeError(
                f"positions of an averaged gradient are not ascending within a tensor of {n} "
                "elements."
            )


def radius_commit(
    bucket: Bucket, ops: AdamWPasses, mean: Payload, phase: str, mask: Mask, grads: Tensors
) -> list[Tensor]:
    """Radius, lines 10, 15, 16 and 21 to 25, for all tensors; returns line 22's masks."""
    h, state, lengths = bucket.group, bucket.state, bucket.lengths
    present = bucket.present(mean)
    chosen = scores(bucket, ops, phase)
    for i, size in chosen.items():
        if not present[i]:
            w, m, v = bucket.weight(i), state["exp_avg"][i], state["exp_avg_sq"][i]
            size.copy_(update_size(h, w, m, v, state["step"][i]).view(-1))
    weights, own, values, sent = bucket.weights, floats(grads), whole(mean), mask.sizes
    table = Table(
        len(grads),
        n=lengths,
        w=addresses("parameters", weights, lengths),
        m=state_of(bucket, "exp_avg"),
        v=state_of(bucket, "exp_avg_sq"),
        step=steps_of(bucket, present),
        mean=addresses("an averaged gradient", values, sent),
        mask=masks_of(mask.bits, lengths) if mask.sparse else 0,
        index=0,
        k=sent,
        residual=state_of(bucket, "residual") if phase != "dense" else 0,
        g=addresses("gradients", own, lengths),
        score=addresses("scores", [chosen.get(i) for i in range(len(grads))], lengths),
        ahead=0,
        moments=0,
    )
    hyper = adamw_options(h)
    wrong = over_rows(lengths, lambda first, last, _: ops.library.adamw(table, first, last, hyper))
    refuse(bucket, wrong)
    owe_again(bucket, ops, mean, mask)
    return [ops.top_k(x, kept(h["density"], len(x))) for x in chosen.values()]


def adamw_options(h: Group) -> Options:
    (beta1, beta2), sign = h["betas"], -1.0 if h["maximize"] else 1.0
    return Options(float(h["lr"]), beta1, beta2, h["eps"], h["weight_decay"], sign)


def state_of(bucket: Bucket, name: str) -> list[int]:
    """Where each tensor's state of this name is, in the bucket's; 0 for a tensor that has none."""
    sizes = [
        0 if view is None else n for view, n in zip(bucket.state[name], bucket.lengths, strict=True)
    ]
    places = along(name, bucket.flat[name], sizes)
    return [
        0 if view is None else place for view, place in zip(bucket.state[name], places, strict=True)
    ]


def steps_of(bucket: Bucket, present: list[bool]) -> list[int]:
    """Where the step counts are of tensors that take part in a step."""
    steps = [
        step if here else None for step, here in zip(bucket.state["step"], present, strict=True)
    ]
    return addresses("numbers of steps", steps, [1] * len(steps))


def masks_of(masks: Sequence[Tensor | None], lengths: list[int]) -> list[int]:
    return addresses("packed masks", masks, [(n + 7) // 8 for n in lengths], torch.uint8)


def whole(payload: Payload) -> Sequence[Tensor]:
    """The averaged values in float32."""
    if payload.flat.dtype == torch.float32:
        return payload.parts
    return list(payload.body.float().split([len(part) for part in payload.parts]))


def refuse(bucket: Bucket, wrong: int) -> None:
    """Raise where a pass came upon positions that are not where they may be."""
    if wrong >= 0:
        raise RuntimeError(
            f"positions or a mask of {bucket.names[wrong]} do not fit its {bucket.lengths[wrong]} "
            "elements: the optimizer's state was changed from outside, or an earlier step was "
            "interrupted. Load a checkpoint."
        )
