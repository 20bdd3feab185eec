"""Parameters that require no gradient: not laid out in buckets, without state, never sent.

What is laid out follows ``requires_grad``, at the start of a step, when all ranks have seen in a
handshake that they agree. What was kept of a parameter that is frozen later stays in
``optimizer.state``, in tensors of its own, is saved like all state, and goes on when the parameter
is unfrozen. Of state that is cut into shards it is kept whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._wire.collectives import Communicator
from . import moving
from .turns import Turns

if TYPE_CHECKING:
    from .session import Session


def parameters(session: Session) -> list[Tensor]:
    return [p for group in session.option_groups for p in group["params"]]


def changed(session: Session) -> bool:
    """Whether other parameters require a gradient than those laid out."""
    return any(p.requires_grad != (p in session.trainable) for p in session.parameters)


def meet(session: Session) -> None:
    """Take note of parameters that are new.

    Those met before are laid out as they were, whatever they require now.
    """
    params = parameters(session)
    new = {p for p in params if p not in session.parameters and p.requires_grad}
    session.trainable = frozenset(new | session.trainable & set(params))
    session.parameters = frozenset(params)


def follow(session: Session, comm: Communicator) -> Turns[None]:
    """Lay out what requires a gradient now, which is the same on all ranks."""
    session.settle_state()
    state = session.face.state
    for bucket in session.buckets:
        for name in bucket.sharded:
            whole = yield from moving.gather(bucket, name, comm)
            for entry, vector in zip(bucket.entries, whole, strict=True):
                if vector is not None:
                    entry[name] = vector.to(bucket.device)
        for p, entry in zip(bucket.params, bucket.entries, strict=True):
            if not p.requires_grad:
                held = {name: t.clone() for name, t in entry.items() if isinstance(t, Tensor)}
                state[p] = held
    session.trainable = frozenset(p for p in session.parameters if p.requires_grad)
    session.rebuild_buckets()
    for bucket in session.buckets:
        bucket.renew_masters()


def consolidate(session: Session, comm: Communicator) -> Turns[None]:
    """Residuals of frozen parameters become their mean over ranks too."""
    face = session.face
    for bucket in session.shelf:
        for p in bucket.params:
            for name in face.averaged_state:
                if name in face.state.get(p, {}):
                    yield from moving.average(face.state[p][name], bucket.device, comm)


def without_state(session: Session, group: dict[str, Any]) -> list[int]:
    """The places in a group of parameters of which nothing is kept: a checkpoint that lacks it is
    not damaged.
    """
    state = session.face.state
    return [place for place, p in enumerate(group["params"]) if not state.get(p)]


def reset_from_outside(session: Session) -> bool:
    """Whether ``optimizer.state`` was replaced, by a trainer that begins anew, and no longer shows
    the buckets.
    """
    state = session.face.state
    return any(
        state.get(p) is not entry
        for bucket in session.buckets
        for p, entry in zip(bucket.params, bucket.entries, strict=True)
    )
