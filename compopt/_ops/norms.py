"""Norms of gradients, and the clips that follow from them.

``decision`` and the methods compute norms and clip by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .._state.tensors import upload

WIDTH = 65536  # elements of a norm that are added up side by side


FEW = 4 * WIDTH  # elements whose norm a CPU computes in float64 at once


def squared_norm(x: Tensor) -> Tensor:
    """Return |x|^2, in float64."""
    return stacked_squared_norms([x])[0]


def total_norm(xs: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together, on the device of the first, as
    ``torch.nn.utils.get_total_norm``; in float32 where the norm of float16 tensors overflows.
    """
    norm: Tensor = torch.nn.utils.get_total_norm(xs)
    # in this order: the host waits for float16 tensors only
    if all(x.dtype != torch.float16 for x in xs) or norm.isfinite():
        return norm
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in xs
    ]
    norm = torch.linalg.vector_norm(torch.stack([norm.to(xs[0].device) for norm in norms]))
    return norm


def reproducible_squared_norm(x: Tensor) -> Tensor:
    """Return |x|^2 with the same bits for any number of threads and any processor, for what scales
    an update.

    Elements a fixed distance apart are added up in turn, in float32, then halves to halves, in
    float64: elementwise additions and products, which every machine rounds alike.
    """
    if x.device.type != "cpu":
        return squared_norm(x)
    for dtype in (torch.promote_types(x.dtype, torch.float32), torch.float64):
        sums = torch.zeros(min(WIDTH, x.numel()), dtype=dtype, device=x.device)
        memory = torch.empty_like(sums)
        for part in x.split(WIDTH):
            wide, square = part.to(dtype), memory[: part.numel()]
            # not addcmul: a fused one rounds once, not twice
            sums[: part.numel()].add_(torch.mul(wide, wide, out=square))
        sums, n = sums.double(), sums.numel()
        while n > 1:
            half = (n + 1) // 2
            sums[: n - half].add_(sums[half:n])
            n = half
        total = sums[:1].sum()
        if total.isfinite():
            break
    return total


def squared_norms(xs: Sequence[Tensor], reproducible: bool = False) -> list[Tensor]:
    """Return |x|^2 of each, in float64; on one device in a few launches for all."""
    if len({x.device for x in xs}) > 1:
        return [squared for x in xs for squared in stacked_squared_norms([x], reproducible)]
    return list(stacked_squared_norms(xs, reproducible).unbind()) if xs else []


def stacked_squared_norms(xs: Sequence[Tensor], reproducible: bool = False) -> Tensor:
    """Return |x|^2 of each tensor, all on one device, as one vector in float64."""
    if xs[0].device.type == "cpu":
        if reproducible:
            return torch.stack([reproducible_squared_norm(x).double() for x in xs])
        if sum(x.numel() for x in xs) > FEW:
            return squared_norms_on_cpu(xs)
    # a look at float32 results would cost more than float64
    if len(xs) == 1:
        norm: Tensor = torch.linalg.vector_norm(xs[0], dtype=torch.float64)
        return norm.square_().view(1)
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype=torch.float64)).square_()


def squared_norms_on_cpu(xs: Sequence[Tensor]) -> Tensor:
    """Return |x|^2 of each: sums of parts in float32, which are added up in float64; all of it in
    float64 where float32 overflows.
    """
    parts = [x.reshape(-1).split(WIDTH) for x in xs]
    flat = [part for of_one in parts for part in of_one]
    dtype = reduce(torch.promote_types, {x.dtype for x in xs}, torch.float32)
    squares = torch.stack(torch._foreach_norm(flat, 2, dtype=dtype)).double().square_()
    total = squares.sum()
    if not math.isfinite(total.item()):
        squares = torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float64)).square_()
        total = squares.sum()
    if len(flat) == len(xs):
        return squares
    if len(xs) == 1:
        return total.view(1)
    numbers = [i for i, of_one in enumerate(parts) for _ in of_one]
    at = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return squares.new_zeros(len(xs)).index_add_(0, at, squares)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor on a gradient of this norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def scale_(x: Tensor, factor: float) -> None:
    """Multiply ``x`` by ``factor``, in place. (``_foreach_mul_`` rounds the factor to bfloat16.)"""
    if factor != 1:
        x.mul_(factor)


def scale_all_(xs: list[Tensor], factor: float) -> None:
    """Multiply every tensor by ``factor``, in place."""
    if factor != 1 and xs:
        torch._foreach_mul_(xs, factor)


def sum_squares_of_shards(norms: Sequence[Tensor], copies: Sequence[int]) -> Tensor:
    """Return the sum of squares, each divided by the number of ``copies`` that shards hold of the
    part, so that their sum over shards is that of the whole model.
    """
    squares = torch.stack([*norms]).double().square_()
    return squares.div_(upload(copies, torch.float64, squares.device)).sum()
