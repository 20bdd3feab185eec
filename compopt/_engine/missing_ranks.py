"""Ranks that will not join a collective of a step, reported through the store of the process group.

A rank that is interrupted within a step, or has lost masks that the others still have, posts a note
to the store. Ranks that wait in the step look for notes after a while, and raise: they do not apply
the step (a rank that had received everything before may have, see ``resharding``). Their
collectives no longer match, so they continue over a new group.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from .._wire.groups import Store, is_launched_by_torchrun
from .._wire.in_flight import looking_after
from .._wire.requests import CommunicationError, RankSilent
from .._wire.warning import warn
from .engine import Engine

Result = TypeVar("Result")
PREFIX = "compopt/"  # begins all keys, because the store is shared
LOOK_AFTER = 2.0  # seconds that a step waits before it looks for notes
# Seconds that a rank waits in a step before it names those that have not come, and before it does
# so again in a later step.
NAME_AFTER, NAME_AGAIN = 5.0, 60.0
WAITS = f"{PREFIX}waits/"  # and a rank: the step in which that waits
# Seconds that a note may take, and at most this share of the group's timeout: a step that fails at
# the timeout raises soon after it, also where the link to the store is cut.
NOTE_LIMIT, NOTE_SHARE = 10.0, 0.2

SILENT = "Another rank, or its node, is gone or does not answer"
RESTART = (
    ". When this rank ends, torchrun starts all ranks again, if it has --max-restarts left: load a "
    "checkpoint where your script begins"
)
CONTINUE = (
    ": make a new process group of the ranks that are left and call rebind(), or start all ranks "
    "again from a checkpoint"
)
UNEVEN = "call step() equally often on all ranks (drop_last=True, or torch's Join)"


class Note(Enum):
    """The kind of a note."""

    LEFT = "left"  # the rank will not finish the running step
    # the rank sends payloads of another length until all ranks have dropped their masks
    LOST_MASKS = "lost masks"
    CONSOLIDATES = "consolidates"  # the rank waited in consolidate_state(), and gave up
    FAILED = "failed"  # the rank raised an error, which collectives may not have told the others


class RankLeft(BaseException):
    """Ends a step that waits for a missing rank, without waiting for its collectives."""


# Steps


def run_watching_ranks(engine: Engine, take_step: Callable[[], None]) -> None:
    """Take a step; while it waits, look for notes of ranks that have left it, and name ranks that
    have not come to it.
    """
    withdraw_note(engine)
    absence = Absence(engine)
    try:
        if engine.comm.can_poll_store(engine.device):
            with looking_after(LOOK_AFTER, absence.look):
                take_step()
        else:
            watch_beside(absence)
            take_step()
    except CommunicationError as error:
        # its text says what its causes say: leave out their frames, and those of this package
        raise error.with_traceback(None) from None
    except Exception as error:
        who, what = f"rank {engine.comm.rank}", f"{type(error).__name__}: {error}"
        post_note(engine, Note.FAILED, f"{who} raised {what}")
        raise
    except BaseException as error:
        who, name = f"rank {engine.comm.rank}", type(error).__name__
        post_note(engine, Note.LEFT, f"{who} was interrupted by {name} after step {engine.steps}")
        raise
    finally:
        absence.stop_looking()
    withdraw_note(engine)


class Absence:
    """The ranks that have not come to a step in which this rank waits.

    A rank that waits says so at the store. So those that do not are late, or will never come: they
    evaluate, have run out of data, or have left the loop. Which of these, the others cannot know.
    So they wait on, and say for whom. With ``optimizer.patience`` they raise after so many seconds.
    """

    def __init__(self, engine: Engine):
        self.engine, method = engine, engine.method
        self.patience = method.patience
        self.is_looking = method.ranks_step_together  # else ranks take steps at their own pace
        self.began = time.monotonic()
        self.step = _identify_step(self.engine)
        self.is_announced = self.is_told = False
        self.engine.absent_ranks = ""

    def look(self) -> None:
        """Raise RankLeft where the step waits, if a rank has left it or is waited for no longer."""
        if sentence := explain_missing_rank(self.engine) or self.find_absent_ranks():
            post_note(self.engine, Note.LEFT, sentence)
            raise RankLeft(sentence)

    def find_absent_ranks(self) -> str:
        """Find the ranks that do not wait in this step, and warn of them. Returns why to raise, if
        they are to be waited for no longer.
        """
        engine, waited = self.engine, time.monotonic() - self.began
        if not self.is_looking:
            return ""
        if not self.is_announced:
            text = json.dumps(self.step)
            use_store(engine, lambda store: store.set(f"{WAITS}{engine.comm.rank}", text))
            self.is_announced = True
        if waited < NAME_AFTER:
            return ""
        ranks = self._list_not_waiting()
        engine.absent_ranks = ""
        if not ranks:
            return ""
        have = "have" if len(ranks) > 1 else "has"
        engine.absent_ranks = f"{list_ranks(ranks)} {have} not come to step {self.step[1] + 1}"
        is_first_waiting = engine.comm.rank == min({*range(engine.comm.size)} - {*ranks})
        if is_first_waiting and not self.is_told:
            self._warn_of_absent(waited)
        if self.patience is None or waited < self.patience:
            return ""
        return f"{engine.absent_ranks} within {waited:.0f} s: {UNEVEN}"

    def _list_not_waiting(self) -> list[int]:
        """Return the ranks that do not wait in this step; none if the store does not answer."""
        comm = self.engine.comm
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        keys = [f"{WAITS}{rank}" for rank in others]
        texts = use_store(
            self.engine, lambda store: [store.check([k]) and store.get(k) for k in keys]
        )
        pairs = zip(others, texts or (), strict=False)
        return [rank for rank, text in pairs if text != json.dumps(self.step).encode()]

    def _warn_of_absent(self, waited: float) -> None:
        """Warn, the first time in a run soon, then of long waits only: rank 0 may evaluate."""
        engine = self.engine
        if waited >= NAME_AGAIN or engine.claim_first("late ranks"):
            self.is_told = True
            warn(
                f"{engine.absent_ranks}, in which rank {engine.comm.rank} has waited for "
                f"{waited:.0f} s, and waits on until the timeout of the process group. If that "
                f"rank is not busy (evaluates, saves, loads data), {UNEVEN}."
            )

    def stop_looking(self) -> None:
        """Stop looking: the step has ended."""
        self.is_looking = False
        if self in _watched:
            _watched.remove(self)


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1 and 2", ..."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def watch_beside(absence: Absence) -> None:
    """Look for absent ranks on a thread, where the host cannot do so while it waits (NCCL)."""
    if absence.engine.comm.store is None or absence in _watched:
        return
    _watched.append(absence)
    if not _watchers:
        thread = threading.Thread(target=_look_repeatedly, name="compopt watch", daemon=True)
        _watchers.append(thread)
        thread.start()


_watched: list[Absence] = []  # of the running step, or of the last
_watchers: list[threading.Thread] = []


def _look_repeatedly() -> None:
    while True:
        time.sleep(LOOK_AFTER)
        for absence in _watched[:]:
            if time.monotonic() - absence.began > LOOK_AFTER:
                with contextlib.suppress(Exception):
                    absence.find_absent_ranks()
            del absence  # and with it the optimizer's engine


def post_lost_masks(engine: Engine) -> None:
    """Post a note that this rank has lost its masks."""
    who = f"rank {engine.comm.rank}"
    post_note(
        engine,
        Note.LOST_MASKS,
        f"{who} lost the masks that followed step {engine.steps}, and others have them",
    )


def post_note(engine: Engine, kind: Note, sentence: str) -> None:
    """Post a note of this rank, in place of an earlier one, until ``withdraw_note``."""
    engine.posted_note = kind.value
    _write_note(engine, json.dumps([*_identify_step(engine), kind.value, sentence]))


def withdraw_note(engine: Engine) -> None:
    """Remove this rank's note, if there is one: the rank takes part again."""
    if engine.posted_note:
        _write_note(engine, "")
    engine.posted_note = ""


