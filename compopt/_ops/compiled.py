"""Element-wise passes by ``torch.compile``: one loop over memory where operators in a row would
take several.

Compiled when the first optimizer is made, so that a compiler that is missing says so then and not
in the middle of a step. Numbers that change from step to step go in as a tensor and lengths stay
open, so a pass is compiled once."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .math import adams_factors
from .ops import Ops


class CompiledOps(Ops):
    """AdamW with Radius's residual, and AdamS, in one loop each, for float32; the rest is
    PyTorch's.
    """

    name = "compile"

    def __init__(self, devices: set[str]) -> None:
        super().__init__(devices)
        for device in devices & {"cpu", "cuda"}:
            _try(device)

    def adamw_and_add(
        self,
        group: dict,
        w: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
        step: Tensor,
        residual: Tensor,
        add: Tensor | None,
    ) -> None:
        if not _fits(
            w, g, m, v, residual
        ):  # the same on all ranks, whatever ``add`` is on this one
            return super().adamw_and_add(group, w, g, m, v, step, residual, add)
        add = (
            self.scratch(w, w.numel(), use="add").zero_()
            if add is None
            else add.to(w.dtype).contiguous()
        )
        (beta1, beta2), t, lr = group["betas"], float(step), float(group["lr"])
        factors = [
            1 - lr * group["weight_decay"],
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**t),
            group["eps"],
            lr / (1 - beta1**t),
            -1.0 if group["maximize"] else 1.0,
        ]
        _compiled(_adamw_and_add)(
            *_flat(w, g, m, v, residual, add), torch.tensor(factors, dtype=w.dtype, device=w.device)
        )

    def adams(
        self,
        group: dict,
        w: Tensor,
        g: Tensor,
        m: Tensor,
        step: Tensor,
        clip: float = 1.0,
        decay: bool = True,
    ) -> None:
        if not _fits(w, g, m):
            return super().adams(group, w, g, m, step, clip, decay)
        lr, beta1 = float(group["lr"]), group["betas"][0]
        old, new, first = adams_factors(float(step), group["betas"], group["bias_correction"])
        shrink = 1 - lr * group["weight_decay"] if decay else 1.0
        factors = [shrink, 1 - beta1, old, new * clip**2, group["eps"], lr / first]
        _compiled(_adams)(*_flat(w, g, m), torch.tensor(factors, dtype=w.dtype, device=w.device))


def _adamw_and_add(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, residual: Tensor, add: Tensor, factors: Tensor
) -> None:
    shrink, new1, old2, new2, root, eps, rate, sign = factors.unbind()
    residual.add_(add)
    g = g * sign
    m.add_((g - m) * new1)
    v.copy_(v * old2 + g * g * new2)
    w.copy_(w * shrink - rate * m / (v.sqrt() / root + eps))


def _adams(w: Tensor, g: Tensor, m: Tensor, factors: Tensor) -> None:
    shrink, new1, old2, new2, eps, rate = factors.unbind()
    denominator = (m * m * old2 + g * g * new2).sqrt() + eps
    m.add_((g - m) * new1)
    w.copy_(w * shrink - rate * m / denominator)


@cache
def _compiled(function):
    return torch.compile(function, dynamic=True, fullgraph=True)


@cache
def _try(device: str) -> None:
    """Compile both for float32 on this device."""
    with torch.no_grad():
        x = [torch.ones(64, dtype=torch.float32, device=device) for _ in range(6)]
        _compiled(_adamw_and_add)(*x, torch.ones(8, dtype=torch.float32, device=device))
        _compiled(_adams)(*x[:3], torch.ones(6, dtype=torch.float32, device=device))


def _fits(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.is_contiguous() and t.numel() > 1 for t in tensors)


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [t.view(-1) for t in tensors]
