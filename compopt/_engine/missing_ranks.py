"""Ranks that others wait for in vain, told through the store of the process group.

Before ``consolidate_state()`` exchanges anything, ranks meet there: ``if rank == 0:
optimizer.consolidate_state()`` is a habit, and a collective on rank 0 alone hangs. A rank that is
interrupted within a step, or has lost masks that the others still have, leaves a note there. Ranks
that wait in the step look for notes after a while, and raise; nobody applies the step. Their
collectives are then out of step, so they continue over a new group.
"""

from __future__ import annotations

import contextlib
import json
from enum import Enum

from .._wire.requests import CommunicationError
from .._wire.store import RanksMissing
from .session import Session
from .turns import Turns

PATIENCE = 10.0  # seconds that rank 0 waits for the others in consolidate_state()
PATIENCE_WITH_RANK_0 = 1800.0  # that the others wait for rank 0, which may evaluate before it comes
LOOK_AFTER = 2.0  # that a step waits before it looks for notes

ADVICE = "call it on all ranks, before `if rank == 0:`"


class Note(Enum):
    """Why a rank has left a note."""

    LEFT = "left"  # it does not finish the step after the last one that it applied
    LOST_MASKS = "lost masks"  # the same, unless all ranks have lost them
    CONSOLIDATES = "consolidates"  # it waited in consolidate_state(), and gave up


class RankLeft(BaseException):
    """Thrown into a step that waits for a rank that will not come: it drains no collectives."""


# Consolidation


def meet_to_consolidate(session: Session, patience: float | None) -> None:
    """Wait until all ranks have come to consolidate the same optimizer.

    Raises CommunicationError, with nothing started, where some are missing after ``patience``
    seconds; ValueError where ranks have come for different optimizers.
    """
    store = session.comm.store
    if store is None or not (session.optimizer.averaged_state or session.optimizer.sharded):
        return
    if patience is None:
        patience = PATIENCE if store.rank == 0 else PATIENCE_WITH_RANK_0
    try:
        described = store.meet(_describe_state(session), patience)
    except RanksMissing as error:
        who = f"rank {store.rank}"
        post_note(session, Note.CONSOLIDATES, f"{who} was in consolidate_state(): {ADVICE}")
        raise CommunicationError(
            f"consolidate_state() was called on rank {store.rank}, but {error}: {ADVICE}, or wait "
            "longer (patience=). Nothing was changed."
        ) from None
    except RuntimeError as error:
        raise CommunicationError(
            "consolidate_state() could not ask the other ranks, for the store of their process "
            f"group does not answer: {error}"
        ) from error
    for rank, theirs in enumerate(described):
        if theirs != described[0]:
            raise ValueError(
                f"ranks differ in consolidate_state(): rank 0 has {described[0]}, rank {rank} has "
                f"{theirs}: consolidate the same optimizers in the same order on all ranks."
            )


def _describe_state(session: Session) -> str:
    names = session.optimizer.averaged_state
    held = sum(bucket.flat[name].numel() for bucket in session.buckets for name in names)
    cut = sum(
        bucket.shards.max_numel * len(bucket.sharded_names)
        for bucket in session.buckets
        if bucket.is_sharded
    )
    return f"{session.name}, {held} elements of {', '.join(names) or 'nothing'}, {cut} in shards"


# Steps


def run_step(session: Session, turns: Turns[None]) -> None:
    """Run a step to its end; where it waits for long, look whether a rank has left it."""
    withdraw_note(session)
    try:
        for pending in turns:
            if not session.comm.can_poll_store(session.device):
                continue
            try:
                while not pending.completes_within(LOOK_AFTER):
                    if sentence := find_missing_rank(session):
                        post_note(session, Note.LEFT, sentence)
                        raise RankLeft(sentence)
            except BaseException as error:  # as if it were raised where the step waits
                turns.throw(error)
    except Exception:
        raise
    except BaseException as error:
        who, name = f"rank {session.comm.rank}", type(error).__name__
        post_note(session, Note.LEFT, f"{who} was interrupted by {name} after step {session.steps}")
        raise
    withdraw_note(session)


def post_lost_masks(session: Session) -> None:
    """Tell the other ranks that this one has lost its masks."""
    who = f"rank {session.comm.rank}"
    post_note(
        session,
        Note.LOST_MASKS,
        f"{who} lost the masks that followed step {session.steps}, and others have them",
    )


def post_note(session: Session, kind: Note, sentence: str) -> None:
    """Leave a note until this rank's next step, which may be the one that it is in."""
    session.posted_note = kind.value
    if session.comm.store is not None:
        with contextlib.suppress(RuntimeError):
            session.comm.store.post_note(json.dumps([*_mark(session), kind.value, sentence]))


def withdraw_note(session: Session) -> None:
    """Remove this rank's note, if it has left one: it comes to the steps that follow."""
    if session.posted_note and session.comm.store is not None:
        with contextlib.suppress(RuntimeError):
            session.comm.store.post_note("")
    session.posted_note = ""


def find_missing_rank(session: Session) -> str:
    """Say which rank will not come to the running step, and why; nothing where all may come."""
    for kind, sentence in _read_notes(session):
        both_lost = kind is Note.LOST_MASKS and session.posted_note == kind.value
        if kind is not Note.CONSOLIDATES and not both_lost:
            return sentence
    return ""


def explain_failure(session: Session) -> str:
    """What the notes of other ranks say about a step that has failed."""
    return "".join(f" ({sentence})" for _, sentence in _read_notes(session)[:1])


def _read_notes(session: Session) -> list[tuple[Note, str]]:
    """Read the notes of ranks that have applied no more steps of this optimizer than this one."""
    store, (name, steps) = session.comm.store, _mark(session)
    notes = []
    if store is not None:
        with contextlib.suppress(RuntimeError):
            notes = [json.loads(text) for text in store.read_notes().values() if text]
    return [(Note(kind), text) for theirs, n, kind, text in notes if theirs == name and n <= steps]


def _mark(session: Session) -> tuple[str, int]:
    """Of which optimizer and which step a note speaks."""
    return f"{session.name} of {len(session.parameters)} parameters", session.steps
