"""What kernels are given: rows of tensors that walk over memory, and what comes back from them."""

from __future__ import annotations

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket, local
from ..._state.masks import Mask, Tensors


def blocks_of(bucket: Bucket) -> kernels.Blocks:
    return kernels.cut(tuple(bucket.lengths), bucket.device)


def starts_of(bucket: Bucket, mask: Mask) -> Tensor:
    """For each block: how many elements of its tensor are selected before it."""
    if mask.starts is None:
        blocks = blocks_of(bucket)
        mask.starts = kernels.count(blocks, mask.bits) if mask.sparse else blocks.firsts
    return mask.starts


def flattened(tensors: Tensors) -> Tensors:
    """A kernel walks over memory: what is laid out otherwise is copied."""
    return [None if t is None else t.reshape(-1) for t in tensors]


def overflows(grads: Tensors, like: Tensor) -> Tensor:
    """NaN for each gradient whose squared norm is not finite, as ``math.finite_or_nan``, else 0."""
    some = [g for g in grads if g is not None]
    wide = torch.promote_types(some[0].dtype, torch.float32) if some else like.dtype
    norms = iter(torch._foreach_norm(some, 2, dtype=wide) if some else ())
    return torch.stack(
        [like.new_zeros(()) if g is None else next(norms).to(like.dtype) for g in grads]
    ).mul_(0)


def contiguous_weights(bucket: Bucket) -> list[Tensor]:
    return [w.contiguous() for w in bucket.weights]


def published(bucket: Bucket, i: int) -> Tensor | None:
    """The parameter that the kernel brings the updated master to; None where there is no master, or
    a copy is due.
    """
    p = local(bucket.params[i].detach())
    return p if "master" in bucket.state and p.is_contiguous() else None


def bring_back(bucket: Bucket, weights: list[Tensor], present: list[bool]) -> None:
    """Copies of weights to where they came from, and masters to parameters, where the kernel could
    not.
    """
    for i, (ours, theirs) in enumerate(zip(weights, bucket.weights, strict=True)):
        if present[i] and ours.data_ptr() != theirs.data_ptr():
            theirs.copy_(ours)
        if present[i] and published(bucket, i) is None:
            bucket.publish(i)


def count_up(bucket: Bucket, present: list[bool]) -> None:
    steps = [step for step, here in zip(bucket.state["step"], present, strict=True) if here]
    if steps:
        torch._foreach_add_(steps, 1)