def _write_note(engine: Engine, text: str) -> None:
    key = f"{PREFIX}note/{engine.comm.rank}"
    use_store(engine, lambda store: store.set(key, text))


def explain_missing_rank(engine: Engine) -> str:
    """Return which rank will not join the running step, and why; empty if no note says so."""
    for kind, sentence in _read_notes(engine):
        both_lost = kind is Note.LOST_MASKS and engine.posted_note == kind.value
        if kind not in (Note.CONSOLIDATES, Note.FAILED) and not both_lost:
            return sentence
    return ""


def explain_failed_step(
    engine: Engine, number: int, error: CommunicationError | RankLeft
) -> CommunicationError:
    """Return the error of step ``number``, which was not applied because of ``error``."""
    advice = ". Make a new process group on all ranks and call rebind()"
    return CommunicationError(
        f"step {number} was not applied on rank {engine.comm.rank}: {error}"
        f"{advice if isinstance(error, RankLeft) else explain_failure(engine, error)}"
    )


def explain_failure(engine: Engine, error: CommunicationError) -> str:
    """Return what to append to ``error``, which ended a step: a note of another rank about this
    step, in brackets; if there is none, and a rank is gone or silent, what happens next.
    """
    is_silent = isinstance(error, RankSilent)  # else collectives have told what failed
    for kind, sentence in _read_notes(engine):
        if kind is not Note.FAILED or is_silent:
            return f" ({sentence})"
    if not is_silent:
        return ""
    absent = engine.absent_ranks.capitalize()
    why = f"{absent}: {UNEVEN}. {SILENT}" if absent else SILENT
    return f". {why}{RESTART if is_launched_by_torchrun() else CONTINUE}"


def _read_notes(engine: Engine) -> list[tuple[Note, str]]:
    """Read the notes of ranks that have applied no more steps of this optimizer than this rank.
    Entries that are no notes, as those of another version, are skipped.
    """
    comm, (name, steps) = engine.comm, _identify_step(engine)
    keys = [f"{PREFIX}note/{rank}" for rank in range(comm.size) if rank != comm.rank]
    texts = use_store(engine, lambda store: [store.get(k) for k in keys if store.check([k])])
    notes = []
    for text in filter(None, texts or ()):
        with contextlib.suppress(ValueError, TypeError):
            owner, n, kind, sentence = json.loads(text)
            if owner == name and n <= steps:
                notes.append((Note(kind), str(sentence)))
    return notes


def use_store(engine: Engine, function: Callable[[Store], Result]) -> Result | None:
    """Return what ``function`` returns for the store of the group; None if it does not answer soon,
    or there is none.
    """
    store = engine.comm.store
    if store is not None:
        with contextlib.suppress(RuntimeError):
            return store.run(function, min(NOTE_LIMIT, NOTE_SHARE * store.limit))
    return None


def _identify_step(engine: Engine) -> tuple[str, int]:
    """Return the optimizer and the step that a note refers to."""
    return f"{engine.name} of {len(engine.parameters)} parameters", engine.steps
