"""What SCAPE selects by, line 10's x = b1 m + (1 - b1) g + e, before a step has written it."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.deal import Piece
from .ops import Group


def own_x(bucket: Bucket, i: int, piece: Piece, g: Tensor | None) -> Tensor:
    """x on a piece of tensor i, in memory of its own."""
    held, m = bucket.cache["mask"].positions[i], bucket.state["exp_avg"][i]
    beta1, (_, a, b, *_) = bucket.group["betas"][0], piece
    x = bucket.fetch("residual", i, slice(a, b))
    if g is not None:
        x.add_(g.reshape(-1)[a:b], alpha=own_share(bucket.group))
    if held is None:
        return x.add_(m[a:b], alpha=beta1)
    edges = torch.tensor([a, b], dtype=held.dtype, device=held.device)
    first, last = torch.searchsorted(held, edges).tolist()
    return x.index_add_(0, held[first:last] - a, m[first:last], alpha=beta1)


def own_share(h: Group) -> float:
    """The factor on a rank's own gradient: 1 - b1, negative where the loss is to grow."""
    beta1: float = h["betas"][0]
    return (beta1 - 1) if h["maximize"] else (1 - beta1)
