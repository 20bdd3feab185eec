"""Parameters that require no gradient: not laid out in buckets, without state, never sent.

What is laid out follows ``requires_grad``, at the start of a step, when all ranks have seen in a
handshake that they agree. What was kept of a parameter that is frozen later stays in
``optimizer.state``, in tensors of its own, is saved like all state, and goes on when the parameter
is unfrozen. Of state that is cut into shards it is kept whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._wire.comm import Comm
from . import checkpoint
from .handshake import Turns


def parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer._option_groups for p in group["params"]]


def changed(optimizer: Any) -> bool:
    """Whether other parameters require a gradient than those laid out."""
    return any(p.requires_grad != (p in optimizer._trained) for p in optimizer._met)


def meet(optimizer: Any) -> None:
    """Take note of parameters that are new.

    Those met before are laid out as they were, whatever they require now.
    """
    params = parameters(optimizer)
    new = {p for p in params if p not in optimizer._met and p.requires_grad}
    optimizer._trained = frozenset(new | optimizer._trained & set(params))
    optimizer._met = frozenset(params)


def follow(optimizer: Any, comm: Comm) -> Turns:
    """Lay out what requires a gradient now, which is the same on all ranks."""
    optimizer._settle()
    for bucket in optimizer._buckets:
        for name in bucket.sharded:
            whole = yield from checkpoint.gather(bucket, name, comm)
            for entry, vector in zip(bucket.entries, whole, strict=True):
                if vector is not None:
                    entry[name] = vector.to(bucket.device)
        for p, entry in zip(bucket.params, bucket.entries, strict=True):
            if not p.requires_grad:
                optimizer.state[p] = {name: tensor.clone() for name, tensor in entry.items()}
    optimizer._trained = frozenset(p for p in optimizer._met if p.requires_grad)
    optimizer._rebuild()
    for bucket in optimizer._buckets:
        bucket.renew_masters()


def consolidate(optimizer: Any, comm: Comm) -> Turns:
    """Residuals of frozen parameters become their mean over ranks too."""
    for bucket in optimizer._shelf:
        for p in bucket.params:
            for name in optimizer.averaged_state:
                if name in optimizer.state.get(p, {}):
                    yield from checkpoint.average(optimizer.state[p][name], bucket.device, comm)


def without_state(optimizer: Any, group: dict[str, Any]) -> list[int]:
    """The places in a group of parameters of which nothing is kept: a checkpoint that lacks it is
    not damaged.
    """
    return [place for place, p in enumerate(group["params"]) if not optimizer.state.get(p)]


def reset_from_outside(optimizer: Any) -> bool:
    """Whether ``optimizer.state`` was replaced, by a trainer that begins anew, and no longer shows
    the buckets.
    """
    return any(
        optimizer.state.get(p) is not entry
        for bucket in optimizer._buckets
        for p, entry in zip(bucket.params, bucket.entries, strict=True)
    )
