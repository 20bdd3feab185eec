"""Collectives in flight: waited for, or outliving the optimizer that has started them; and the wait
for gloo's threads before the interpreter ends.

A thread of gloo drops the tensors of a collective shortly after the collective has completed. If a
tensor has a Python object and the interpreter has ended meanwhile, the process is aborted
("terminate called without an active exception"). That may be a collective of the script itself.

``Communicator.start`` returns a ``PendingCollective``; ``exchange`` and ``fragment_sync`` wait for
it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from .groups import ProcessGroup, is_initialized
from .requests import RankSilent

Work: TypeAlias = "dist.Work"


class PendingCollective:
    """A collective in flight. ``wait`` returns its result, or raises CommunicationError.

    The result may be another PendingCollective: the second of two collectives that together answer
    a request. ``has_next``: another collective follows before the step decision.
    """

    # True once any collective was started in this process.
    started = False
    # True for ranks that take turns in one process: backward must not wait.
    is_lockstep = False
    # called with the seconds that the host was blocked
    on_wait: Callable[[float], None] | None = None

    def __init__(
        self,
        description: str,
        work: Work | None,
        on_completion: Callable[[], object],
        has_next: bool = False,
    ):
        self.description, self.work, self.has_next = description, work, has_next
        self._on_completion = on_completion
        if work is not None:
            PendingCollective.started = True

    def wait(self) -> object:
        if self.work is not None:
            if look := getattr(_watch, "look", None):
                while not self.completes_within(_watch.seconds):
                    look()
            try:
                with profiler_range("compopt::exchange"), self._count_wait():
                    self.work.wait()
            # gloo raises RuntimeError, of which torch.distributed's own errors are subclasses.
            except RuntimeError as error:
                raise RankSilent(f"{self.description} failed: {first_line(error)}") from error
            finally:
                self.untrack()
        answer = self._on_completion()
        if isinstance(answer, PendingCollective):
            answer.on_wait = self.on_wait
        return answer

    @contextlib.contextmanager
    def _count_wait(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.on_wait is not None:
                self.on_wait(time.perf_counter() - began)

    @property
    def is_ready(self) -> bool:
        """True if ``wait`` would return or raise immediately."""
        return self.work is None or self.work.is_completed()

    def completes_within(self, seconds: float) -> bool:
        """Wait for at most so long. Return True if the collective has completed or failed.

        Only gloo allows another wait afterwards: on NCCL a wait that times out ends the group.
        """
        if self.work is None:
            return True
        try:
            with self._count_wait():
                self.work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return self.work.is_completed()
        return True

    def drain(self) -> None:
        """Wait until the collective no longer uses its memory; ignore its result and its error."""
        if self.work is not None:
            with contextlib.suppress(RuntimeError):
                self.work.wait()
            self.untrack()

    def untrack(self) -> None:
        """Do not wait for this collective at exit: it has ended, or its group has."""
        if self.work is not None:
            _in_flight.pop(self.work, None)

    def __del__(self) -> None:
        # nobody will wait for it: ``release_ended`` sees when it has ended
        if self.work is not None and _in_flight and self.work in _in_flight:
            _unowned.add(self.work)
            _release_in_collections()


# The process group of each collective in flight, and those of them whose optimizer is gone.
_in_flight: dict[Work, ProcessGroup | None] = {}
_unowned: set[Work] = set()

# Groups to destroy once their collectives, for which nobody waits, have ended: gloo would wait for
# those that other ranks may have given up. By group, since when it has had none.
_abandoned: dict[ProcessGroup, float] = {}

WAITS_AT_EXIT = 5.0  # seconds

# Seconds without a collective after which a group is destroyed. That joins gloo's threads with the
# interpreter locked, and hangs if one of them has yet to free a tensor, perhaps on a busy machine.
QUIET = 1.0


def release_ended(phase: str = "start", *_: object) -> None:
    """Release the memory and the groups of collectives that have ended without anybody waiting.

    Python's collector calls this, too: perhaps no other collective starts.
    """
    if phase != "start" or not (_unowned or _abandoned):
        return
    now = time.monotonic()
    # copies: a collection may add to both meanwhile
    for work in list(_unowned):
        if work.is_completed():
            _unowned.discard(work)
            _in_flight.pop(work, None)
    groups_in_use = list(_in_flight.values())
    for group, quiet_since in list(_abandoned.items()):
        if group in groups_in_use:
            _abandoned[group] = now
        elif now > quiet_since + QUIET:
            is_left = _abandoned.pop(group, None) is not None  # else another thread destroys it
            with contextlib.suppress(ValueError):  # all groups have been destroyed already
                if is_left and dist.is_initialized():
                    dist.destroy_process_group(group)


def abandon_group(group: ProcessGroup) -> None:
    _abandoned[group] = time.monotonic()
    _release_in_collections()


def forget_group(group: ProcessGroup) -> None:
    """Wait no longer for the collectives of a group whose ranks are gone, nor keep it alive."""
    for work in [work for work, its in list(_in_flight.items()) if its is group]:
        _in_flight.pop(work, None)
        _unowned.discard(work)


def _release_in_collections() -> None:
    """Let Python's collector call ``release_ended``, from the first time that there is a need."""
    if release_ended not in gc.callbacks:
        gc.callbacks.append(release_ended)


@atexit.register
def _wait_before_exit() -> None:
    """Wait for collectives in flight, and for gloo's threads: one that frees a tensor after the
    interpreter has ended aborts the process. In all at most ``WAITS_AT_EXIT``.
    """
    deadline = time.monotonic() + WAITS_AT_EXIT
    for work in list(_in_flight):
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    wait_until_idle(deadline, PendingCollective.started or is_initialized())


# The wait for gloo's threads


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
    with contextlib.suppress(OSError):  # the system does not tell: the state has to do
        call = (thread / "syscall").read_text().split()
    return state != "S" or call[0] == "running" or int(call[4], 16) != 0


# What this thread calls while it waits for long.
_watch = threading.local()


@contextlib.contextmanager
def looking_after(seconds: float, look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` in this block whenever a collective has been waited for so long; what it raises
    is raised where this thread waits.
    """
    before = getattr(_watch, "look", None)
    _watch.look, _watch.seconds = look, seconds
    try:
        yield
    finally:
        _watch.look = before


_NO_RANGE = contextlib.nullcontext()


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a named range for the traces of torch.profiler; nothing while no profiler runs."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return torch.autograd.profiler.record_function(name)
    return _NO_RANGE


def first_line(error: RuntimeError) -> str:
    """Return what torch says, without the place in gloo's source and what is typical of it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] | This is typically caused by .*$", "", line).rstrip(". ")
