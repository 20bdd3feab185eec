"""What SCAPE selects by, before a step has written it."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.masks import Piece


def own_x(bucket: Bucket, i: int, piece: Piece, g: Tensor | None) -> Tensor:
    """Line 10's x on a piece of tensor i, in memory of its own."""
    beta1, held, m = bucket.group["betas"][0], bucket.cache["held"][i], bucket.state["exp_avg"][i]
    _, a, b, *_ = piece
    x = bucket.fetch("residual", i, slice(a, b))
    if g is not None:
        x.add_(g.reshape(-1)[a:b], alpha=(beta1 - 1) if bucket.group["maximize"] else (1 - beta1))
    if held is None:
        return x.add_(m[a:b], alpha=beta1)
    first, last = torch.searchsorted(
        held, torch.tensor([a, b], dtype=held.dtype, device=held.device)
    ).tolist()
    return x.index_add_(0, held[first:last] - a, m[first:last], alpha=beta1)
