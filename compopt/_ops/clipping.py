"""The factor that clips a gradient, on the host or on the device."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def clip_factor(norm: float, max_norm: float | None) -> float: ...


@overload
def clip_factor(norm: Tensor, max_norm: float | None) -> float | Tensor: ...


def clip_factor(norm: float | Tensor, max_norm: float | None) -> float | Tensor:
    """The factor on a gradient of norm ``norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    if max_norm is None:
        return 1.0
    if isinstance(norm, Tensor):
        return (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    return min(1.0, max_norm / (norm + 1e-6))


def scale_(x: Tensor, factor: float | Tensor) -> None:
    """``x *= factor``, a factor of the device in float32 at least, as one of the host is."""
    if not isinstance(factor, Tensor):
        if factor != 1:
            x.mul_(factor)
    elif x.dtype.itemsize < 4:
        x.copy_(x.float().mul_(factor))
    else:
        x.mul_(factor)


def scale_all_(xs: list[Tensor], factor: float | Tensor) -> None:
    """``scale_`` of many; a factor of the device multiplies even where it is 1."""
    if not isinstance(factor, Tensor):
        if factor != 1 and xs:
            torch._foreach_mul_(xs, factor)
        return
    for dtype in {x.dtype for x in xs}:
        same = [x for x in xs if x.dtype == dtype]
        if dtype.itemsize < 4:
            for x in same:
                scale_(x, factor)
        else:
            torch._foreach_mul_(same, factor.to(dtype))
