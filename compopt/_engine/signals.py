"""Signals during a commit: their Python handlers run when it has ended.

``step``, ``resharding`` and local steps defer signals while they write.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from _signal import getsignal  # 64 times as fast as signal.getsignal, which returns an enum
from collections.abc import Callable, Iterator
from types import FrameType

# computed once: valid_signals() takes longer than all the rest
SIGNALS = tuple(map(int, signal.valid_signals()))


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer Python signal handlers, KeyboardInterrupt's among them, until the block ends.

    A handler may raise between any two lines. Handlers run in the main thread only, so other
    threads defer nothing. All handlers run at the end; the first error of any is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    errors: list[BaseException] = []
    try:
        for number in SIGNALS:
            handler = getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: arrived.append((number, frame)))
        yield
    finally:
        replaced = dict(handlers)
        while replaced:
            try:
                while replaced:
                    number = next(iter(replaced))
                    signal.signal(number, replaced[number])
                    del replaced[number]
            except BaseException as error:  # raised by a handler that is restored already
                errors.append(error)
        for number, frame in arrived:
            try:
                handlers[number](number, frame)
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
