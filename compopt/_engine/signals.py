"""Signals that arrive while state is being written are deferred until it is complete."""

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
def defer_signals() -> Iterator[None]:
    """Run signal handlers in Python, KeyboardInterrupt's among them, when the block has ended.

    A handler may raise, and would do so between any two lines. Handlers run in the main thread
    only, so in other threads there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    replaced: dict[int, Handler] = {}
    errors: list[BaseException] = []
    try:
        for number in NUMBERS:
            handler = getsignal(number)
            if callable(handler):
                replaced[number] = handler
                signal.signal(number, lambda number, frame: arrived.append((number, frame)))
        yield
    finally:
        handlers = dict(replaced)
        while replaced:
            try:
                _restore_handlers(replaced)
            except BaseException as error:  # of a handler that is restored already
                errors.append(error)
        _run_handlers(handlers, arrived, errors)


def _restore_handlers(replaced: dict[int, Handler]) -> None:
    while replaced:
        number = next(iter(replaced))
        signal.signal(number, replaced[number])
        del replaced[number]


def _run_handlers(
    handlers: dict[int, Handler],
    arrived: list[tuple[int, FrameType | None]],
    errors: list[BaseException],
) -> None:
    """Run the handlers of all signals that arrived, then raise the first error of any."""
    for number, frame in arrived:
        try:
            handlers[number](number, frame)
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
