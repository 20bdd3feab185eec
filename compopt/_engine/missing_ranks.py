"""Ranks that will not join a collective, reported through the store of the process group.

Before ``consolidate_state()`` exchanges anything, ranks meet at the store: ``if rank == 0:
optimizer.consolidate_state()`` is a common mistake, and a collective on rank 0 alone hangs. A rank
that is interrupted within a step, or has lost masks that the others still have, posts a note to the
store. Ranks that wait in the step look for notes after a while, and raise: they do not apply the
step (a rank that had received everything before may have, see ``resharding``). Their collectives no
longer match, so they continue over a new group.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum

from .._wire.collectives import Communicator, is_launched_by_torchrun
from .._wire.requests import CommunicationError, RankSilent
from .._wire.stores import Store
from .._wire.warning import warn
from .exchange import CollectiveGenerator, Result
from .handshake import CONSOLIDATION, SAVE
from .optimizer_base import OptimizerBase
from .session import Session

PREFIX = "compopt/"  # begins all keys, because the store is shared
# Seconds. In consolidate_state() rank 0 waits PATIENCE for the others. They wait longer for rank 0,
# which may evaluate before it calls it.
PATIENCE, PATIENCE_WITH_RANK_0 = 10.0, 1800.0
LOOK_AFTER = 2.0  # seconds that a step waits before it looks for notes
LOOK_AGAIN = 0.5  # seconds after which a rank that waits at the store looks where others are
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
ADVICE = "call it on all ranks, before `if rank == 0:`"


class Note(Enum):
    """The kind of a note."""

    LEFT = "left"  # the rank will not finish the running step
    # the rank sends payloads of another length until all ranks have dropped their masks
    LOST_MASKS = "lost masks"
    CONSOLIDATES = "consolidates"  # the rank waited in consolidate_state(), and gave up
    FAILED = "failed"  # the rank raised an error, which collectives may not have told the others


class RankLeft(BaseException):
    """Ends a step that waits for a missing rank, without waiting for its collectives."""


# Consolidation


def wait_for_all_to_consolidate(optimizer: OptimizerBase, patience: float | None) -> None:
    """Wait until all ranks have called ``consolidate_state()`` on the same optimizer.

    Raises CommunicationError, with nothing started, if some have not after ``patience`` seconds;
    ValueError if they consolidate different optimizers.
    """
    session, names = optimizer._session, optimizer.rank_local_state
    comm, store = session.comm, session.comm.store
    if store is None or not (names or optimizer.sharded):
        return
    averaged = sum(bucket.flat[name].numel() for bucket in session.buckets for name in names)
    in_shards = sum(
        bucket.shards.max_numel * len(bucket.sharded_names)
        for bucket in session.buckets
        if bucket.is_sharded
    )
    state = f"{averaged} elements of {', '.join(names) or 'nothing'}, {in_shards} in shards"
    if patience is None:
        patience = PATIENCE if comm.rank == 0 else PATIENCE_WITH_RANK_0
    look = optimizer.find_end_of_round
    try:
        described = gather_at_store(
            store, comm.rank, comm.size, f"{session.name}, {state}", patience, look
        )
    except RanksMissing as error:
        if told := _answer_end_of_round(optimizer, CONSOLIDATION, str(error)):
            raise CommunicationError(f"{told}. Nothing was changed.") from None
        who = f"rank {comm.rank}"
        post_note(session, Note.CONSOLIDATES, f"{who} was in consolidate_state(): {ADVICE}")
        raise CommunicationError(
            f"consolidate_state() was called on rank {comm.rank}, but {error}: {ADVICE}, or wait "
            "longer (patience=). Nothing was changed."
        ) from None
    except RuntimeError as error:
        raise CommunicationError(
            "consolidate_state() could not reach the other ranks, because the store of their "
            f"process group does not answer: {error}"
        ) from None
    for rank, description in enumerate(described):
        if description != described[0]:
            raise ValueError(
                f"ranks differ in consolidate_state(): rank 0 has {described[0]}, rank {rank} has "
                f"{description}: consolidate the same optimizers in the same order on all ranks."
            )


def wait_for_all_to_save(optimizer: OptimizerBase, comm: Communicator) -> None:
    """Wait until all ranks of ``comm`` have called ``save()``, and nothing else: messages of a save
    and of the end of a round, of two sizes, would make gloo end a process.

    Raises CommunicationError, with nothing sent, if some have not after ``optimizer.patience``
    seconds, by default the timeout of the process group.
    """
    if (store := comm.store) is None:
        return
    what, patience = f"save() of Snapshots of {optimizer._session.name}", optimizer.patience
    try:
        patience = store.limit if patience is None else patience
        look = optimizer.find_end_of_round
        called = gather_at_store(store, comm.rank, comm.size, what, patience, look)
        others = [f"rank {rank} is in {one}" for rank, one in enumerate(called) if one != what]
    except (RanksMissing, RuntimeError) as error:
        if told := _answer_end_of_round(optimizer, SAVE, str(error)):
            raise CommunicationError(f"{told}. Nothing was written.") from None
        others = [str(error)]
    if others:
        raise CommunicationError(
            f"save() was called on rank {comm.rank}, but {', '.join(others)}: call it on all ranks "
            "after the same round (count optimizer.stats.round where rounds end by time) or step. "
            "Nothing was sent or written."
        )


def _answer_end_of_round(optimizer: OptimizerBase, kind: int, why: str) -> str:
    """Answer ranks that wait in ``end_round()`` for this one, if some do. Returns what all ranks
    are told. ``why`` the meeting has failed: if others have found such a rank, so does this one.
    """
    until = time.monotonic() + (2 * LOOK_AFTER if "end_round()" in why else 0.0)
    while not (found := optimizer.find_end_of_round()) and time.monotonic() < until:
        time.sleep(0.01)
    if found:
        try:
            for _ in optimizer.answer_end_of_round(kind):
                pass
        except CommunicationError as error:
            return str(error)
    return ""


# Steps


def run_watching_ranks(optimizer: OptimizerBase, collectives: CollectiveGenerator[None]) -> None:
    """Run a step to its end; while it waits, look for notes of ranks that have left it, and name
    ranks that have not come to it.
    """
    session: Session = optimizer._session
    withdraw_note(session)
    absence = Absence(optimizer)
    try:
        for pending in collectives:
            if not session.comm.can_poll_store(session.device):
                watch_beside(absence)
                continue
            try:
                while not pending.completes_within(LOOK_AFTER):
                    sentence = explain_missing_rank(session) or absence.find_absent_ranks()
                    if sentence:
                        post_note(session, Note.LEFT, sentence)
                        raise RankLeft(sentence)
            except BaseException as error:  # raise it where the step waits
                collectives.throw(error)
    except CommunicationError as error:
        # its text says what its causes say: leave out their frames, and those of this package
        raise error.with_traceback(None) from None
    except Exception as error:
        who, what = f"rank {session.comm.rank}", f"{type(error).__name__}: {error}"
        post_note(session, Note.FAILED, f"{who} raised {what}")
        raise
    except BaseException as error:
        who, name = f"rank {session.comm.rank}", type(error).__name__
        post_note(session, Note.LEFT, f"{who} was interrupted by {name} after step {session.steps}")
        raise
    finally:
        absence.stop_looking()
    withdraw_note(session)


class Absence:
    """The ranks that have not come to a step in which this rank waits.

    A rank that waits says so at the store. So those that do not are late, or will never come: they
    evaluate, have run out of data, or have left the loop. Which of these, the others cannot know.
    So they wait on, and say for whom. With ``optimizer.patience`` they raise after so many seconds.
    """

    def __init__(self, optimizer: OptimizerBase):
        self.session: Session = optimizer._session
        self.patience = optimizer.patience
        self.is_looking = optimizer._is_in_step  # else ranks take steps at their own pace
        self.began = time.monotonic()
        self.step = _identify_step(self.session)
        self.is_announced = self.is_told = False
        self.session.absent_ranks = ""

    def find_absent_ranks(self) -> str:
        """Find the ranks that do not wait in this step, and warn of them. Returns why to raise, if
        they are to be waited for no longer.
        """
        session, waited = self.session, time.monotonic() - self.began
        if not self.is_looking:
            return ""
        if not self.is_announced:
            text = json.dumps(self.step)
            use_store(session, lambda store: store.set(f"{WAITS}{session.comm.rank}", text))
            self.is_announced = True
        if waited < NAME_AFTER:
            return ""
        ranks = self._list_not_waiting()
        session.absent_ranks = ""
        if not ranks:
            return ""
        have = "have" if len(ranks) > 1 else "has"
        session.absent_ranks = f"{list_ranks(ranks)} {have} not come to step {self.step[1] + 1}"
        is_first_waiting = session.comm.rank == min({*range(session.comm.size)} - {*ranks})
        if is_first_waiting and not self.is_told:
            self._warn_of_absent(waited)
        if self.patience is None or waited < self.patience:
            return ""
        return f"{session.absent_ranks} within {waited:.0f} s: {UNEVEN}"

    def _list_not_waiting(self) -> list[int]:
        """Return the ranks that do not wait in this step; none if the store does not answer."""
        comm = self.session.comm
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        keys = [f"{WAITS}{rank}" for rank in others]
        texts = use_store(
            self.session, lambda store: [store.check([k]) and store.get(k) for k in keys]
        )
        pairs = zip(others, texts or (), strict=False)
        return [rank for rank, text in pairs if text != json.dumps(self.step).encode()]

    def _warn_of_absent(self, waited: float) -> None:
        """Warn, the first time in a run soon, then of long waits only: rank 0 may evaluate."""
        session = self.session
        if waited >= NAME_AGAIN or session.claim_first("late ranks"):
            self.is_told = True
            warn(
                f"{session.absent_ranks}, in which rank {session.comm.rank} has waited for "
                f"{waited:.0f} s, and waits on until the timeout of the process group. If that "
                f"rank is not busy (evaluates, saves, loads data), {UNEVEN}.",
                0,  # on this rank, whichever it is
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
    if absence.session.comm.store is None or absence in _watched:
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
            del absence  # and with it the optimizer's session


def post_lost_masks(session: Session) -> None:
    """Post a note that this rank has lost its masks."""
    who = f"rank {session.comm.rank}"
    post_note(
        session,
        Note.LOST_MASKS,
        f"{who} lost the masks that followed step {session.steps}, and others have them",
    )


def post_note(session: Session, kind: Note, sentence: str) -> None:
    """Post a note of this rank, in place of an earlier one, until ``withdraw_note``."""
    session.posted_note = kind.value
    _write_note(session, json.dumps([*_identify_step(session), kind.value, sentence]))


def withdraw_note(session: Session) -> None:
    """Remove this rank's note, if there is one: the rank takes part again."""
    if session.posted_note:
        _write_note(session, "")
    session.posted_note = ""


