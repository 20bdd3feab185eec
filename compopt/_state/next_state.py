"""The transaction of a step: new state of a bucket, until all ranks have agreed.

The rule. Before ``Agree`` (``ReadyToCommit``, if there is one) a generator writes nothing that
outlives the step. State that it computes earlier it puts into ``bucket.next``. After the agreement
``commit_next`` makes that the state. If the step is skipped or fails, the exchange closes the
generator and drops ``next``: the state is as it was. What can be computed after the agreement is
computed then, and written in place.

Inside FSDP2 backward computes new state, and ``step()`` agrees. Between the two it waits in a
``PendingState`` for each parameter, because buckets may be laid out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bucket import Bucket


class NextValues(NamedTuple):
    """New values of one kind of state for tensors of a bucket: of neighbours as a stack (k, ...),
    of others one after the other in a vector.

    ``may_swap``: the vector is from ``Bucket.get_memory``, and nothing reads it after the commit.
    """

    indices: Sequence[int]
    values: Tensor
    may_swap: bool = False


def commit_next(bucket: Bucket, have_gradients: Sequence[bool]) -> None:
    """Make new values the state of tensors with a gradient on any rank; the others keep theirs."""
    pending, bucket.next = bucket.next, {}
    old: list[Tensor] = []
    new: list[Tensor] = []
    for name, parts in pending.items():
        for indices, values, may_swap in parts:
            if may_swap and values.numel() == bucket.flat[name].numel():
                bucket.store_state(name, values)
                continue
            stored = bucket.state[name]
            is_whole = values.dim() > 1 and all(map(have_gradients.__getitem__, indices))
            if is_whole and (stack := bucket.view_stack(name, indices)) is not None:
                old.append(stack.view(values.shape))
                new.append(values)
                continue
            for i, value in zip(indices, _split_values(bucket, name, indices, values), strict=True):
                if have_gradients[i]:
                    old.append(stored[i].view(value.shape))
                    new.append(value)
    if old:
        torch._foreach_copy_(old, new)


def read_next(bucket: Bucket, i: int) -> dict[str, Tensor]:
    """Return the new values of tensor i, by the name of the state."""
    return {
        name: _split_values(bucket, name, indices, values)[indices.index(i)]
        for name, parts in bucket.next.items()
        for indices, values, _ in parts
        if i in indices
    }


def _split_values(
    bucket: Bucket, name: str, indices: Sequence[int], values: Tensor
) -> Sequence[Tensor]:
    """Return the values of each tensor, of a stack or of a vector."""
    if values.dim() > 1:
        return values.unbind()
    parts: Sequence[Tensor] = values.split([bucket.sizes[name][i] for i in indices])
    return parts
