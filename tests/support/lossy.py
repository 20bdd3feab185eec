"""Real ranks of which some die, stop or differ: gloo processes that hold one DDP model and optimizer for every class.

Each class has a process group of its own, so that a rank's death is met by all of them at once, and alone by each.
Collectives wait for as long as a test runs, but for those that a test has expire: these it limits first.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conformance import data, snapshot
from ranks import FOREVER, HANG_GUARD, _context, answers_of, be_patient, send_answer
from sim import Begun
from table import CASES as ALL
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets

# A class of each kind: AdamS exchanges as Average does, and Separate as SeparateAdam.
CASES = [case for case in ALL if case.name not in ("AdamS", "Separate")]


def connect(file: str, rank: int, size: int) -> list[dist.ProcessGroup]:
    """The default group, and one for each class."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=FOREVER)
    return [dist.new_group(timeout=FOREVER) for _ in CASES]


def limit_waits(seconds: float, but: list[Training] = ()) -> None:
    """Collectives that start from now on expire, but for those over the groups that these were given."""
    spared = [training.group for training in but]
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in spared:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class Training:
    """One class on one rank: a model under DDP, in several buckets, and what became of it."""

    def __init__(self, case, group: dist.ProcessGroup):
        torch.manual_seed(0)
        self.case, self.report, self.group = case, {}, group
        self.model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).double()
        self.ddp = DDP(self.model, process_group=group)
        self.optimizer = case.make(self.model.named_parameters(), process_group=group)
        compopt.attach(self.ddp, self.optimizer)

    @property
    def steps_taken(self) -> int:
        return self.optimizer.option_groups[0]["step"]

    def backward(self, rank: int) -> None:
        """Of the step that comes. Buckets start here."""
        self.optimizer.zero_grad()
        x = data(rank, self.steps_taken, torch.float64)
        (self.ddp(x) - x.flip(1)).square().mean().backward()

    def wrap(self, group: dist.ProcessGroup) -> None:
        """Under a new DDP, over a new group."""
        self.group = group
        self.optimizer.rebind(group)
        self.ddp = DDP(self.model, process_group=group)
        compopt.attach(self.ddp, self.optimizer)

    def checksum(self) -> float:
        return float(sum(p.detach().abs().sum() for p in self.model.parameters()))


@torch.no_grad()
def attempt(trainings: list[Training]) -> None:
    """A step of each, all begun before the first is waited for; errors and the seconds they took are noted."""
    begun = time.monotonic()
    calls: dict[Training, Begun] = {}
    for finishes in (False, True):
        for training in trainings:
            if "error" in training.report:
                continue
            try:
                if finishes:
                    calls[training].finish()
                else:
                    calls[training] = Begun(training.optimizer.take_step)
            except compopt.CommunicationError as error:
                training.report.update(error=str(error), seconds=time.monotonic() - begun)


def train(trainings: list[Training], rank: int, steps: int) -> None:
    for training in trainings:
        for _ in range(steps):
            training.backward(rank)
            training.optimizer.step()


def begin_all(file: str, rank: int, size: int) -> list[Training]:
    return [Training(*pair) for pair in zip(CASES, connect(file, rank, size), strict=True)]


def _work(rank: int, file: str, size: int, results: Any, begin: Callable, function: Callable, args: tuple) -> None:
    be_patient()
    buckets.BUCKET_BYTES = 60_000
    try:
        send_answer(results, rank, function(rank, begin(file, rank, size), file, *args))
        results.close()
        results.join_thread()  # which writes
        os._exit(0)  # groups of which a rank is gone are not worth a farewell
    except BaseException:
        send_answer(results, rank, traceback.format_exc())


def run_lossy(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    dying: int | None = None,
    resume_at: tuple[str, ...] = (),
    begin: Callable[[str, int, int], Any] = begin_all,
) -> dict[int, Any]:
    """Return what ``function(rank, trainings, file, *args)`` returned on each rank but the ``dying``; ``begin(file,
    rank, size)`` makes the trainings.

    A rank that stops itself is resumed, the n-th time when a rank has called ``announce(file, resume_at[n])``.
    """
    results = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "rendezvous"))
        workers = [
            _context.Process(target=_work, args=(rank, file, size, results, begin, function, args))
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        try:
            for name in resume_at:
                _resume(workers, Path(f"{file}-{name}"))
            answers = {}
            surviving = {rank: worker for rank, worker in enumerate(workers) if rank != dying}
            for rank, answer in answers_of(surviving, results):
                assert not isinstance(answer, str), f"rank {rank}:\n{answer}"
                answers[rank] = answer
            if dying is not None:
                workers[dying].join(HANG_GUARD)
                assert workers[dying].exitcode == -signal.SIGKILL
        finally:
            for worker in workers:
                worker.kill()
    return answers


def announce(file: str, name: str) -> None:
    """Tell whoever resumes stopped ranks."""
    Path(f"{file}-{name}").touch()


def _resume(workers: list[multiprocessing.Process], announced: Path) -> None:
    """Wait until a worker has stopped itself and another has said what it waits for, and let it go on."""
    until = time.monotonic() + HANG_GUARD
    while time.monotonic() < until:
        stopped = [worker.pid for worker in workers if worker.pid and _state(worker.pid) == "T"]
        if stopped and announced.exists():
            os.kill(stopped[0], signal.SIGCONT)
            return
        assert not any(worker.exitcode for worker in workers), "a rank has ended"
        time.sleep(0.01)
    raise AssertionError("no rank stopped itself")


def _state(pid: int) -> str:
    path = Path("/proc", str(pid), "stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else ""


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def state(training: Training) -> list[torch.Tensor]:
    return snapshot(training.optimizer)
