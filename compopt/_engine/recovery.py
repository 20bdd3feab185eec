"""After ranks were lost: those that go on are brought level, and what is gone is told.

A rank that dies while a step's messages are on the wire may leave some ranks with all of them and
others without. The first have then applied the step, the others have not, and no further message
could have prevented it. The ranks behind take the step over from one that is ahead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._state.buckets import local
from .._wire.comm import Comm, connect
from .._wire.requests import Broadcast
from . import checkpoint
from .handshake import Turns, device_of, gather


def rebind(optimizer: Any, process_group: object) -> Turns:
    """``CompressedOptimizer.rebind``."""
    before = optimizer._comm.size if optimizer._comm else 0
    if optimizer.sharded and (now := connect(process_group).size) > before:
        raise ValueError(
            f"rebind of {type(optimizer).__name__} goes to as many ranks or fewer, got {now} after "
            f"{before}: its state is cut into shards, so load a consolidated checkpoint on all "
            "ranks instead."
        )
    optimizer._runtime.forget()
    optimizer.forget_chosen()
    optimizer._offload.finish()
    for bucket in optimizer._buckets:
        for entry in bucket.entries:
            for name in bucket.sharded:
                entry.pop(name, None)
    optimizer._before = optimizer._before or optimizer._buckets
    optimizer._group, optimizer._comm, optimizer._counted = process_group, None, 0
    optimizer._build()
    yield from catch_up(optimizer, optimizer.comm)
    if optimizer.sharded:
        yield from checkpoint.move(optimizer._before, optimizer._buckets, optimizer.comm)
    optimizer._before = None
    tell_what_is_lost(optimizer, before, optimizer.comm.size)


def catch_up(optimizer: Any, comm: Comm) -> Turns:
    """Bring ranks that are one step behind to where the others are; their own residuals are lost.

    A residual may have gone out with the step that the others applied, and must not go out again.
    Shards of the moments stay, one step behind.

    Raises:
        ValueError: ranks are further apart than the failure of one step can bring them.
    """
    saved = optimizer.state_dict()
    sharded = {name for bucket in optimizer._buckets for name in bucket.sharded}
    shared = list(_shared(saved, sharded.union(optimizer.averaged_state)))
    words = torch.tensor(
        [saved["param_groups"][0]["step"], len(shared)],
        dtype=torch.int64,
        device=device_of(optimizer),
    )
    rows = (yield from gather(words, comm)).tolist()
    steps = [step for step, _ in rows]
    ahead, mine = max(steps), steps[comm.rank]
    if min(steps) == ahead:
        return
    if min(steps) < ahead - 1 or len({count for _, count in rows}) > 1:
        raise ValueError(
            f"ranks have taken {steps} steps, and a rank can make up for one step only, not the "
            "first: load the same checkpoint on all of them."
        )
    source = steps.index(ahead)
    params = [local(p.detach()) for group in optimizer.param_groups for p in group["params"]]
    for tensor in [*params, *shared]:
        yield from _take_over(tensor, source, comm, words.device)
    if mine < ahead:
        lost = optimizer._residual_norm()
        for group in saved["param_groups"]:
            group.update(step=ahead, residuals="mean")
        for entry in saved["state"].values():
            for name in set(optimizer.averaged_state) & entry.keys():
                entry[name] = torch.zeros_like(entry[name])
        optimizer.load_state_dict(saved)
        warnings.warn(
            f"rank {comm.rank} had not applied step {ahead}, and took it over from rank {source}: "
            f"what it held back itself (of norm {lost:.3g}) is lost.",
            stacklevel=5,
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


def _take_over(tensor: Tensor, source: int, comm: Comm, device: torch.device) -> Turns:
    numbers = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    message = numbers.to(device).contiguous()
    pending = comm.start(Broadcast(message, source))
    yield pending
    numbers.copy_(pending.wait())


def tell_what_is_lost(optimizer: Any, before: int, now: int) -> None:
    """Warn that ranks are gone, and with them what they held back."""
    if optimizer.averaged_state and now < before:
        shards = " The moments of their shards begin again at zero." if optimizer.sharded else ""
        warnings.warn(
            f"{before - now} of {before} ranks are gone, and what they held back is lost with "
            f"them. The {now} that go on keep theirs (on this rank of norm "
            f"{optimizer._residual_norm():.3g}).{shards}",
            stacklevel=5,
        )
