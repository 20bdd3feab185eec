"""The wait for gloo's threads at the end of a process: for as long as one has something to do, and no longer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from compopt._wire import in_flight

IDLE, BLOCKED = "202 0x55 0x189 0x0 0x0 0x0 0x0", "202 0x55 0x189 0x0 0x7ffe 0x0 0x0"


def write_thread(folder: Path, name: str, state: str, call: str, ticks: int = 7) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"1 ({name}) {state} " + " ".join(str(n) for n in range(4, 14)) + f" {ticks} {ticks}")
    (folder / "syscall").write_text(f"{call}\n")


@pytest.mark.parametrize(
    ("state", "call", "name", "ticks"),
    [
        ("R", "running", "pt_gloo_runloop", 7),
        ("S", "running", "pt_gloo_runloop", 7),
        ("S", BLOCKED, "pt_gloo_runloop", 7),
        ("D", IDLE, "pt_gloo_runloop", 7),
        ("R", "running", "python", 0),  # it has yet to set its name
    ],
)
def test_it_waits_while_a_thread_of_gloo_is_busy(state, call, name, ticks, tmp_path, monkeypatch):
    monkeypatch.setattr(in_flight, "THREADS", tmp_path)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 5:
            write_thread(tmp_path / "2", "pt_gloo_runloop", "S", IDLE)

    monkeypatch.setattr(in_flight.time, "sleep", sleep)
    write_thread(tmp_path / "1", "python", "R", "running")
    write_thread(tmp_path / "2", name, state, call, ticks)
    in_flight.wait_until_idle(time.monotonic() + 100, is_used=True)
    assert len(looks) == 5 + in_flight.LOOKS
    write_thread(tmp_path / "2", name, state, call, ticks)
    in_flight.wait_until_idle(time.monotonic(), is_used=True)  # no longer than it may
    assert len(looks) == 5 + in_flight.LOOKS
    write_thread(tmp_path / "2", "python", state, call)  # no thread is known
    for is_used in (False, True):
        in_flight.wait_until_idle(time.monotonic() + 100, is_used)
        assert looks[-1] == in_flight.FREED_WITHIN * is_used


def ends_before_its_peers(rank: int) -> list[bool]:
    """A collective of the script, for which nobody waits and to which the other rank comes late."""
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(0.5)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    was_completed = work.is_completed()
    in_flight._wait_before_exit()
    return [was_completed, work.is_completed()]


def test_the_end_waits_for_a_collective_of_the_script():
    before, after = run_ranks(ends_before_its_peers, 2)[0]
    assert after and not before
