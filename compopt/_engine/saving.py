"""Checkpoints and copies of an optimizer whose state lives in buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._wire.payload import dtype_name
from .._wire.warning import warn
from . import checkpoint, frozen, moving
from .face import Group
from .session import Session
from .turns import Turns


def come_to_rest(session: Session) -> None:
    """Before state is read: nothing is on its way, and it belongs to the parameters."""
    session.check_sound()
    session.settle_state()


def complete(session: Session, saved: dict[str, Any]) -> None:
    """Give every state of torch's state dict its parameter's shape, and say in the groups what it
    is.
    """
    groups = session.face.param_groups
    params = [p for group in groups for p in group["params"]]
    place = {p: n for n, p in enumerate(params)}
    for bucket in [*session.buckets, *session.shelf]:
        layouts = session.layouts_of(bucket)
        for i, p in enumerate(bucket.params):
            if entry := saved["state"].get(place[p]):
                saved["state"][place[p]] = checkpoint.spread(bucket, i, layouts, entry)
    for group, own in zip(saved["param_groups"], groups, strict=True):
        group.update(signature(session, own))


def signature(session: Session, group: Group) -> dict[str, Any]:
    """What every group of a state dict says of it: whose residuals it holds, who wrote it, and how.

    Where parameters have no state, because they were never trained, it also says which.
    """
    said = {
        "residuals": whose_residuals(session),
        "class": session.name,
        "format": checkpoint.FORMAT,
    }
    if "payload_dtype" in group:  # which may be set by hand
        said["payload_dtype"] = dtype_name(group["payload_dtype"])
    without = frozen.without_state(session, group)
    return {**said, "without_state": without} if without else said


def consolidate(session: Session) -> Turns[None]:
    """Residuals become their mean over ranks, and sharded state is gathered for the next state
    dict.
    """
    come_to_rest(session)
    for bucket in session.buckets:
        for name in session.face.averaged_state:
            if bucket.flat[name].numel():
                yield from moving.average(bucket.flat[name], bucket.device, session.comm)
        bucket.gathered = {}
        for name in bucket.sharded:
            bucket.gathered[name] = yield from moving.gather(bucket, name, session.comm)
    yield from frozen.consolidate(session, session.comm)
    session.consolidated_at = session.steps


def warn_of_what_is_missing(session: Session, owned: Iterable[Session] = ()) -> None:
    """Warn, once and on the rank that saves, of what a state dict lacks that was written now.

    ``owned``: engines whose state it holds too.
    """
    if "saving" in session.warned:
        return
    partly = [one for one in (session, *owned) if whose_residuals(one) != "mean"]
    found = (
        said
        for one in partly
        for said in _shards_elsewhere(one) + _owed_elsewhere(one) + _base_elsewhere(one)
    )
    if missing := list(dict.fromkeys(found)):
        session.warned.add("saving")
        warn(
            f"this state dict of {session.name} is not whole: {', and '.join(missing)}. Call "
            "consolidate_state() on all ranks before rank 0 saves.",
            0,  # on this rank, whichever it is
        )


def _shards_elsewhere(session: Session) -> list[str]:
    """What of the moments only other ranks have."""
    cut = [bucket for bucket in session.buckets if bucket.sharded]
    if not cut or session.steps == 0:
        return []
    own = sum(sum(bucket.shards.sizes(bucket.shards.rank)) for bucket in cut)
    share = own / max(1, sum(sum(bucket.lengths) for bucket in cut))
    names = ", ".join(dict.fromkeys(name for bucket in cut for name in bucket.sharded))
    rank = session.comm.rank
    return [f"it holds rank {rank}'s {share:.0%} of the moments ({names}) and zeros for the rest"]


def _owed_elsewhere(session: Session) -> list[str]:
    """What other ranks hold back, where this one does: they do so in the same steps."""
    names = session.face.averaged_state
    if not any(bucket.flat[name].any() for bucket in session.buckets for name in names):
        return []
    comm = session.comm
    others = "the other rank holds" if comm.size == 2 else f"the other {comm.size - 1} ranks hold"
    return [f"it lacks what {others} back ({', '.join(names)})"]


def _base_elsewhere(session: Session) -> list[str]:
    """The state of the inner optimizers of other ranks, where each has stepped by itself."""
    if session.face.has_equal_replicas:
        return []
    others = session.comm.size - 1
    ranks = "the other rank" if others == 1 else f"the other {others} ranks"
    return [f"it lacks the inner optimizer's state of {ranks}"]


def contents(session: Session) -> dict[str, Any]:
    """What a copy of an optimizer needs beside what torch copies; the rest is built again."""
    face = session.face
    own = {"sharded": face.sharded, "offload": face.offload, "simulate": face.simulate}
    return {**own, "_met": session.parameters, "_trained": session.trainable}


def whose_residuals(session: Session) -> str:
    """Of which rank a state dict would hold the residuals now; "mean" where of all."""
    face = session.face
    if not (face.sharded or face.averaged_state):
        return "mean"
    whole = all(bucket.gathered or not bucket.sharded for bucket in session.buckets)
    comm = session.comm
    if comm.size == 1 or (whole and session.consolidated_at == session.steps):
        return "mean"
    return f"rank {comm.rank} of {comm.size}"
