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
    threads = _list_threads()
    if not threads:
        time.sleep(FREED_WITHIN if is_used else 0)
        return
    looks = 0
    while looks < LOOKS and time.monotonic() < deadline:
        looks = looks + 1 if all(map(_is_idle, threads)) else 0
        time.sleep(PAUSE)


def _list_threads() -> list[Path]:
    """Return those of gloo's threads that the system shows."""
    threads = []
    for thread in THREADS.iterdir() if THREADS.exists() else ():
        with suppress(OSError):  # it has ended meanwhile
            if (thread / "comm").read_text().strip() == NAME:
                threads.append(thread)
    return threads


def _is_idle(thread: Path) -> bool:
    """Return True if a thread waits without a limit, as gloo's do for the next collective; for
    other ranks, and for the interpreter's lock, they wait with one.
    """
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return True
    arguments: list[str] = []
    with suppress(OSError):  # the system does not tell
        arguments = (thread / "syscall").read_text().split()[1:]
    has_limit = len(arguments) > 3 and int(arguments[3], 16) != 0  # of a futex
    return state == "S" and not has_limit
