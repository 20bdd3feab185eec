"""The factor that clips a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor on a gradient of norm ``norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def scale_(x: Tensor, factor: float) -> None:
    """``x *= factor``."""
    if factor != 1:
        x.mul_(factor)


def scale_all_(xs: list[Tensor], factor: float) -> None:
    """``scale_`` of many."""
    if factor != 1 and xs:
        torch._foreach_mul_(xs, factor)
