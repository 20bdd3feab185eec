"""Anchors: what parameters were when ranks were last equal, in float32 where they are below; on the
parameter's device, or in host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._state.buckets import local
from .._state.devices import HOST, pinned


def anchor_of(p: Tensor, host: bool) -> nn.Parameter:
    """That of a frozen parameter is the parameter itself, or what it was."""
    if not p.requires_grad:
        return nn.Parameter(p.detach().to(HOST if host else p.device), requires_grad=False)
    return nn.Parameter(wide_copy(p, host))


def wide_copy(p: Tensor, host: bool) -> Tensor:
    wide = torch.promote_types(p.dtype, torch.float32)
    if host:
        return pinned(p.detach().to(HOST, copy=True).to(wide), p.device)
    return p.detach().to(wide, copy=True)


def beside(anchor: Tensor, p: Tensor) -> Tensor:
    """The parameter, on its anchor's device."""
    return local(p.detach()).to(local(anchor).device)


def rounded(anchor: Tensor, p: Tensor) -> Tensor:
    """The anchor as the parameter shows it, which is where a rank begins a round."""
    return local(anchor.detach()).to(p.dtype)


def moved_since(p: Tensor, anchor: Tensor) -> Tensor:
    """What a rank moved since the exchange began that is on its way."""
    start = rounded(anchor, p).to(anchor.dtype)
    moved = beside(anchor, p).to(anchor.dtype) - start
    return moved if anchor.grad is None else moved.add_(local(anchor.grad))


def differences(
    params: list[Tensor], anchors: list[nn.Parameter], of: list[int]
) -> dict[int, Tensor]:
    """What each of these tensors moved, anchor - w, by its number; without those that cannot have
    moved: they have no gradient, and are where they began.
    """
    idle = [i for i in of if params[i].grad is None]
    same = [rounded(anchors[i], params[i]).eq(beside(anchors[i], params[i])).all() for i in idle]
    rests = dict(zip(idle, torch.stack(same).tolist() if same else [], strict=True))
    return {
        i: rounded(anchors[i], params[i]).to(anchors[i].dtype) - beside(anchors[i], params[i])
        for i in of
        if not rests.get(i)
    }


def bring_(p: Tensor, anchor: Tensor, since: Tensor | None, keeps: float) -> None:
    """The parameter becomes its anchor, but for the share that it ``keeps`` of what it was when the
    exchange began; then what was moved ``since``.
    """
    w, new = local(p.detach()), local(anchor.detach())
    if since is None and keeps == 0:
        w.copy_(new)
        return
    wide = beside(anchor, p).to(new.dtype)
    begun = wide if since is None else wide - since
    mixed = torch.lerp(new, begun, keeps) if keeps else new
    w.copy_(mixed if since is None else mixed + since)
