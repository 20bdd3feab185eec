"""State dicts of an optimizer whose state lives in buckets.

In memory masks are bits and a momentum that is zero off its mask keeps only what is on it. In a
state dict every state has its parameter's shape, and is a DTensor where the parameter is one: so
torch.distributed.checkpoint can cut and join it like the parameter, and a checkpoint loads under
another wrapper or another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._state.buckets import Bucket
from .._state.layouts import Layout
from .._wire.payload import dtype_name
from .._wire.warning import warn
from .options import Group
from .resharding import average_state, gather_shards
from .session import Session
from .turns import Turns

FORMAT = 1  # of state dicts; written into every group, beside the class. 0: none was written yet


def come_to_rest(session: Session) -> None:
    """Before state is read: nothing is on its way, and it belongs to the parameters."""
    session.check_sound()
    session.settle_state()


def complete(session: Session, saved: dict[str, Any]) -> None:
    """Give every state of torch's state dict its parameter's shape, and say in the groups what it
    is.
    """
    groups = session.optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    place = {p: n for n, p in enumerate(params)}
    for bucket in [*session.buckets, *session.shelf]:
        layouts = session.layouts_of(bucket)
        for i, p in enumerate(bucket.params):
            if entry := saved["state"].get(place[p]):
                saved["state"][place[p]] = spread(bucket, i, layouts, entry)
    for group, own in zip(saved["param_groups"], groups, strict=True):
        group.update(signature(session, own))


def spread(
    bucket: Bucket, i: int, layouts: Mapping[str, Layout], entry: dict[str, Any]
) -> dict[str, Any]:
    """The state of tensor i as a state dict has it: all in the tensor's shape."""
    member, spread_out = bucket.get_member(i), dict(entry)
    for name, layout in layouts.items():
        if name not in entry:
            continue
        gathered = bucket.gathered_state[name][i] if name in bucket.gathered_state else None
        if gathered is None:
            spread_out[name] = layout.expand(entry[name], member, entry)
        else:
            spread_out[name] = member.laid_out(gathered.to(bucket.device))
    return spread_out


def signature(session: Session, group: Group) -> dict[str, Any]:
    """What every group of a state dict says of it: whose residuals it holds, who wrote it, and how.

    Where parameters have no state, because they were never trained, it also says which.
    """
    said = {
        "residuals": whose_residuals(session),
        "class": session.name,
        "format": FORMAT,
    }
    if "payload_dtype" in group:  # which may be set by hand
        said["payload_dtype"] = dtype_name(group["payload_dtype"])
    # the places of parameters without state: a checkpoint that lacks it is not damaged
    state = session.optimizer.state
    without = [place for place, p in enumerate(group["params"]) if not state.get(p)]
    return {**said, "without_state": without} if without else said


def consolidate(session: Session) -> Turns[None]:
    """Residuals become their mean over ranks, and sharded state is gathered for the next state
    dict.
    """
    come_to_rest(session)
    for bucket in session.buckets:
        for name in session.optimizer.averaged_state:
            if bucket.flat[name].numel():
                yield from average_state(bucket.flat[name], bucket.device, session.comm)
        bucket.gathered_state = {}
        for name in bucket.sharded_names:
            bucket.gathered_state[name] = yield from gather_shards(bucket, name, session.comm)
    for bucket in session.shelf:
        for p in bucket.params:
            entry = session.optimizer.state.get(p, {})
            for name in session.optimizer.averaged_state:
                if name in entry:
                    yield from average_state(entry[name], bucket.device, session.comm)
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
    cut = [bucket for bucket in session.buckets if bucket.sharded_names]
    if not cut or session.steps == 0:
        return []
    own = sum(sum(bucket.shards.sizes(bucket.shards.rank)) for bucket in cut)
    share = own / max(1, sum(sum(bucket.lengths) for bucket in cut))
    names = ", ".join(dict.fromkeys(name for bucket in cut for name in bucket.sharded_names))
    rank = session.comm.rank
    return [f"it holds rank {rank}'s {share:.0%} of the moments ({names}) and zeros for the rest"]


def _owed_elsewhere(session: Session) -> list[str]:
    """What other ranks hold back, where this one does: they do so in the same steps."""
    names = session.optimizer.averaged_state
    if not any(bucket.flat[name].any() for bucket in session.buckets for name in names):
        return []
    comm = session.comm
    others = "the other rank holds" if comm.size == 2 else f"the other {comm.size - 1} ranks hold"
    return [f"it lacks what {others} back ({', '.join(names)})"]


def _base_elsewhere(session: Session) -> list[str]:
    """The state of the inner optimizers of other ranks, where each has stepped by itself."""
    if session.optimizer.has_equal_replicas:
        return []
    others = session.comm.size - 1
    ranks = "the other rank" if others == 1 else f"the other {others} ranks"
    return [f"it lacks the inner optimizer's state of {ranks}"]


def contents(session: Session) -> dict[str, Any]:
    """What a copy of an optimizer needs beside what torch copies; the rest is built again."""
    optimizer = session.optimizer
    own = {
        "sharded": optimizer.sharded,
        "offload": optimizer.offload,
        "simulate": optimizer.simulate,
    }
    return {**own, "_parameters": session.parameters, "_trainable": session.trainable}


def whose_residuals(session: Session) -> str:
    """Of which rank a state dict would hold the residuals now; "mean" where of all."""
    optimizer = session.optimizer
    if not (optimizer.sharded or optimizer.averaged_state):
        return "mean"
    whole = all(bucket.gathered_state or not bucket.sharded_names for bucket in session.buckets)
    comm = session.comm
    if comm.size == 1 or (whole and session.consolidated_at == session.steps):
        return "mean"
    return f"rank {comm.rank} of {comm.size}"
