"""What commits that take all tensors of a bucket at once have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.masks import Mask
from .._wire.requests import Payload
from . import math
from .ops import Group, Ops


def count_steps(steps: list[Tensor], present: list[bool]) -> None:
    """Count one step more of each tensor that any rank has a gradient of."""
    counted = [step for step, is_present in zip(steps, present, strict=True) if is_present]
    if counted:
        torch._foreach_add_(counted, 1)


def update_size(h: Group, w: Tensor, m: Tensor, v: Tensor, step: Tensor) -> Tensor:
    """The magnitude of what AdamW subtracts from each element of ``w``, over the learning rate."""
    names = ("betas", "eps", "weight_decay")
    hyper = {name: h[name] for name in names}
    return math.adamw_update(w, m, v, max(float(step), 1.0), **hyper).abs_()


def scores(bucket: Bucket, ops: Ops, phase: str) -> dict[int, Tensor]:
    """Memory for the sizes of the updates of each tensor, by its number, whose mask is chosen by
    them.
    """
    chosen = [i for i, c in enumerate(bucket.compressed) if c and phase == "resample"]
    lengths = [bucket.lengths[i] for i in chosen]
    flat = ops.scratch(bucket.flat["exp_avg"], sum(lengths), use="score")
    return dict(zip(chosen, flat.split(lengths), strict=True))


def owe_again(bucket: Bucket, ops: Ops, mean: Payload, mask: Mask, factor: float = 1.0) -> None:
    """Add the rounding errors of what was sent, times ``factor``, back to the residuals, which are
    0 there.
    """
    if mean.dropped is None:
        return
    for i, is_present in enumerate(bucket.present(mean)):
        if is_present and bucket.compressed[i]:
            residual, dropped = bucket.state["residual"][i], mean.dropped_parts[i]
            dropped = dropped if factor == 1 else dropped.mul_(factor)
            ops.put(residual, mask.positions[i], dropped)


def momenta_apart(bucket: Bucket, old: list[Tensor]) -> list[Tensor]:
    """The momenta of before in memory of their own, where the new ones would be written over
    them.
    """
    if old is not bucket.state["exp_avg"]:
        return old
    flat = bucket.flat["exp_avg"]
    before = bucket.memory("the momentum of before", flat.numel(), flat.dtype).copy_(flat)
    return list(before.split([m.numel() for m in old]))


def keep_absent(old: list[Tensor], new: list[Tensor], present: list[bool]) -> None:
    """The momenta of tensors that no rank has a gradient for stay as they are."""
    for before, after, here in zip(old, new, present, strict=True):
        if not here and after is not before:
            after.copy_(before.view_as(after))
