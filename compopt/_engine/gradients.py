"""Gradients before they are sent: whether they fit, and a scale that a GradScaler left on them."""

from __future__ import annotations

import torch

from .._state.tensors import to_local
from .session import Session


def check(session: Session) -> None:
    """Raise TypeError where a tensor is not what the optimizer was made for."""
    for bucket in session.buckets:
        for p, n, name in zip(bucket.params, bucket.lengths, bucket.names, strict=True):
            if p.dtype != bucket.dtype or p.device != bucket.device or to_local(p).numel() != n:
                raise TypeError(
                    f"{name} has {to_local(p).numel()} elements of {p.dtype} on {p.device} here, "
                    f"and had {n} of {bucket.dtype} on {bucket.device} when the optimizer was "
                    "made: make the optimizer after the model is converted, moved or resized."
                )
            if p.grad is not None and p.grad.is_sparse:
                raise TypeError(
                    f"{session.name} got a sparse gradient for {name}: use dense "
                    "gradients (sparse=False)."
                )


def unscale(session: Session) -> float | None:
    """Divide by the GradScaler's scale, which may differ between ranks, what it left scaled.

    Returns that scale. With a scaler no bucket starts in backward: the gradients are not yet what
    will be sent.
    """
    optimizer = session.optimizer
    session.has_grad_scaler = hasattr(optimizer, "found_inf")
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return None
    _scale_by(session, float(scale.double().reciprocal()))
    return float(scale)


def scale_back(session: Session, scale: float) -> None:
    """Leave gradients and scale as they were for whoever tries the step again.

    A GradScaler takes its attributes back only where the step succeeds, and multiplies what it then
    finds.
    """
    _scale_by(session, scale)
    drop_scale(session)


def drop_scale(session: Session) -> None:
    """Take back what a GradScaler told the optimizer."""
    for name in ("grad_scale", "found_inf"):
        if hasattr(session.optimizer, name):
            delattr(session.optimizer, name)


def _scale_by(session: Session, factor: float) -> None:
    params = [p for group in session.option_groups for p in group["params"]]
    grads = [to_local(p.grad) for p in params if p.requires_grad and p.grad is not None]
    torch._foreach_mul_(grads, factor)
