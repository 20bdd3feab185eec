"""AdamW on this rank's shard of a bucket, and its updated parameters on all ranks.

What the parameters will be is computed before anything is written, so that they can be gathered
first: twice the work on 1/N of the elements, for steps that are all or nothing.
"""

from __future__ import annotations

from torch import Tensor

from .._ops.operations import Ops
from .._sparse.averaged import Average, Averaged
from .._state.buckets import Bucket, local
from .._state.shards import unshard
from .._wire.requests import AllGather, RequestGenerator
from .at_once import ahead_at_once, commit_at_once, sends_updates
from .updates import Codes, add_owed, keep_owed, update_bits


def moments(bucket: Bucket, i: int) -> tuple[Tensor, Tensor, Tensor]:
    state = bucket.state
    return state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]


def updated(bucket: Bucket, ops: Ops, average: Average, present: list[bool]) -> Tensor:
    """What this rank's shard of the parameters will be, in their dtype, or the updates, with what
    is owed of them; nothing else is written.
    """
    shards = bucket.shards
    sizes = shards.sizes(shards.rank)
    new = bucket.memory("new", shards.most, bucket.dtype)
    new[sum(sizes) :].zero_()
    outs = list(new[: sum(sizes)].split(sizes))
    if bucket.device.type != "cpu":
        ahead_at_once(bucket, average, present, outs)
    else:
        for i, out in enumerate(outs):
            w = bucket.weight(i)
            if present[i] and w.numel():
                step_ahead(bucket, ops, i, average.parts[i], out)
            else:
                out.copy_(w)
            if sends_updates(bucket):
                out.sub_(w)
    if update_bits(bucket):
        add_owed(bucket, outs, present)
    elif sends_updates(bucket):
        return new.bfloat16()
    return new


def step_ahead(bucket: Bucket, ops: Ops, i: int, average: Averaged, out: Tensor) -> None:
    """What this rank's part of parameter i will be, in any dtype."""
    w, (g, index), (m, v, step) = bucket.weight(i), average, moments(bucket, i)
    if w.dtype == out.dtype:
        ops.adamw_ahead(bucket.group, w, g, index, m, v, step, out)
    else:
        ahead = ops.scratch(w, w.numel(), use="ahead")
        ops.adamw_ahead(bucket.group, w, g, index, m, v, step, ahead)
        out.copy_(ahead)


def gather(bucket: Bucket, ops: Ops, new: Tensor) -> RequestGenerator[Tensor]:
    """All ranks' ``new``, a row each.

    Where updates are rounded ``new`` is left with what that takes off.
    """
    bits, ranks, shards = update_bits(bucket), bucket.shards.ranks, bucket.shards
    codes = None if bits is None else Codes(bucket, ops, bits)
    own = new if codes is None else codes.message(new[: sum(shards.sizes(shards.rank))])
    rows = own.unsqueeze(0)
    if ranks > 1:
        bucket.parameter_bytes = own.nbytes
        memory = bucket.memory("gathered", ranks * own.numel(), own.dtype)
        rows = yield AllGather(own, memory.view(ranks, -1))
    return rows if codes is None else codes.read(rows)


def commit(
    bucket: Bucket, ops: Ops, average: Average, present: list[bool], new: Tensor, rows: Tensor
) -> None:
    """Moments and masters of this rank's shard, step counts, what rounding ``new`` has left, and
    all parameters, from the gathered ``rows``.
    """
    if bucket.device.type != "cpu":
        commit_at_once(bucket, average, present)
    else:
        commit_each(bucket, ops, average, present)
    if update_bits(bucket):
        keep_owed(bucket, new, present)
    publish(bucket, rows)


def commit_each(bucket: Bucket, ops: Ops, average: Average, present: list[bool]) -> None:
    h = bucket.group
    for i in (i for i, here in enumerate(present) if here):
        w, (g, index), (m, v, step) = bucket.weight(i), average.parts[i], moments(bucket, i)
        if not w.numel():
            step += 1
        elif "master" in bucket.state:
            step += 1
            ops.adamw(h, w, ops.decode(g, index, w), m, v, step)
        else:  # the parameters themselves are gathered
            ops.adamw_moments(h, w, g, index, m, v, step)


def publish(bucket: Bucket, rows: Tensor) -> None:
    """Gathered shards into the parameters."""
    tensors = [local(p.detach()) for p in bucket.params]
    flats: list[Tensor | None] = []
    for w in tensors:
        flats.append(w.view(-1) if w.is_contiguous() else w.reshape(-1).clone())
    unshard(bucket.shards, rows, flats, add=sends_updates(bucket))
    for w, flat in zip(tensors, flats, strict=True):
        if flat is not None and not w.is_contiguous():
            w.copy_(flat.view(w.shape))
