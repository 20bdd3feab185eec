"""Meetings of all ranks at the store of the group, before a collective that some may not join.

``if rank == 0: optimizer.consolidate_state()`` is a common mistake, and a collective on rank 0
alone hangs. So ranks meet at the store first. If some do not come the others raise, and have
started nothing.

``optimizer``, ``step``, ``snapshots`` and ``fsdp_backward`` call the functions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from .._wire.collectives import Communicator
from .._wire.groups import Store
from .._wire.requests import CommunicationError
from .engine import Engine
from .handshake import CONSOLIDATION, SAVE
from .missing_ranks import LOOK_AFTER, PREFIX, Note, RankLeft, explain_missing_rank, post_note

# Seconds. In consolidate_state() rank 0 waits PATIENCE for the others. They wait longer for rank 0,
# which may evaluate before it calls it.
PATIENCE, PATIENCE_WITH_RANK_0 = 10.0, 1800.0
# Seconds that a rank which has to wait in backward waits for the others to say so, too; they may
# have to compile.
PATIENCE_IN_BACKWARD = 30.0
LOOK_AGAIN = 0.5  # seconds after which a rank that waits at the store looks where others are
ADVICE = "call it on all ranks, before `if rank == 0:`"


def wait_for_all_to_consolidate(engine: Engine, patience: float | None) -> None:
    """Wait until all ranks have called ``consolidate_state()`` on the same optimizer; not at all if
    there is nothing to consolidate, or no store.

    Raises CommunicationError, with nothing started, if some have not after ``patience`` seconds;
    ValueError if they consolidate different optimizers.
    """
    names = engine.method.rank_local_state
    comm, store = engine.comm, engine.comm.store
    if store is None or not (names or engine.method.sharded):
        return
    averaged = sum(bucket.flat[name].numel() for bucket in engine.buckets for name in names)
    in_shards = sum(
        bucket.shards.max_numel * len(bucket.sharded_names)
        for bucket in engine.buckets
        if bucket.is_sharded
    )
    state = f"{averaged} elements of {', '.join(names) or 'nothing'}, {in_shards} in shards"
    if (schedule := engine.overlap.schedule) is not None:  # else a rank waits for its exchanges
        state += f", {len(schedule.exchanges)} exchanges of a backward before step()"
    if patience is None:
        patience = PATIENCE if comm.rank == 0 else PATIENCE_WITH_RANK_0
    look = engine.method.find_end_of_round
    try:
        described = gather_at_store(
            store, comm.rank, comm.size, f"{engine.name}, {state}", patience, look
        )
    except RanksMissing as error:
        if told := _answer_end_of_round(engine, CONSOLIDATION, str(error)):
            raise CommunicationError(f"{told}. Nothing was changed.") from None
        who = f"rank {comm.rank}"
        post_note(engine, Note.CONSOLIDATES, f"{who} was in consolidate_state(): {ADVICE}")
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


def wait_for_all_to_save(engine: Engine, comm: Communicator) -> None:
    """Wait until all ranks of ``comm`` have called ``save()``, and nothing else: messages of a save
    and of the end of a round, of two sizes, would make gloo end a process.

    Raises CommunicationError, with nothing sent, if some have not after ``optimizer.patience``
    seconds, by default the timeout of the process group.
    """
    if (store := comm.store) is None:
        return
    what, patience = f"save() of Snapshots of {engine.name}", engine.method.patience
    try:
        patience = store.limit if patience is None else patience
        look = engine.method.find_end_of_round
        called = gather_at_store(store, comm.rank, comm.size, what, patience, look)
        others = [f"rank {rank} is in {one}" for rank, one in enumerate(called) if one != what]
    except (RanksMissing, RuntimeError) as error:
        if told := _answer_end_of_round(engine, SAVE, str(error)):
            raise CommunicationError(f"{told}. Nothing was written.") from None
        others = [str(error)]
    if others:
        raise CommunicationError(
            f"save() was called on rank {comm.rank}, but {', '.join(others)}: call it on all ranks "
            "after the same round (count optimizer.stats.round where rounds end by time) or step. "
            "Nothing was sent or written."
        )


def compare_begun_exchanges(engine: Engine) -> None:
    """Compare how many exchanges of the coming step ranks have begun in backward, before they
    compare options that were changed since the last step.

    Raises RankLeft on all ranks where a replica has left that backward out: the others have begun
    with options of before, by which it cannot join them. CommunicationError if ranks do not come.
    """
    comm, store, schedule = engine.comm, engine.comm.store, engine.overlap.schedule
    if store is None:
        return
    begun = 0 if schedule is None else len(schedule.exchanges)
    text = f"{begun} exchanges of step {engine.steps + 1} begun"
    look = partial(explain_missing_rank, engine)
    try:
        texts = gather_at_store(store, comm.rank, comm.size, text, store.limit, look)
    except (RanksMissing, RuntimeError) as error:
        raise CommunicationError(
            f"options that decide what is sent were changed on rank {comm.rank}, but {error}: "
            "change them on all ranks alike, after the same step"
        ) from None
    if len({*texts}) > 1:
        found = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(texts))
        raise RankLeft(
            "options that decide what is sent were changed between backward and step(), and not "
            f"all ranks have run that backward ({found}): change them before backward"
        )


def meet_in_backward(engine: Engine) -> str:
    """Wait until all ranks have called this in a backward. Returns which have not come soon, as
    they have no reason to; empty if all have.
    """
    comm, store = engine.comm, engine.comm.store
    if store is None:
        return ""
    patience = min(PATIENCE_IN_BACKWARD, store.limit / 2)
    try:
        gather_at_store(store, comm.rank, comm.size, "backward", patience)
    except (RanksMissing, RuntimeError) as error:
        return str(error)
    return ""


def _answer_end_of_round(engine: Engine, kind: int, why: str) -> str:
    """Answer ranks that wait in ``end_round()`` for this one, if some do. Returns what all ranks
    are told. ``why`` the meeting has failed: if others have found such a rank, so does this one.
    """
    until = time.monotonic() + (2 * LOOK_AFTER if "end_round()" in why else 0.0)
    while not (found := engine.method.find_end_of_round()) and time.monotonic() < until:
        time.sleep(0.01)
    if found:
        try:
            engine.method.answer_end_of_round(kind)
        except CommunicationError as error:
            return str(error)
    return ""


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
