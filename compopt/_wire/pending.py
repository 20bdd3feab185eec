"""A collective on its way, and what has to be waited for before the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch

from .requests import CommunicationError

_on_the_wire: set[Pending] = set()
NO_RANGE = contextlib.nullcontext()


@atexit.register
def _before_exit() -> None:
    """Let collectives end before the interpreter does: a gloo thread that frees a tensor later
    aborts the process.
    """
    for pending in list(_on_the_wire):
        if pending.work is not None:
            with contextlib.suppress(RuntimeError):
                pending.work.wait(timedelta(seconds=5))
    if Pending.started:
        # A finished collective's tensors are let go a moment after it is waited for.
        time.sleep(0.05)


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """A named range in the traces of torch.profiler; nothing while no profiler runs."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return torch.autograd.profiler.record_function(name)
    return NO_RANGE


class Work(Protocol):
    """What torch.distributed returns of a collective that it has started."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...

    def is_completed(self) -> bool: ...


class Pending:
    """A collective on its way. ``wait`` returns its result and raises CommunicationError when it
    failed.

    Its result may be another Pending: the second of two collectives that together answer a request.
    ``more``: what it leads to is another collective, before the step is agreed upon.
    """

    # Any, in this process.
    started = False
    # Of ranks that take turns in one process: nobody may wait for it in backward.
    in_turns = False

    def __init__(
        self,
        what: str,
        work: Work | None,
        finish: Callable[[], object],
        more: bool = False,
    ):
        self.what, self.work, self._finish, self.more = what, work, finish, more
        if work is not None:
            Pending.started = True
            _on_the_wire.add(self)

    def wait(self) -> object:
        if self.work is not None:
            try:
                with profiler_range("compopt::exchange"):
                    self.work.wait()
            # As gloo raises; torch.distributed's own errors are some, too.
            except RuntimeError as error:
                raise CommunicationError(f"{self.what} failed: {first_line(error)}") from error
            finally:
                self.forget()
        return self._finish()

    @property
    def ready(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self.work is None or self.work.is_completed()

    def ends_within(self, seconds: float) -> bool:
        """Wait for no longer than this; whether it has ended, well or not.

        Only on gloo, where it may be asked again: on NCCL a wait that is limited ends the group.
        """
        if self.work is None:
            return True
        try:
            self.work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            return self.work.is_completed()
        return True

    def drain(self) -> None:
        """Wait until it uses its memory no more; whatever comes of it."""
        if self.work is not None:
            with contextlib.suppress(RuntimeError):
                self.work.wait()
            self.forget()

    def forget(self) -> None:
        """It need not be waited for: it has ended, or its group has."""
        _on_the_wire.discard(self)


def first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
