"""Parameters that require no gradient: not laid out in buckets, without state, never sent.

What is laid out follows ``requires_grad``, at the start of a step, when all ranks have seen in a
handshake that they agree. What was kept of a parameter that is frozen later stays in
``optimizer.state``, in tensors of its own, is saved like all state, and goes on when the parameter
is unfrozen. Of state that is cut into shards it is kept whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._wire.comm import Comm
from . import moving
from .turns import Turns

if TYPE_CHECKING:
    from .engine import Engine


def parameters(engine: Engine) -> list[Tensor]:
    return [p for group in engine.option_groups for p in group["params"]]


def changed(engine: Engine) -> bool:
    """Whether other parameters require a gradient than those laid out."""
    return any(p.requires_grad != (p in engine.trained) for p in engine.met)


def meet(engine: Engine) -> None:
    """Take note of parameters that are new.

    Those met before are laid out as they were, whatever they require now.
    """
    params = parameters(engine)
    new = {p for p in params if p not in engine.met and p.requires_grad}
    engine.trained = frozenset(new | engine.trained & set(params))
    engine.met = frozenset(params)


def follow(engine: Engine, comm: Comm) -> Turns[None]:
    """Lay out what requires a gradient now, which is the same on all ranks."""
    engine.settle()
    state = engine.face.state
    for bucket in engine.buckets:
        for name in bucket.sharded:
            whole = yield from moving.gather(bucket, name, comm)
            for entry, vector in zip(bucket.entries, whole, strict=True):
                if vector is not None:
                    entry[name] = vector.to(bucket.device)
        for p, entry in zip(bucket.params, bucket.entries, strict=True):
            if not p.requires_grad:
                held = {name: t.clone() for name, t in entry.items() if isinstance(t, Tensor)}
                state[p] = held
    engine.trained = frozenset(p for p in engine.met if p.requires_grad)
    engine.rebuild()
    for bucket in engine.buckets:
        bucket.renew_masters()


def consolidate(engine: Engine, comm: Comm) -> Turns[None]:
    """Residuals of frozen parameters become their mean over ranks too."""
    face = engine.face
    for bucket in engine.shelf:
        for p in bucket.params:
            for name in face.averaged_state:
                if name in face.state.get(p, {}):
                    yield from moving.average(face.state[p][name], bucket.device, comm)


def without_state(engine: Engine, group: dict[str, Any]) -> list[int]:
    """The places in a group of parameters of which nothing is kept: a checkpoint that lacks it is
    not damaged.
    """
    state = engine.face.state
    return [place for place, p in enumerate(group["params"]) if not state.get(p)]


def reset_from_outside(engine: Engine) -> bool:
    """Whether ``optimizer.state`` was replaced, by a trainer that begins anew, and no longer shows
    the buckets.
    """
    state = engine.face.state
    return any(
        state.get(p) is not entry
        for bucket in engine.buckets
        for p, entry in zip(bucket.params, bucket.entries, strict=True)
    )