def _write_note(session: Session, text: str) -> None:
    key = f"{PREFIX}note/{session.comm.rank}"
    use_store(session, lambda store: store.set(key, text))


def explain_missing_rank(session: Session) -> str:
    """Return which rank will not join the running step, and why; empty if no note says so."""
    for kind, sentence in _read_notes(session):
        both_lost = kind is Note.LOST_MASKS and session.posted_note == kind.value
        if kind not in (Note.CONSOLIDATES, Note.FAILED) and not both_lost:
            return sentence
    return ""


def explain_failed_step(
    session: Session, number: int, error: CommunicationError | RankLeft
) -> CommunicationError:
    """Return the error of step ``number``, which was not applied because of ``error``."""
    advice = ". Make a new process group on all ranks and call rebind()"
    return CommunicationError(
        f"step {number} was not applied on rank {session.comm.rank}: {error}"
        f"{advice if isinstance(error, RankLeft) else explain_failure(session, error)}"
    )


def explain_failure(session: Session, error: CommunicationError) -> str:
    """Return what to append to ``error``, which ended a step: a note of another rank about this
    step, in brackets; if there is none, and a rank is gone or silent, what happens next.
    """
    is_silent = isinstance(error, RankSilent)  # else collectives have told what failed
    for kind, sentence in _read_notes(session):
        if kind is not Note.FAILED or is_silent:
            return f" ({sentence})"
    if not is_silent:
        return ""
    absent = session.absent_ranks.capitalize()
    why = f"{absent}: {UNEVEN}. {SILENT}" if absent else SILENT
    return f". {why}{RESTART if is_launched_by_torchrun() else CONTINUE}"


