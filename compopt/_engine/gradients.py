"""Gradients before they are sent: their checks, and a GradScaler's scale, which a step removes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import attrgetter, is_not

import torch
from torch import Tensor

from .._state.bucket import Bucket
from .._state.tensors import to_local
from .engine import Engine

SHAPE, DTYPE, DEVICE = map(attrgetter, ("shape", "dtype", "device"))
GRAD, IS_SPARSE, is_present = attrgetter("grad"), attrgetter("is_sparse"), partial(is_not, None)


def check_gradients(engine: Engine) -> None:
    """Raise TypeError if a parameter has changed its shape, dtype or device, or has a sparse
    gradient.
    """
    for bucket in engine.buckets:
        local_params = bucket.local_params if bucket.is_dtensor else bucket.params
        dtypes, devices = {*map(DTYPE, bucket.params)}, {*map(DEVICE, bucket.params)}
        is_same = dtypes == {bucket.dtype} and devices == {bucket.device}
        if not is_same or [*map(SHAPE, local_params)] != bucket.shapes:
            _raise_changed(bucket, local_params)
        if any(map(IS_SPARSE, filter(is_present, map(GRAD, bucket.params)))):
            names = zip(bucket.params, bucket.names, strict=True)
            name = next(name for p, name in names if p.grad is not None and p.grad.is_sparse)
            raise TypeError(
                f"{engine.name} got a sparse gradient for {name}: use dense gradients "
                "(sparse=False)."
            )


def _raise_changed(bucket: Bucket, local_params: Iterable[Tensor]) -> None:
    """Raise TypeError that names the first parameter that differs from when its bucket was made."""
    dtype, device = bucket.dtype, bucket.device
    tensors = zip(bucket.params, local_params, bucket.shapes, bucket.names, strict=True)
    for p, local, shape, name in tensors:
        if local.shape != shape or p.dtype != dtype or p.device != device:
            raise TypeError(
                f"{name} is {p.dtype} of shape {tuple(local.shape)} on {p.device} here, and was "
                f"{dtype} of shape {tuple(shape)} on {device} when the optimizer was made: make "
                "the optimizer after the model is converted, moved or resized."
            )


def unscale_gradients(engine: Engine) -> float | None:
    """Divide the gradients by a GradScaler's scale, which may differ between ranks; return it.

    Returns None if no scaler left one. With a scaler no bucket starts in backward: its gradients
    are not yet the ones to send.
    """
    engine.has_grad_scaler = hasattr(engine.method, "found_inf")
    scale = getattr(engine.method, "grad_scale", None)
    if scale is None:
        return None
    scale_gradients(engine, float(scale.double().reciprocal()))
    return float(scale)


def scale_gradients(engine: Engine, factor: float) -> None:
    """Multiply the gradients, after an error by the scale again: the step can be repeated."""
    params = [p for group in engine.option_groups for p in group["params"]]
    grads = [to_local(p.grad) for p in params if p.requires_grad and p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def drop_scale(engine: Engine) -> None:
    """Drop a GradScaler's scale after the step has raised: the next one would multiply its own
    scale by it, and a scaler deletes it only if ``step()`` succeeds.
    """
    for name in ("grad_scale", "found_inf"):
        if hasattr(engine.method, name):
            delattr(engine.method, name)
