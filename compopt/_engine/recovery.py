"""After ranks were lost: those that go on are brought level, and what is gone is told.

A rank that dies while a step's messages are on the wire may leave some ranks with all of them and
others without. The first have then applied the step, the others have not, and no further message
could have prevented it. The ranks behind take the step over from one that is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._state.buckets import local
from .._wire.comm import Comm, ProcessGroup, connect
from .._wire.requests import Broadcast
from .._wire.warning import warn
from . import moving
from .peers import gather_rows
from .turns import Turns, ask

if TYPE_CHECKING:
    from .engine import Engine


def rebind(engine: Engine, group: ProcessGroup | Comm | None) -> Turns[None]:
    """``CompressedOptimizer.rebind``."""
    before = engine.connection.size if engine.connection else 0
    sharded = engine.face.sharded
    if sharded and (now := connect(group).size) > before:
        raise ValueError(
            f"rebind of {engine.name} goes to as many ranks or fewer, got {now} after "
            f"{before}: its state is cut into shards, so load a consolidated checkpoint on all "
            "ranks instead."
        )
    engine.runtime.forget()
    engine.forget_chosen()
    engine.offload.finish()
    for bucket in engine.buckets:
        for entry in bucket.entries:
            for name in bucket.sharded:
                entry.pop(name, None)
    engine.before = engine.before or engine.buckets
    engine.connect_to(group)
    yield from catch_up(engine, engine.comm)
    if sharded:
        yield from moving.move(engine.before, engine.buckets, engine.comm)
    engine.before = None
    tell_what_is_lost(engine, before, engine.comm.size)


def catch_up(engine: Engine, comm: Comm, new: bool = False) -> Turns[None]:
    """Bring ranks that are one step behind, or ``new``, to where the others are; their own
    residuals are lost.

    A residual may have gone out with the step that the others applied, and must not go out again.
    Shards of the moments stay, one step behind.

    Raises:
        ValueError: ranks are further apart than the failure of one step can bring them.
    """
    face = engine.face
    saved = face._saved()
    sharded = {name for bucket in engine.buckets for name in bucket.sharded}
    shared = list(_shared(saved, sharded.union(face.averaged_state)))
    # local steps step some of their groups, all other optimizers all
    counts = torch.tensor([group["step"] for group in engine.option_groups], dtype=torch.int64)
    words = torch.tensor(
        [-1 if new else int(counts.sum()), len(shared)], dtype=torch.int64, device=engine.device
    )
    rows = (yield from gather_rows(words, comm)).tolist()
    totals = [total for total, _ in rows]
    ahead, mine = max(totals), totals[comm.rank]
    if min(totals) == ahead:
        return
    known = [total for total in totals if total >= 0]
    if min(known) < ahead - len(counts) or len({count for _, count in rows}) > 1:
        steps = [total // len(counts) for total in totals]
        raise ValueError(
            f"ranks have taken {steps} steps, and a rank can make up for one step only, not the "
            "first: load the same checkpoint on all of them."
        )
    source = totals.index(ahead)
    yield from _take_over(counts, source, comm, words.device)
    params = [local(p.detach()) for group in face.param_groups for p in group["params"]]
    for tensor in [*params, *shared]:
        yield from _take_over(tensor, source, comm, words.device)
    if mine < ahead:
        for group, step in zip(saved["param_groups"], counts.tolist(), strict=True):
            group.update(step=step, residuals="mean")
        for entry in saved["state"].values():
            for name in set(face.averaged_state) & entry.keys():
                entry[name] = torch.zeros_like(entry[name])
        face.load_state_dict(saved)
        for bucket in engine.before or engine.buckets:
            for name in set(face.sent_once) & bucket.flat.keys():
                bucket.flat[name].zero_()
    behind = ", ".join(f"rank {rank}" for rank, total in enumerate(totals) if total < ahead)
    warn(
        f"{behind} had not applied step {int(counts.max())}, and took it over from rank {source}: "
        "what was held back there is lost.",
        comm.rank,
    )


def _shared(saved: dict[str, Any], own: set[str]) -> Iterator[Tensor]:
    """The tensors of a state dict that are the same on all ranks, in an order that is."""
    for state in (saved["state"], saved.get("base", {}).get("state", {})):
        for key in sorted(state):
            yield from (
                local(t)
                for name, t in sorted(state[key].items())
                if name not in own and torch.is_tensor(t)
            )


def _take_over(tensor: Tensor, source: int, comm: Comm, device: torch.device) -> Turns[None]:
    numbers = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    message = numbers.to(device).contiguous()
    numbers.copy_((yield from ask(comm, Broadcast(message, source))))


def tell_what_is_lost(
    engine: Engine, before: int, now: int, owed: Callable[[], float] | None = None
) -> None:
    """Warn that ranks are gone, and with them what they held back.

    ``owed``: the norm of what this rank holds back, where that is not all in its own residuals.
    """
    face = engine.face
    if face.averaged_state and now < before:
        shards = " The moments of their shards begin again at zero." if face.sharded else ""
        warn(
            f"{before - now} of {before} ranks are gone, and what they held back is lost with "
            f"them. The {now} that go on keep theirs (on this rank of norm "
            f"{(owed or engine.residual_norm)():.3g}).{shards}",
            engine.comm.rank,
        )