def _read_notes(session: Session) -> list[tuple[Note, str]]:
    """Read the notes of ranks that have applied no more steps of this optimizer than this rank.
    What is no note, as of another version, is passed over.
    """
    comm, (name, steps) = session.comm, _identify_step(session)
    keys = [f"{PREFIX}note/{rank}" for rank in range(comm.size) if rank != comm.rank]
    texts = use_store(session, lambda store: [store.get(k) for k in keys if store.check([k])])
    notes = []
    for text in filter(None, texts or ()):
        with contextlib.suppress(ValueError, TypeError):
            owner, n, kind, sentence = json.loads(text)
            if owner == name and n <= steps:
                notes.append((Note(kind), str(sentence)))
    return notes


def use_store(session: Session, function: Callable[[Store], Result]) -> Result | None:
    """Return what ``function`` returns for the store of the group; None if it does not answer soon,
    or there is none.
    """
    store = session.comm.store
    if store is not None:
        with contextlib.suppress(RuntimeError):
            return store.run(function, min(NOTE_LIMIT, NOTE_SHARE * store.limit))
    return None


def _identify_step(session: Session) -> tuple[str, int]:
    """Return the optimizer and the step that a note refers to."""
    return f"{session.name} of {len(session.parameters)} parameters", session.steps


# Meetings


