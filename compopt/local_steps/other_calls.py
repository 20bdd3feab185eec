"""Ranks that are not at one place: some in ``end_round()``, others in ``save()`` or
``consolidate_state()``.

The first wait in a gather of messages, the others at the store. A rank that waits long in
``end_round()`` posts the number of its collectives to the store. A rank in another call that has
started one less joins the same gather, with a message that names its call. So all ranks raise
together, and their collectives still match.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._engine.engine import Engine
from .._engine.exchange import exchange_one
from .._engine.handshake import pack_message, unpack_messages
from .._engine.missing_ranks import LOOK_AFTER, PREFIX, use_store
from .._wire.in_flight import looking_after
from .._wire.requests import AllGather
from .fragment_sync import FragmentSync

ENDS = f"{PREFIX}ends round/"  # and a rank: how many collectives it has started


def run_end_of_round(engine: Engine, sync: FragmentSync, end_round: Callable[[], None]) -> None:
    """Call ``end_round``; say at the store that this rank waits in it, once it has for long."""
    if not engine.comm.can_poll_store(engine.device):
        return end_round()
    told: list[str] = []

    def tell() -> None:
        told.append(str(sync.comm.started))
        _tell(engine, told[-1])

    try:
        with looking_after(LOOK_AFTER, tell):
            end_round()
    finally:
        if told:
            _tell(engine, "")


def _tell(engine: Engine, text: str) -> None:
    use_store(engine, lambda store: store.set(f"{ENDS}{engine.comm.rank}", text))


def find_end_of_round(engine: Engine, sync: FragmentSync) -> str:
    """Return which rank waits in ``end_round()`` for this one; empty if none does."""
    if sync.running is not None:
        sync.running.poll()  # the other may wait for this first
        if not sync.running.is_decided:
            return ""
    ranks = [rank for rank in range(engine.comm.size) if rank != engine.comm.rank]
    keys = [f"{ENDS}{rank}" for rank in ranks]
    texts = use_store(engine, lambda store: [store.check([k]) and store.get(k) for k in keys])
    waited_for = str(sync.comm.started + 1).encode()
    waiting = [rank for rank, text in zip(ranks, texts or (), strict=False) if text == waited_for]
    return f"rank {waiting[0]} is in end_round() of LocalSteps" if waiting else ""


def answer_end_of_round(engine: Engine, sync: FragmentSync, kind: int) -> None:
    """Tell all ranks which call this one is in. Raises CommunicationError on all of them."""
    nothing = torch.zeros(0, dtype=torch.int64, device=engine.device)
    gathered = exchange_one(sync.comm, AllGather(pack_message(kind, nothing)))
    unpack_messages(gathered.cpu(), 0)
