"""A rank's own step, of which other ranks hear nothing, and what becomes of errors in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._engine import gradients
from .._engine.behind import behind, has_gate
from .._engine.engine import Engine
from .._engine.signals import held_back
from .._ops.clipping import clip_factor, scale_all_
from .._state.buckets import local
from .._wire.warning import warn
from .fragments import Fragment
from .norms import Norm


def take(engine: Engine, inner: torch.optim.Optimizer, clip: float | None) -> Norm:
    """Step ``inner``, unless a gradient is not finite, and count the step; gradients are clipped to
    norm ``clip``. Signals that come meanwhile are handled after it.

    Returns the gradients' norm. It is finite where the step was taken, and not read yet where an
    ``inner`` with a gate finds that out on the device.
    """
    gradients.check(engine)
    gradients.unscale(engine)
    params = [p for group in inner.param_groups for p in group["params"]]
    own = [local(p.grad) for p in params if p.grad is not None]
    norm = Norm(own)
    if norm.there is not None and has_gate(inner):
        _take_behind(engine, inner, own, norm.there, clip)
        return norm
    taken = math.isfinite(norm.read())
    scale_all_(own, clip_factor(norm.read(), clip) if taken else 1.0)
    with held_back():
        if taken:
            inner.step()
        _count(engine, taken)
    return norm


def _take_behind(
    engine: Engine,
    inner: torch.optim.Optimizer,
    own: list[Tensor],
    norm: Tensor,
    clip: float | None,
) -> None:
    """The same, without waiting for the norm."""
    taken = norm.isfinite()
    factor = clip_factor(norm.double(), clip)
    if isinstance(factor, Tensor):
        scale_all_(own, factor.where(taken, 1.0))
    with held_back():
        with behind(inner, taken):
            inner.step()
        _count(engine, taken)


def _count(engine: Engine, taken: bool | Tensor) -> None:
    """One step more, of the optimizer, and where it was ``taken`` of the tensors that moved."""
    for group in engine.option_groups:
        group["step"] += 1
    steps = [
        number
        for bucket in engine.buckets
        for p, number in zip(bucket.params, bucket.state["step"], strict=True)
        if taken is not False and p.grad is not None
    ]
    if steps and isinstance(taken, Tensor):
        torch._foreach_add_(steps, [taken.float()] * len(steps))
    elif steps:
        torch._foreach_add_(steps, 1)


def mend(
    inner: torch.optim.Optimizer, applied: Sequence[Fragment], engine: Engine, warned: bool
) -> bool:
    """Where this rank's parameters were not finite, and are the others' now: its moments may not be
    finite either, and begin anew.

    Returns whether the user has been told, now or before.
    """
    for fragment in (fragment for fragment in applied if fragment.lost):
        fragment.lost = False
        for p in fragment.params:
            for value in inner.state.get(p, {}).values():
                if isinstance(value, Tensor) and not bool(value.isfinite().all()):
                    value.zero_()
        if not warned:
            warned = True
            warn(
                f"rank {engine.comm.rank} had parameters that are not finite after step "
                f"{engine.steps}: it took the other ranks' average, and its moments begin anew. "
                "Lower the learning rate, or clip (max_grad_norm=).",
                0,  # on this rank, whichever it is
            )
    return warned


def watch_skips(engine: Engine, taken: bool, limit: int) -> None:
    """Raise where this rank has skipped too many of its steps."""
    engine.skipped_in_a_row = 0 if taken else engine.skipped_in_a_row + 1
    if engine.skipped_in_a_row >= limit:
        raise FloatingPointError(
            f"{engine.skipped_in_a_row} steps in a row were skipped, the last because of "
            f"{engine.stats.reason}: lower the learning rate or look for what makes the loss "
            "overflow (max_skipped is the limit)."
        )
