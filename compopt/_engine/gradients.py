"""Gradients before they are sent: whether they fit, and a scale that a GradScaler left on them."""

from __future__ import annotations

import torch

from .._state.buckets import local
from . import frozen
from .engine import Engine


def check(engine: Engine) -> None:
    """Raise TypeError where a tensor is not what the optimizer was made for."""
    for bucket in engine.buckets:
        for p, n, name in zip(bucket.params, bucket.lengths, bucket.names, strict=True):
            if p.dtype != bucket.dtype or p.device != bucket.device or local(p).numel() != n:
                raise TypeError(
                    f"{name} has {local(p).numel()} elements of {p.dtype} on {p.device} here, "
                    f"and had {n} of {bucket.dtype} on {bucket.device} when the optimizer was "
                    "made: make the optimizer after the model is converted, moved or resized."
                )
            if p.grad is not None and p.grad.is_sparse:
                raise TypeError(
                    f"{engine.name} got a sparse gradient for {name}: use dense "
                    "gradients (sparse=False)."
                )


def unscale(engine: Engine) -> float | None:
    """Divide by the GradScaler's scale, which may differ between ranks, what it left scaled.

    Returns that scale. With a scaler no bucket starts in backward: the gradients are not yet what
    will be sent.
    """
    face = engine.face
    engine.scaled = hasattr(face, "found_inf")
    scale = getattr(face, "grad_scale", None)
    if scale is None:
        return None
    _scale_by(engine, float(scale.double().reciprocal()))
    return float(scale)


def scale_back(engine: Engine, scale: float) -> None:
    """Leave gradients and scale as they were for whoever tries the step again.

    A GradScaler takes its attributes back only where the step succeeds, and multiplies what it then
    finds.
    """
    _scale_by(engine, scale)
    drop_scale(engine)


def drop_scale(engine: Engine) -> None:
    """Take back what a GradScaler told the optimizer."""
    for name in ("grad_scale", "found_inf"):
        if hasattr(engine.face, name):
            delattr(engine.face, name)


def _scale_by(engine: Engine, factor: float) -> None:
    params = frozen.parameters(engine)
    grads = [local(p.grad) for p in params if p.requires_grad and p.grad is not None]
    torch._foreach_mul_(grads, factor)
