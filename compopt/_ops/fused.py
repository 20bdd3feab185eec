"""AdamW and AdamS steps of one tensor by ``torch._fused_adamw_``, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._wire.scratch import Scratch, at_a_time
from . import math

HYPER = ("betas", "eps", "weight_decay", "maximize")
# elements: a few vectors of them stay in a core's own cache between one pass and the next
BLOCK = 131072
Group = dict[str, Any]


def adamw_(group: Group, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> None:
    """``step`` is already counted up."""
    hyper = {name: group[name] for name in HYPER}
    if not (w.is_contiguous() and g.is_contiguous()):
        return math.adamw_(w, g, m, v, float(step), lr=float(group["lr"]), **hyper)
    beta1, beta2 = hyper.pop("betas")
    hyper |= {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, "amsgrad": False}
    torch._fused_adamw_([w], [g], [m], [v], [], [step], **hyper)


def adamw_at_once_(
    group: Group,
    weights: list[Tensor],
    grads: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    steps: list[Tensor],
) -> None:
    """The same of contiguous tensors of one dtype, in one launch."""
    hyper = {name: group[name] for name in HYPER}
    beta1, beta2 = hyper.pop("betas")
    hyper |= {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2, "amsgrad": False}
    torch._fused_adamw_(weights, grads, m, v, [], steps, **hyper)


def adams_(
    group: Group,
    w: Tensor,
    g: Tensor,
    m: Tensor,
    step: Tensor,
    clip: float,
    decay: bool,
    scratch: Scratch,
) -> None:
    """An AdamW step whose second moment, before it, is the square of the first; on a CPU in blocks
    that stay in the cache. ``step`` is already counted up.
    """
    (beta1, beta2), correction = group["betas"], group["bias_correction"]
    hyper: Group = {
        "lr": float(group["lr"]),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"] if decay else 0.0,
    }
    contiguous = w.is_contiguous() and g.is_contiguous() and m.is_contiguous()
    if not (clip == 1 and correction == "scape" and contiguous):
        hyper |= {"betas": group["betas"], "bias_correction": correction}
        return math.adams_(w, g, m, float(step), clip=clip, **hyper)
    hyper |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
    # Of its own: g may be scratch too.
    block = at_a_time(BLOCK, m.view(-1))
    square = scratch("square", min(block, m.numel()), m.dtype, m.device)
    for w_, g_, m_ in zip(*(x.view(-1).split(block) for x in (w, g, m)), strict=True):
        v = torch.mul(m_, m_, out=square[: m_.numel()])
        torch._fused_adamw_([w_], [g_], [m_], [v], [], [step], **hyper)
