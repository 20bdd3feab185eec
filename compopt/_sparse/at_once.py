"""What TAGC holds back of all tensors of a bucket, in a few calls: on a device each is a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._state.masks import Tensors


def hold_back_at_once(
    bucket: Bucket,
    ops: Ops,
    grads: Tensors,
    at: Tensor,
    rest: Tensor | None,
    present: list[bool],
) -> None:
    """Add gradients to accumulators, and owe the ``rest``, or nothing, ``at`` these bits of the
    mask. What is owed of absent tensors stays.
    """
    lengths, residual = bucket.compressed_lengths, bucket.state["residual"]
    here = [i for i, n in enumerate(lengths) if n and present[i]]
    there = [(residual[i], g) for i in here if (g := grads[i]) is not None]
    if there:
        torch._foreach_add_(*map(list, zip(*there, strict=True)))
    if all(present[i] for i, n in enumerate(lengths) if n) and not any(n % 8 for n in lengths):
        owe(bucket.flat["residual"], at, rest)  # where bits lie as accumulators do
        return
    x = ops.scratch(bucket.flat["residual"], 8 * bucket.shards.offsets[-1], use="x")
    offsets = bucket.shards.offsets
    own = [x[8 * offsets[i] : 8 * offsets[i] + lengths[i]] for i in here]
    held = [residual[i].view(-1) for i in here]
    if held:
        torch._foreach_copy_(own, held)
        owe(x, at, rest)
        torch._foreach_copy_(held, own)


def owe(x: Tensor, at: Tensor, rest: Tensor | None) -> None:
    if rest is None:
        x.index_fill_(0, at, 0)
    else:
        x.index_copy_(0, at, rest)
