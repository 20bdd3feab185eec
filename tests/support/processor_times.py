"""The cost of each test: ``COMPOPT_PROCESSOR_TIMES=FILE pytest`` writes a line a test, the dearest first.

Processor seconds (of the worker and of all that it has started, user and system), wall seconds, the test. Processor
time is what a busy machine and waiting ranks do not change. Two more lines a worker: imports with collection, and all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that this one has started, and those that they have started."""
    with contextlib.suppress(OSError):  # it has ended since
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                    yield int(child)
                    yield from descendants(int(child))


def processor_seconds() -> float:
    """Return what this process, its descendants, and those of them that have ended and were waited for have used."""
    times = os.times()
    used = time.process_time() + times.children_user + times.children_system
    for pid in set(descendants(os.getpid())):
        with contextlib.suppress(OSError):
            used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / TICK
    return used


class ProcessorTimes:
    """Appends a line to the file after every test; the controller sorts them at the end."""

    def __init__(self, path: Path, worker: str | None):
        self.path, self.worker = path, worker
        if worker is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def append(self, seconds: float, wall: float, name: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{seconds:9.3f} {wall:9.3f} {name}\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.append(processor_seconds(), 0.0, f"collection ({self.worker or 'one process'})")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        used, began = processor_seconds(), time.perf_counter()
        result = yield
        self.append(processor_seconds() - used, time.perf_counter() - began, item.nodeid)
        return result

    def pytest_sessionfinish(self) -> None:
        self.append(processor_seconds(), time.perf_counter(), f"all ({self.worker or 'controller'})")
        if self.worker is None:
            lines = self.path.read_text().splitlines(keepends=True)
            self.path.write_text("".join(sorted(lines, key=lambda line: -float(line.split()[0]))))
