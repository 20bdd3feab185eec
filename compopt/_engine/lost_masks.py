"""Masks that some ranks have lost and others have, of a class whose ranks do not ask each other.

A rank without its masks begins the next step with a handshake, the others with payloads, whose
lengths only they know: neither is answered. So the first leaves a note at the group's board, where
the others look when they have waited for a while; both then leave the step, which nobody applies.
Their collectives are out of step: they go on over a new group.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from .._wire.requests import CommunicationError

if TYPE_CHECKING:
    from .engine import Engine


class Left(BaseException):
    """This rank leaves a step without waiting for what is on the wire."""


def tell(engine: Engine) -> None:
    """This rank has lost its masks."""
    _note(engine, "lost")


def who_lost(engine: Engine) -> str:
    """The ranks that have lost masks which others have, so that the step that waits will never be
    answered; nothing where it may be.
    """
    board = engine.comm.board
    if board is None or not engine.face.chosen_state:
        return ""
    with contextlib.suppress(RuntimeError):  # of the store
        here = _mark(engine)
        lost = [rank for rank, text in board.notes("lost").items() if text == here]
        kept = [rank for rank, text in board.notes("kept").items() if text == here]
        if lost and board.rank not in lost:
            _note(engine, "kept")
            kept = [board.rank]
        if kept:
            return ", ".join(f"rank {rank}" for rank in lost)
    return ""


def leave(engine: Engine, who: str) -> NoReturn:
    """Raise CommunicationError."""
    rank, steps = engine.comm.rank, engine.steps
    raise CommunicationError(
        f"step {steps + 1} was not applied on rank {rank}: {who} lost the masks that followed step "
        f"{steps}, and others have them. Make a new process group on all ranks and call rebind()."
    )


def _note(engine: Engine, kind: str) -> None:
    board = engine.comm.board
    if board is not None:
        with contextlib.suppress(RuntimeError):
            board.note(kind, _mark(engine))


def _mark(engine: Engine) -> str:
    """Of which optimizer and which step a note speaks."""
    return f"{engine.name} after step {engine.steps} of {len(engine.met)} parameters"
