"""Anchors: what parameters were when ranks were last equal, in float32 where they are below."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._state.buckets import local


def anchor_of(p: Tensor) -> nn.Parameter:
    if not p.requires_grad:
        return nn.Parameter(p.detach(), requires_grad=False)
    return nn.Parameter(wide_copy(p))


def wide_copy(p: Tensor) -> Tensor:
    return p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)


def rounded(anchor: Tensor, p: Tensor) -> Tensor:
    """The anchor as the parameter shows it, which is where a rank begins a round."""
    return local(anchor.detach()).to(p.dtype)


def moved_since(p: Tensor, anchor: Tensor) -> Tensor:
    """What a rank moved since the exchange began that is on its way."""
    start = rounded(anchor, p).to(anchor.dtype)
    moved = local(p.detach()).to(anchor.dtype) - start
    return moved if anchor.grad is None else moved.add_(local(anchor.grad))
