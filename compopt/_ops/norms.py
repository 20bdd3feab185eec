"""Norms of gradients: whether they are finite, and what clips them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that are added up side by side.
WIDTH = 65536


def finite_or_nan(g: Tensor) -> Tensor:
    """1 when ``g`` and its squared norm are finite, NaN otherwise: a second moment could not hold
    such a gradient.

    The rule of all back ends for what makes ranks skip a step. The square is of the gradient's
    dtype, float32 at least: one element of 1e20 is too large, 1e18 is not, and many of 1e18 are.
    """
    dtype = torch.promote_types(g.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(g, dtype=dtype)
    return norm.mul_(0).add_(1)


def all_finite_or_nan(gs: Sequence[Tensor]) -> Tensor:
    """The same for several gradients of one dtype, in a few launches."""
    dtype = torch.promote_types(gs[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(gs), 2, dtype=dtype)).mul_(0).add_(1)


def marks(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """For every gradient 1 if it is finite, NaN if it is not, 0 if there is none."""
    there = [g for g in grads if g is not None]
    if len(there) == len(grads) and all(g.device.type != "cpu" for g in there):
        return all_finite_or_nan(there).to(like.dtype)
    zero = like.new_zeros(())
    return torch.stack([zero if g is None else finite_or_nan(g).to(zero.dtype) for g in grads])


def squared_norm_alike(x: Tensor) -> Tensor:
    """|x|^2, the same bits whatever the number of threads and the processor: for what scales an
    update.

    Elements a fixed distance apart are added up in turn, in float32, then halves to halves, in
    float64: additions and products element by element, which every machine rounds alike.
    """
    if x.device.type != "cpu":
        return squared_norm(x)
    total = _halved(_folded(x, torch.promote_types(x.dtype, torch.float32)))
    return total if total.isfinite() else _halved(_folded(x, torch.float64))


def _folded(x: Tensor, dtype: torch.dtype) -> Tensor:
    sums = torch.zeros(min(WIDTH, x.numel()), dtype=dtype, device=x.device)
    square = torch.empty_like(sums)
    for part in x.split(WIDTH):
        wide, own = part.to(dtype), square[: part.numel()]
        # Not addcmul: a fused one rounds once, not twice.
        sums[: part.numel()].add_(torch.mul(wide, wide, out=own))
    return sums.double()


def _halved(sums: Tensor) -> Tensor:
    n = sums.numel()
    while n > 1:
        half = (n + 1) // 2
        sums[: n - half].add_(sums[half:n])
        n = half
    return sums[:1].sum()


def squared_norms(xs: Sequence[Tensor], alike: bool = False) -> list[Tensor]:
    """|x|^2 of each, in float64; ``alike``: as ``squared_norm_alike``.

    On a device in a few launches for all.
    """
    if len({x.device for x in xs}) > 1:
        return [(squared_norm_alike if alike else squared_norm)(x).double() for x in xs]
    return list(stacked_squared_norms(xs, alike).unbind()) if xs else []


def stacked_squared_norms(xs: Sequence[Tensor], alike: bool = False) -> Tensor:
    """The same of tensors on one device, as a vector there."""
    if xs[0].device.type == "cpu":
        norm = squared_norm_alike if alike else squared_norm
        return torch.stack([norm(x).double() for x in xs])
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype=torch.float64)).square_()


def squared_norm(x: Tensor) -> Tensor:
    """|x|^2, in float64 where float32 would overflow or x is of lower precision."""
    # Where looking at the first result costs more than a second.
    if x.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
        return norm.square()
    fast = torch.dot(x, x) if x.dtype in (torch.float32, torch.float64) else None
    return fast if fast is not None and fast.isfinite() else x.double().square().sum()
