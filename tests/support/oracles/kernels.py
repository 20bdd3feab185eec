"""The specification of the kernels in plain PyTorch, one tensor at a time. It is slow where that is clearer.

Vectors are flat; n is the number of elements of a tensor, k how many of them are selected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compopt._ops.operations import adams_, adamw_


def compact(
    g: Tensor,
    index: Tensor | None,
    out: Tensor,
    add: Tensor | None = None,
    scale: float = 1.0,
    sign: float = 1.0,
) -> None:
    """Write ``(sign * g + scale * add)[index]`` to ``out``, in its dtype; None: all elements."""
    x = sign * g.reshape(-1).to(torch.promote_types(g.dtype, torch.float32))
    if add is not None:
        x = x.add_(add.reshape(-1), alpha=scale)
    out.copy_(x if index is None else x.index_select(0, index))


def radius_(
    w: Tensor,
    m: Tensor,
    v: Tensor,
    residual: Tensor,
    g: Tensor,
    values: Tensor,
    index: Tensor,
    step: float,
    **hyper: Any,
) -> None:
    """Do Radius's lines 15 to 25 of a sparse step: AdamW on ``values`` at ``index`` and 0
    elsewhere, and the residual.

    ``g`` is the rank's own gradient; off the mask it is added to the residual. ``hyper`` as for
    ``adamw_``.
    """
    average = torch.zeros_like(w)
    scatter(values, index, average.view(-1))
    adamw_(w, average, m, v, step, **hyper)
    residual.add_(g)
    clear_(residual, index)


def moment(
    residual: Tensor,
    g: Tensor,
    m: Tensor,
    held: Tensor,
    *,
    betas: tuple[float, float],
    maximize: bool = False,
) -> Tensor:
    """Return SCAPE's line 10, ``b1 m + (1 - b1) g + e``, with m given at the positions ``held``."""
    weight = (betas[0] - 1) if maximize else (1 - betas[0])
    x = residual.reshape(-1).add(g.reshape(-1), alpha=weight)
    return x.index_add_(0, held, m, alpha=betas[0])


def scape_(
    w: Tensor,
    residual: Tensor,
    g: Tensor,
    m: Tensor,
    held: Tensor,
    values: Tensor,
    index: Tensor,
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    **adams: Any,
) -> Tensor:
    """Do SCAPE's lines 10, 11 and 16 to 21 in place; return the new momentum, at ``index``.

    ``m``: the old one, at ``held``. ``values``: the averaged gradient at ``index``. ``adams``:
    ``clip`` of ``adams_``.
    """
    x = moment(residual, g, m, held, betas=betas, maximize=maximize)
    new = torch.zeros_like(x).index_copy_(0, held, m).index_select(0, index)
    residual.copy_(x.view(residual.shape))
    clear_(residual, index)
    w.mul_(1 - lr * weight_decay)
    selected = w.view(-1).index_select(0, index)
    g = values.to(w.dtype)
    adams_(selected, g, new, step, lr=lr, betas=betas, eps=eps, weight_decay=0.0, **adams)
    w.view(-1).index_copy_(0, index, selected)
    return new


def pack_bits(mask: Tensor) -> Tensor:
    """Return n booleans as ceil(n/8) bytes, the first element in the lowest bit."""
    flags = mask.view(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flags, (0, -mask.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded << shifts).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """Return ceil(n/8) bytes as n booleans."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> shifts) & 1).view(-1)[:n].bool()


def top_k(score: Tensor, k: int) -> Tensor:
    """Return the packed mask of the k largest elements of ``score``."""
    mask = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    mask[score.reshape(-1).topk(k, sorted=False).indices] = True
    return pack_bits(mask)


def positions(bits: Tensor, n: int) -> Tensor:
    """Return the selected positions of a packed mask, ascending: int32, or int64 where n does not
    fit.
    """
    dtype = torch.int32 if n < 2**31 else torch.int64
    return unpack_bits(bits, n).nonzero().view(-1).to(dtype)


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write ``x[index]`` to ``out``, in its dtype."""
    out.copy_(x.reshape(-1).index_select(0, index))


def scatter(values: Tensor, index: Tensor, out: Tensor) -> None:
    """Write ``values`` at ``index`` to ``out``, 0 elsewhere."""
    out.zero_().scatter_(0, index.long(), values.to(out.dtype))


def clear_(x: Tensor, index: Tensor) -> None:
    """Set ``x`` to 0 at ``index``."""
    x.view(-1).scatter_(0, index.long(), 0)
