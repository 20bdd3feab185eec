"""A rank's own step, of which other ranks hear nothing, and what becomes of errors in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._engine import gradients
from .._engine.engine import Engine
from .._engine.signals import held_back
from .._ops.norms import clip_factor, scale_all_
from .._state.buckets import local
from .._wire.warning import warn
from .fragments import Fragment


def take(engine: Engine, inner: torch.optim.Optimizer, clip: float | None) -> float:
    """Step ``inner``, unless a gradient is not finite, and count the step; gradients are clipped to
    norm ``clip``. Signals that come meanwhile are handled after it.

    Returns the gradients' norm, which is finite where the step was taken.
    """
    gradients.check(engine)
    gradients.unscale(engine)
    params = [p for group in inner.param_groups for p in group["params"]]
    own = [local(p.grad) for p in params if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(own)) if own else 0.0
    taken = math.isfinite(norm)
    scale_all_(own, clip_factor(norm, clip) if taken else 1.0)
    with held_back():
        if taken:
            inner.step()
        _count(engine, taken)
    return norm


def _count(engine: Engine, taken: bool) -> None:
    """One step more, of the optimizer, and where it was ``taken`` of the tensors that moved."""
    for group in engine.option_groups:
        group["step"] += 1
    steps = [
        number
        for bucket in engine.buckets
        for p, number in zip(bucket.params, bucket.state["step"], strict=True)
        if taken and p.grad is not None
    ]
    if steps:
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
