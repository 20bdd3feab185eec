"""AdamW on this rank's shard of a bucket, and its updated parameters on all ranks.

What the parameters will be is computed before anything is written, so that they can be gathered first: twice the work
on 1/N of the elements, for steps that are all or nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._buckets import Bucket, local
from ._ops import Ops
from ._shards import unshard

Part = tuple[Tensor, Tensor | None]  # the averaged gradient of a part of a tensor: values, and where (None: everywhere)


def step_part(bucket: Bucket, ops: Ops, i: int, part: Part, w: Tensor, moments: list[Tensor]) -> None:
    """AdamW on this rank's part ``w`` of tensor i, in place, with the averaged gradient ``part``."""
    if w.numel():
        ops.adamw(bucket.group, w, ops.expand(*part, w), *moments)


def moments(bucket: Bucket, i: int) -> list[Tensor]:
    return [bucket.state[name][i] for name in ("exp_avg", "exp_avg_sq", "step")]


def updated(bucket: Bucket, ops: Ops, average: list[Part], present: list[bool]) -> Tensor:
    """What this rank's shard of the parameters will be, in their dtype; nothing that outlives the step is written."""
    shards = bucket.shards
    new, sizes = torch.empty(shards.most, dtype=bucket.dtype, device=bucket.device), shards.sizes(shards.rank)
    new[sum(sizes) :] = 0
    for i, out in enumerate(new[: sum(sizes)].split(sizes)):
        w = bucket.weight(i)
        if present[i]:
            m, v, step = moments(bucket, i)
            w, m, v = (ops.scratch(x, x.numel(), use=use).copy_(x) for x, use in ((w, "w"), (m, "m"), (v, "v")))
            step_part(bucket, ops, i, average[i], w, [m, v, step + 1])
        out.copy_(w)
    return new


def commit(bucket: Bucket, ops: Ops, average: list[Part], present: list[bool], rows: Tensor) -> None:
    """Moments and masters of this rank's shard, step counts, and all parameters, from the gathered ``rows``."""
    for i, here in enumerate(present):
        if here:
            bucket.state["step"][i] += 1
            step_part(bucket, ops, i, average[i], bucket.weight(i), moments(bucket, i))
    publish(bucket, rows)


def publish(bucket: Bucket, rows: Tensor) -> None:
    """Gathered shards into the parameters."""
    tensors = [local(p.detach()) for p in bucket.params]
    flats = [w.view(-1) if w.is_contiguous() else torch.empty_like(w.reshape(-1)) for w in tensors]
    unshard(bucket.shards, rows, flats)
    for w, flat in zip(tensors, flats, strict=True):
        if not w.is_contiguous():
            w.copy_(flat.view(w.shape))