class RanksMissing(Exception):
    """Some ranks did not come to a meeting; the message names them."""


def gather_at_store(
    store: Store,
    rank: int,
    size: int,
    text: str,
    patience: float,
    look: Callable[[], str] = str,
) -> list[str]:
    """Wait until all ranks have called this, and return the texts of all.

    A collective that only some ranks start hangs, and desynchronizes a gloo group permanently; a
    rank that gives up here has not started one. ``look``, which is called while this rank waits,
    says why not to wait, or nothing. Raises RanksMissing on all waiting ranks if one of them gives
    up, then or after ``patience`` seconds, or is interrupted; RuntimeError if the store does not
    answer.
    """
    ended = f"{PREFIX}meetings"  # the number of ended meetings, and of the running one
    number = int(store.get(ended)) if store.check([ended]) else 0
    prefix = f"{PREFIX}meeting/{number}/"

    def end(failure: str) -> None:
        """End the meeting with this outcome, unless another rank has ended it."""
        if store.add(f"{prefix}ends", 1) == 1:
            # before the outcome: a rank that has seen it may start the next meeting
            store.add(ended, 1)
            store.set(f"{prefix}outcome", failure)

    store.set(f"{prefix}{rank}", text)
    if store.add(f"{prefix}arrived", 1) == size:
        end("")
    until, looks_at = time.monotonic() + patience, time.monotonic() + LOOK_AGAIN
    try:
        while not store.check([f"{prefix}outcome"]):
            if time.monotonic() > looks_at:
                looks_at = time.monotonic() + LOOK_AGAIN
                if found := look():
                    end(found)
            if time.monotonic() > until:
                absent = [f"rank {r}" for r in range(size) if not store.check([f"{prefix}{r}"])]
                end(f"{', '.join(absent)} did not come within {patience:g} s")
                # the rank that ends the meeting may be killed before it sets the outcome
                store.wait([f"{prefix}outcome"], timedelta(seconds=PATIENCE))
            time.sleep(0.01)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the store does not answer
            end(f"rank {rank} was interrupted")
        raise
    if failure := store.get(f"{prefix}outcome").decode():
        raise RanksMissing(failure)
    texts = [store.get(f"{prefix}{r}").decode() for r in range(size)]
    if rank == 0:  # every rank has left the previous meeting
        for key in ("ends", "arrived", "outcome", *map(str, range(size))):
            store.delete_key(f"{PREFIX}meeting/{number - 1}/{key}")
    return texts
