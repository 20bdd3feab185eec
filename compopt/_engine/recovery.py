"""Recovery after ranks were lost: those that continue agree on the last step, and a warning says
what is gone.

A rank that dies while a step's payloads are on the wire may leave some ranks with all of them and
others without. The first have then applied the step and the others have not; no further message
could prevent that. The ranks behind take the step over from one that is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._state.tensors import to_local
from .._wire.collectives import Communicator, ProcessGroup, connect
from .._wire.requests import Broadcast
from .._wire.warning import warn
from .peers import gather_rows
from .resharding import reshard_state
from .session import Session
from .turns import Turns, ask


def rebind(session: Session, group: ProcessGroup | Communicator | None) -> Turns[None]:
    """Continue over another group, as ``CompressedOptimizer.rebind`` says."""
    size_before = session.connection.size if session.connection else 0
    sharded = session.optimizer.sharded
    if sharded and (size := connect(group).size) > size_before:
        raise ValueError(
            f"rebind of {session.name} goes to as many ranks or fewer, got {size} after "
            f"{size_before}: its state is cut into shards, so load a consolidated checkpoint on "
            "all ranks instead."
        )
    session.forget_in_flight()
    session.forget_masks()
    session.offload.finish()
    for bucket in session.buckets:
        for entry in bucket.entries:
            for name in bucket.sharded_names:
                entry.pop(name, None)
    session.unmoved_buckets = session.unmoved_buckets or session.buckets
    session.connect_to(group)
    yield from catch_up(session, session.comm)
    if sharded:
        yield from reshard_state(session.unmoved_buckets, session.buckets, session.comm)
    session.unmoved_buckets = None
    warn_of_lost_residuals(session, size_before, session.comm.size)


def catch_up(session: Session, comm: Communicator, is_new: bool = False) -> Turns[None]:
    """Bring ranks that are one step behind, or new, to where the others are.

    Their own residuals are lost: these may have been sent with the step that the others applied,
    and must not be sent again. Shards of the moments stay, one step behind.

    Raises:
        ValueError: ranks are further apart than the failure of one step can bring them.
    """
    optimizer = session.optimizer
    saved = optimizer._saved()
    shared = list(_shared_tensors(saved, _own_state(session)))
    # local steps step some of their groups, all other optimizers all
    counts = torch.tensor([group["step"] for group in session.option_groups], dtype=torch.int64)
    numbers = [-1 if is_new else int(counts.sum()), len(shared)]
    message = torch.tensor(numbers, dtype=torch.int64, device=session.device)
    rows = (yield from gather_rows(message, comm)).tolist()
    totals = [total for total, _ in rows]
    latest = max(totals)
    if min(totals) == latest:
        return
    oldest = min(total for total in totals if total >= 0)
    if oldest < latest - len(counts) or len({count for _, count in rows}) > 1:
        steps = [total // len(counts) for total in totals]
        raise ValueError(
            f"ranks have taken {steps} steps, and a rank can make up for one step only, not the "
            "first: load the same checkpoint on all of them."
        )
    source = totals.index(latest)
    params = [to_local(p.detach()) for group in optimizer.param_groups for p in group["params"]]
    for tensor in [counts, *params, *shared]:
        yield from _broadcast_into(tensor, source, comm, session.device)
    if totals[comm.rank] < latest:
        _load_taken_over(session, saved, counts.tolist())
    behind = ", ".join(f"rank {rank}" for rank, total in enumerate(totals) if total < latest)
    warn(
        f"{behind} had not applied step {int(counts.max())}, and took it over from rank {source}: "
        "what was held back there is lost.",
        comm.rank,
    )


def _own_state(session: Session) -> set[str]:
    """The names of state that differs from rank to rank."""
    sharded = {name for bucket in session.buckets for name in bucket.sharded_names}
    return sharded.union(session.optimizer.averaged_state)


def _shared_tensors(saved: dict[str, Any], own: set[str]) -> Iterator[Tensor]:
    """Yield the tensors of a state dict that all ranks share, in the same order on all of them.

    ``own``: the names of the others.
    """
    for state in (saved["state"], saved.get("base", {}).get("state", {})):
        for key in sorted(state):
            yield from (
                to_local(t)
                for name, t in sorted(state[key].items())
                if name not in own and torch.is_tensor(t)
            )


def _broadcast_into(
    tensor: Tensor, source: int, comm: Communicator, device: torch.device
) -> Turns[None]:
    """Overwrite ``tensor`` with that of the rank ``source``."""
    numbers = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    message = numbers.to(device).contiguous()
    numbers.copy_((yield from ask(comm, Broadcast(message, source))))


def _load_taken_over(session: Session, saved: dict[str, Any], steps: list[int]) -> None:
    """Load a state dict whose tensors are those of a rank that is ahead, with no residuals."""
    optimizer = session.optimizer
    for group, step in zip(saved["param_groups"], steps, strict=True):
        group.update(step=step, residuals="mean")
    for entry in saved["state"].values():
        for name in set(optimizer.averaged_state) & entry.keys():
            entry[name] = torch.zeros_like(entry[name])
    optimizer.load_state_dict(saved)
    for bucket in session.unmoved_buckets or session.buckets:
        for name in set(optimizer.sent_once) & bucket.flat.keys():
            bucket.flat[name].zero_()


def warn_of_lost_residuals(
    session: Session,
    size_before: int,
    size: int,
    residual_norm: Callable[[], float] | None = None,
) -> None:
    """Warn where ranks are gone, and with them what they had not sent.

    ``residual_norm``: the norm of this rank's residuals, where these are not all its session's.
    """
    optimizer = session.optimizer
    if optimizer.averaged_state and size < size_before:
        shards = " The moments of their shards begin again at zero." if optimizer.sharded else ""
        norm = (residual_norm or session.residual_norm)()
        warn(
            f"{size_before - size} of {size_before} ranks are gone, and what they held back is "
            f"lost with them. The {size} that go on keep theirs (on this rank of norm "
            f"{norm:.3g}).{shards}",
            session.comm.rank,
        )
