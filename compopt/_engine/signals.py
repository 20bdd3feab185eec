"""Signals that arrive while state is being written wait until it is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from _signal import getsignal  # signal's own makes an enum of its answer, in 64 times the time
from collections.abc import Callable, Iterator
from types import FrameType

# asked for once: it takes longer than all the rest
NUMBERS = tuple(map(int, signal.valid_signals()))
Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Signals with a handler in Python, KeyboardInterrupt's among them, are handled when the block
    has ended.

    A handler may raise, and would do so between any two lines. Only the main thread ever runs them;
    in others there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    held: dict[int, Handler] = {}
    raised: list[BaseException] = []
    try:
        for number in NUMBERS:
            handler = getsignal(number)
            if callable(handler):
                held[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        handlers = dict(held)
        while held:
            try:
                _put_back(held)
            except BaseException as error:  # of a handler that is back already
                raised.append(error)
        _run_all(handlers, came, raised)


def _put_back(held: dict[int, Handler]) -> None:
    while held:
        number = next(iter(held))
        signal.signal(number, held[number])
        del held[number]


def _run_all(
    handlers: dict[int, Handler],
    came: list[tuple[int, FrameType | None]],
    raised: list[BaseException],
) -> None:
    """Run the handlers of what came, every one of them; the first error of any is raised."""
    for number, frame in came:
        try:
            handlers[number](number, frame)
        except BaseException as error:
            raised.append(error)
    if raised:
        raise raised[0]
