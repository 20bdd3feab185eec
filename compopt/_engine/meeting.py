"""Whether all ranks have come to ``consolidate_state()``, before anything dense is exchanged.

``if rank == 0: optimizer.consolidate_state()`` is the habit, and what rank 0 would start alone is
never answered. So ranks meet at the group's board first, where one that stays alone can leave
again, with a sentence, and nothing is out of step. A rank that waits in ``step()`` looks there too,
and tells those that wait in vain.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from .._wire.board import Board, Visit
from .._wire.requests import CommunicationError
from .._wire.warning import warn
from . import lost_masks
from .turns import Turns

if TYPE_CHECKING:
    from .engine import Engine

PATIENCE = 10.0  # seconds that rank 0 waits for the others
AS_A_COLLECTIVE = 1800.0  # that the others wait for rank 0, which may evaluate before it comes
LOOK_AFTER = 2.0  # that a step waits before it looks at the board
NOTICED = " (another rank was in consolidate_state(): call it on all ranks)"
ADVICE = "call it on all ranks, before `if rank == 0:`"


def meet(engine: Engine, patience: float | None) -> None:
    """Wait until all ranks are here.

    Raises CommunicationError, with nothing started, where they are not within ``patience`` seconds
    or are known to be elsewhere; ValueError where they have come for different optimizers.
    """
    board = engine.comm.board
    if board is None or not (engine.face.averaged_state or engine.face.sharded):
        return
    try:
        visit = board.come(json.dumps(_says(engine)))
        _wait(board, visit, patience)
        said = [json.loads(text)["what"] for text in board.said(visit)]
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            "consolidate_state() could not ask the other ranks, for the store of their process "
            f"group does not answer: {error}"
        ) from error
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise ValueError(
                f"ranks differ in consolidate_state(): rank 0 has {said[0]}, rank {rank} has "
                f"{theirs}: consolidate the same optimizers in the same order on all ranks."
            )


def _wait(board: Board, visit: Visit, patience: float | None) -> None:
    if patience is None:
        patience = PATIENCE if board.rank == 0 else AS_A_COLLECTIVE
    until = time.monotonic() + patience
    try:
        while not board.all_here(visit):
            if why := board.objection(visit):
                _leave(board, visit, why)
            elif time.monotonic() > until:
                absent = ", ".join(f"rank {rank}" for rank in board.absent(visit))
                why = f"{absent} did not come within {patience:g} s"
                _leave(board, visit, why, gives_up=True)
            time.sleep(0.01)
    except KeyboardInterrupt:
        board.leave(visit)
        raise


def _leave(board: Board, visit: Visit, why: str, gives_up: bool = False) -> None:
    """Raise CommunicationError, unless the last rank has just come.

    ``gives_up``: this rank is the first to leave, and tells the others.
    """
    if not board.leave(visit):
        return
    if gives_up:
        board.object(f"rank {board.rank} has left, for {why}")
    wait = ", or wait longer (patience=)" if gives_up else ""
    raise CommunicationError(
        f"consolidate_state() was called on rank {board.rank}, but {why}: {ADVICE}{wait}. "
        "Nothing was changed."
    )


def _says(engine: Engine) -> dict[str, Any]:
    return {"what": _what(engine), "steps": engine.steps}


def _what(engine: Engine) -> str:
    names = engine.face.averaged_state
    held = sum(bucket.flat[name].numel() for bucket in engine.buckets for name in names)
    cut = sum(bucket.shards.most * len(bucket.sharded) for bucket in engine.buckets if bucket.cut)
    return f"{engine.name}, {held} elements of {', '.join(names) or 'nothing'}, {cut} in shards"


def watch(engine: Engine, turns: Turns[None]) -> None:
    """Run a step to its end; where it waits for long, look whether others wait for this rank."""
    engine.noticed = ""
    for pending in turns:
        if not engine.comm.can_look_up(engine.device):
            continue
        who = ""
        try:
            while not pending.ends_within(LOOK_AFTER):
                with contextlib.suppress(RuntimeError):  # of the store
                    _look_up(engine)
                if who := lost_masks.who_lost(engine):
                    raise lost_masks.Left
        except BaseException as error:  # as if it were raised where the step waits
            try:
                turns.throw(error)
            except lost_masks.Left:
                lost_masks.leave(engine, who)


def _look_up(engine: Engine) -> None:
    board = engine.comm.board
    assert board is not None
    mine, step = _says(engine), engine.steps + 1
    for rank, text in board.waiting().items():
        # who has taken fewer steps may wait for one that this rank has not finished
        if json.loads(text) != mine:
            continue
        board.object(f"rank {board.rank} is in step {step}", json.dumps(mine))
        if not engine.noticed:
            engine.noticed = NOTICED
            warn(
                f"rank {rank} is in consolidate_state() while rank {board.rank} is in step {step}: "
                f"{ADVICE}.",
                0,  # on this rank, whichever it is
            )


def noticed(engine: Engine) -> str:
    """Why the step that has just failed may have, as far as any rank has seen."""
    board = engine.comm.board
    if board is not None and not engine.noticed:
        with contextlib.suppress(RuntimeError):  # of the store
            if board.last_reason() == json.dumps(_says(engine)):
                return NOTICED
    return engine.noticed
