"""AdamW on this rank's shard of a bucket, and its updated parameters on all ranks.

What the parameters will be is computed before anything is written, so that they can be gathered
first: twice the work on 1/N of the elements, for steps that are all or nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.ops import Ops
from .._state.buckets import Bucket, local
from .._state.shards import unshard
from .._wire.requests import AllGather

Part = tuple[
    Tensor, Tensor | None
]  # the averaged gradient of a part of a tensor: values, and where (None: everywhere)


def moments(bucket: Bucket, i: int) -> list[Tensor]:
    return [bucket.state[name][i] for name in ("exp_avg", "exp_avg_sq", "step")]


def sends_updates(bucket: Bucket) -> bool:
    """Whether not parameters are gathered but what is added to them, in bfloat16: half as many
    bytes.

    All ranks add the same, its owner too, so replicas stay equal; an update is rounded to 8 bits, a
    parameter is not."""
    return bucket.group["payload_dtype"] == torch.bfloat16 and bucket.dtype == torch.float32


def updated(bucket: Bucket, ops: Ops, average: list[Part], present: list[bool]) -> Tensor:
    """What this rank's shard of the parameters will be, in their dtype, or the updates; nothing
    else is written.
    """
    shards, h = bucket.shards, bucket.group
    new, sizes = bucket.memory("new", shards.most, bucket.dtype), shards.sizes(shards.rank)
    new[sum(sizes) :] = 0
    for i, out in enumerate(new[: sum(sizes)].split(sizes)):
        w = bucket.weight(i)
        if not present[i] or not w.numel():
            out.copy_(w)
        elif w.dtype == out.dtype:
            ops.adamw_ahead(h, w, *average[i], *moments(bucket, i), out)
        else:
            ahead = ops.scratch(w, w.numel(), use="ahead")
            ops.adamw_ahead(h, w, *average[i], *moments(bucket, i), ahead)
            out.copy_(ahead)
        if sends_updates(bucket):
            out.sub_(w)
    return new.bfloat16() if sends_updates(bucket) else new


def gather(bucket: Bucket, new: Tensor) -> AllGather:
    """What asks for all ranks' ``new``."""
    ranks = bucket.shards.ranks
    bucket.parameter_bytes = new.nbytes
    return AllGather(new, bucket.memory("gathered", ranks * new.numel(), new.dtype).view(ranks, -1))


def commit(
    bucket: Bucket, ops: Ops, average: list[Part], present: list[bool], rows: Tensor
) -> None:
    """Moments and masters of this rank's shard, step counts, and all parameters, from the gathered
    ``rows``.
    """
    h = bucket.group
    for i in (i for i, here in enumerate(present) if here):
        w, (m, v, step) = bucket.weight(i), moments(bucket, i)
        if not w.numel():
            step += 1
        elif "master" in bucket.state:
            step += 1
            ops.adamw(h, w, ops.expand(*average[i], w), m, v, step)
        else:  # the parameters themselves are gathered
            ops.adamw_moments(h, w, *average[i], m, v, step)
    publish(bucket, rows)


def publish(bucket: Bucket, rows: Tensor) -> None:
    """Gathered shards into the parameters."""
    tensors = [local(p.detach()) for p in bucket.params]
    flats = [w.view(-1) if w.is_contiguous() else w.reshape(-1).clone() for w in tensors]
    unshard(bucket.shards, rows, flats, add=sends_updates(bucket))
    for w, flat in zip(tensors, flats, strict=True):
        if not w.is_contiguous():
            w.copy_(flat.view(w.shape))
