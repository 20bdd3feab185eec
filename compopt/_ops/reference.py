"""AdamW and AdamS in plain PyTorch, one tensor at a time: the specification of all backends."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def adamw_(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """Do one AdamW step in place, ``step`` counted from 1 (Loshchilov and Hutter 2019; Radius,
    Algorithm 2).
    """
    g = -g if maximize else g
    w.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    denominator = (v.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    w.addcdiv_(m, denominator, value=-lr / (1 - betas[0] ** step))


def update_magnitudes(
    group: dict[str, Any], w: Tensor, m: Tensor, v: Tensor, step: Tensor
) -> Tensor:
    """Return the magnitude of what AdamW subtracts, over lr: ``mhat / (sqrt(vhat) + eps) +
    weight_decay * w`` (Radius, Algorithm 2, line 5). The host does not wait for ``step``.
    """
    beta1, beta2 = group["betas"]
    steps = step.double().clamp(min=1)
    first, second = 1 - beta1**steps, 1 - beta2**steps
    denominator = (v.sqrt() / second.sqrt()).add_(group["eps"])
    return m.div(denominator).div_(first).add_(w, alpha=group["weight_decay"]).abs_()


def adams_(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float = 1.0,
) -> None:
    """Do one AdamS step in place, ``step`` counted from 1 (SCAPE, equation 2): v is made of g and
    the *previous* m.

    ``clip`` multiplies the gradient in v alone (SCAPE's line 18 as printed).
    """
    first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
    old, new = betas[1] / second, (1 - betas[1]) / second  # factors of m^2 and of g^2
    denominator = m.square().mul_(old).addcmul_(g, g, value=new * clip**2).sqrt_().add_(eps)
    m.lerp_(g, 1 - betas[0])
    w.mul_(1 - lr * weight_decay)
    w.addcdiv_(m, denominator, value=-lr / first)
