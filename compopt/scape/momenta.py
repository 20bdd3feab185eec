"""SCAPE's momenta, which are stored on a mask: line 10's x, and their memory.

``scape``, ``sharded_scape`` and the backends compute with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.operations import Group
from .._state.bucket import Bucket
from .._state.masks import Mask, MaskSlice
from .._wire.payload import Payload


def gradient_weight(group: Group) -> float:
    """Return the factor on a rank's own gradient in line 10: 1 - b1, negative when maximizing."""
    beta1: float = group["betas"][0]
    return (beta1 - 1) if group["maximize"] else (1 - beta1)


def compute_x_of_slice(bucket: Bucket, i: int, piece: MaskSlice) -> Tensor:
    """Return line 10's x = b1 m + e on a slice of tensor i without a gradient, in new memory."""
    momentum_positions, m = bucket.cache["momentum_mask"].positions[i], bucket.state["exp_avg"][i]
    beta1, start, stop = bucket.group["betas"][0], piece.start, piece.stop
    x = bucket.fetch_state("residual", i, slice(start, stop))
    if momentum_positions is None:
        return x.add_(m[start:stop], alpha=beta1)
    device, dtype = momentum_positions.device, momentum_positions.dtype
    edges = torch.tensor([start, stop], dtype=dtype, device=device)
    first, last = torch.searchsorted(momentum_positions, edges).tolist()
    return x.index_add_(0, momentum_positions[first:last] - start, m[first:last], alpha=beta1)


def resize_momenta(bucket: Bucket, mean: Payload, mask: Mask) -> list[Tensor]:
    """Allocate momenta as large as the mask, contents undefined. Return the old ones, which are on
    the mask of the step before; in other memory, if positions change.
    """
    old, flat = bucket.state["exp_avg"], bucket.flat["exp_avg"]
    rows = zip(mean.have_gradients, mask.sizes, bucket.sizes["exp_avg"], strict=True)
    sizes = [size if has_gradient else old_size for has_gradient, size, old_size in rows]
    is_moved = bucket.resize_state("exp_avg", sizes) is not old
    if not is_moved and (mask.is_sparse or bucket.cache["momentum_mask"].is_sparse):
        copy = bucket.get_memory("old momenta", flat.numel(), flat.dtype).copy_(flat)
        return [part.view_as(m) for part, m in zip(copy.split(sizes), old, strict=True)]
    return old


def keep_absent_momenta(old: list[Tensor], new: list[Tensor], have_gradients: list[bool]) -> None:
    """Copy the momenta of tensors without a gradient on any rank from ``old`` to ``new``."""
    for before, after, has_gradient in zip(old, new, have_gradients, strict=True):
        if not has_gradient and after is not before:
            after.copy_(before.view_as(after))
