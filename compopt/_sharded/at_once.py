"""AdamW on this rank's shard of a bucket, all tensors at once: on a device, where each call is a
launch. A CPU takes a tensor at a time, which stays in its cache (see ``adamw``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.operations import adamw_batched_
from .._sparse.averaged import Average
from .._state.buckets import Bucket
from .._wire.payload import float_dtype
from .updates import update_bits


def sends_updates(bucket: Bucket) -> bool:
    """Whether not parameters are gathered but what is added to them: rounded to codes, or in
    bfloat16, half as many bytes.

    All ranks add the same, its owner too, so replicas stay equal; an update is rounded to 8 bits, a
    parameter is not.
    """
    sent = float_dtype(bucket.group["payload_dtype"])
    low = sent == torch.bfloat16 and not bucket.alone
    return update_bits(bucket) is not None or (low and bucket.dtype == torch.float32)


def ahead_at_once(
    bucket: Bucket, average: Average, present: list[bool], outs: list[Tensor]
) -> None:
    """Into ``outs`` what this rank's part of each parameter will be, or the updates."""
    weights, steps = bucket.weights, stepping(bucket, present)
    stay = [i for i, w in enumerate(weights) if w.numel() and i not in steps]
    if stay:
        torch._foreach_copy_([outs[i] for i in stay], [weights[i] for i in stay])
    if steps:
        state, own = bucket.state, [weights[i] for i in steps]
        grads = average.dense(own[0].dtype)
        m, v = (copied([state[name][i] for i in steps]) for name in ("exp_avg", "exp_avg_sq"))
        out = [outs[i] for i in steps]
        w = out if out[0].dtype == own[0].dtype else alike(own)
        torch._foreach_copy_(w, own)
        after = list(torch._foreach_add([state["step"][i] for i in steps], 1))
        adamw_batched_(bucket.group, w, [grads[i] for i in steps], m, v, after)
        if w is not out:
            torch._foreach_copy_(out, w)
    there = [i for i, w in enumerate(weights) if w.numel()]
    if sends_updates(bucket) and there:
        torch._foreach_sub_([outs[i] for i in there], [weights[i] for i in there])


def commit_at_once(bucket: Bucket, average: Average, present: list[bool]) -> None:
    """Moments and masters of this rank's shard, and step counts."""
    state, steps = bucket.state, stepping(bucket, present)
    counted = [step for step, here in zip(state["step"], present, strict=True) if here]
    if counted:
        torch._foreach_add_(counted, 1)
    if not steps:
        return
    own = [bucket.weight(i) for i in steps]
    grads = average.dense(own[0].dtype)
    if "master" not in state:  # the parameters themselves are gathered
        own = alike(own)
    adamw_batched_(
        bucket.group,
        own,
        [grads[i] for i in steps],
        [state["exp_avg"][i] for i in steps],
        [state["exp_avg_sq"][i] for i in steps],
        [state["step"][i] for i in steps],
    )


def stepping(bucket: Bucket, present: list[bool]) -> list[int]:
    """The tensors that a step updates, of which this rank owns something."""
    return [i for i, here in enumerate(present) if here and bucket.weight(i).numel()]


def alike(tensors: list[Tensor]) -> list[Tensor]:
    """Vectors of these sizes, contents undefined."""
    sizes = [x.numel() for x in tensors]
    return list(tensors[0].new_empty(sum(sizes)).split(sizes))


def copied(tensors: list[Tensor]) -> list[Tensor]:
    copies = alike(tensors)
    torch._foreach_copy_(copies, tensors)
    return copies
