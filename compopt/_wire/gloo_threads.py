"""The wait for gloo's threads before the interpreter ends.

A thread of gloo drops the tensors of a collective shortly after the collective has completed. If a
tensor has a Python object and the interpreter has ended meanwhile, the process is aborted
("terminate called without an active exception"). That may be a collective of the script itself.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
NAME = "pt_gloo_runloop"  # torch's name of the threads that run collectives
# Looks in a row at which all threads have to be idle: between two of them a thread that waits for
# the interpreter's lock gets it.
LOOKS, PAUSE = 3, 0.001
# Seconds in which gloo frees the tensors of a collective, where threads cannot be looked at.
FREED_WITHIN = 0.05


def wait_until_idle(deadline: float, is_used: bool) -> None:
    """Wait until no thread of gloo has anything to do, at most until ``deadline``, of
    ``time.monotonic()``.

    ``is_used``: process groups exist or existed. Where no threads are seen, because the system does
    not show them or torch gives them another name, this waits ``FREED_WITHIN`` then.
    """
    looks = 0
    while looks < LOOKS and time.monotonic() < deadline:
        busy = list(map(_is_busy, THREADS.iterdir() if THREADS.exists() else ()))
        if all(one is None for one in busy):
            time.sleep(FREED_WITHIN if is_used else 0)
            return
        looks = 0 if any(busy) else looks + 1
        time.sleep(PAUSE)


def _is_busy(thread: Path) -> bool | None:
    """Return True if a thread of gloo has something to do; None if it is none of gloo.

    Idle ones wait without a limit for the next collective. For other ranks, and for the
    interpreter's lock, they wait with one. A thread that has hardly run may not have its name yet.
    """
    try:
        name, _, fields = (thread / "stat").read_text().rpartition(")")
    except OSError:  # it has ended
        return None
    state, *numbers = fields.split()
    if not name.endswith(f"({NAME}"):
        is_new = numbers[10:12] == ["0", "0"]  # ticks of a processor
        return True if is_new and state != "S" else None
    call = ["0"] * 5
    with suppress(OSError):  # the system does not tell: the state has to do
        call = (thread / "syscall").read_text().split()
    return state != "S" or call[0] == "running" or int(call[4], 16) != 0
