"""Gradients before they are sent: their checks, and a GradScaler's scale, which a step removes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._state.tensors import to_local
from .session import Session


def check_gradients(session: Session) -> None:
    """Raise TypeError if a parameter has changed its shape, dtype or device, or has a sparse
    gradient.
    """
    for bucket in session.buckets:
        for p, shape, name in zip(bucket.params, bucket.shapes, bucket.names, strict=True):
            new, old = (to_local(p).shape, p.dtype, p.device), (shape, bucket.dtype, bucket.device)
            if new != old:
                now, before = (f"{dt} of shape {tuple(of)} on {dev}" for of, dt, dev in (new, old))
                raise TypeError(
                    f"{name} is {now} here, and was {before} when the optimizer was made: make the "
                    "optimizer after the model is converted, moved or resized."
                )
            if p.grad is not None and p.grad.is_sparse:
                raise TypeError(
                    f"{session.name} got a sparse gradient for {name}: use dense "
                    "gradients (sparse=False)."
                )


def unscale_gradients(session: Session) -> float | None:
    """Divide the gradients by a GradScaler's scale, which may differ between ranks; return it.

    Returns None if no scaler left one. With a scaler no bucket starts in backward: its gradients
    are not yet the ones to send.
    """
    optimizer = session.optimizer
    session.has_grad_scaler = hasattr(optimizer, "found_inf")
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return None
    _scale_gradients(session, float(scale.double().reciprocal()))
    return float(scale)


def restore_scale(session: Session, scale: float) -> None:
    """Multiply the gradients by ``scale`` again, so that the step can be repeated."""
    _scale_gradients(session, scale)


@contextmanager
def drop_scale_on_error(session: Session) -> Iterator[None]:
    """Drop a GradScaler's scale if the step in this context raises: the next one would multiply its
    own scale by it.
    """
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):  # a scaler deletes them only if step() succeeds
            if hasattr(session.optimizer, name):
                delattr(session.optimizer, name)
        raise


def _scale_gradients(session: Session, factor: float) -> None:
    params = [p for group in session.option_groups for p in group["params"]]
    grads = [to_local(p.grad) for p in params if p.requires_grad and p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)
