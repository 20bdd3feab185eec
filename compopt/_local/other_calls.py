"""Ranks that are not at one place: some in ``end_round()``, others in ``save()`` or
``consolidate_state()``.

The first wait in a gather of messages, the others at the store. Who waits in ``end_round()`` for
long says so at the store, with its number of collectives. A rank of the others that has started one
less answers by a message of its kind in the same gather: all raise at once, and their collectives
match as before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._engine.exchange import CollectiveGenerator, exchange_one
from .._engine.handshake import pack_message, unpack_messages
from .._engine.missing_ranks import LOOK_AFTER, PREFIX, use_store
from .._engine.session import Session
from .._wire.requests import AllGather
from .fragment_sync import FragmentSync

ENDS = f"{PREFIX}ends round/"  # and a rank: how many collectives it has started


def run_end_of_round(
    session: Session, sync: FragmentSync, turns: CollectiveGenerator[None]
) -> None:
    """Run the end of a round; say at the store that this rank waits in it."""
    is_told = False
    try:
        for pending in turns:
            try:
                polls = session.comm.can_poll_store(session.device)
                if polls and not pending.completes_within(LOOK_AFTER):
                    is_told = True
                    _tell(session, str(sync.comm.started))
            except BaseException as error:  # raise it where the end of the round waits
                turns.throw(error)
    finally:
        if is_told:
            _tell(session, "")


def _tell(session: Session, text: str) -> None:
    use_store(session, lambda store: store.set(f"{ENDS}{session.comm.rank}", text))


def find_end_of_round(session: Session, sync: FragmentSync) -> str:
    """Return which rank waits in ``end_round()`` for this one; empty if none does."""
    if sync.running is not None:
        sync.running.poll()  # the other may wait for this first
        if not sync.running.is_decided:
            return ""
    ranks = [rank for rank in range(session.comm.size) if rank != session.comm.rank]
    keys = [f"{ENDS}{rank}" for rank in ranks]
    texts = use_store(session, lambda store: [store.check([k]) and store.get(k) for k in keys])
    waited_for = str(sync.comm.started + 1).encode()
    waiting = [rank for rank, text in zip(ranks, texts or (), strict=False) if text == waited_for]
    return f"rank {waiting[0]} is in end_round() of LocalSteps" if waiting else ""


def answer_end_of_round(
    session: Session, sync: FragmentSync, kind: int
) -> CollectiveGenerator[None]:
    """Tell all ranks which call this one is in. Raises CommunicationError on all of them."""
    nothing = torch.zeros(0, dtype=torch.int64, device=session.device)
    gathered = yield from exchange_one(sync.comm, AllGather(pack_message(kind, nothing)))
    assert isinstance(gathered, Tensor)
    unpack_messages(gathered.cpu(), 0)
