"""Real ranks: one process each, gloo, a file as rendezvous. The first error of any rank is raised.

No limit depends on the machine's speed: collectives wait for as long as the ranks run, and ranks are ended when none of
them has used its processor for ``IDLE`` seconds, which only ranks do that wait for each other.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

HANG_GUARD = 3600.0  # seconds that anything which a test starts may take
IDLE = 120.0  # seconds without work after which ranks are taken to wait for each other
WAITING = 0.005  # of a processor that a rank may use while it waits: gloo's threads wake up
FOREVER = timedelta(seconds=2 * HANG_GUARD)  # a process group's timeout, where no test is about it

_context = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.support.without_collections"]  # found from the root, where pytest runs
PRELOADED += ["torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "compopt", "pytest"]
PRELOADED += ["compopt._backends.native.native_ops"]


def preload(*modules: str) -> None:
    """Import these too before ranks are forked: for files whose ranks would each import them, for a second or more.

    It has to be called while tests are collected.
    """
    PRELOADED.extend(modules)
    _context.set_forkserver_preload(PRELOADED)


preload()


def be_patient() -> None:
    """In this process one thread computes, and waits that users would not want to be long have no limit either."""
    import torch

    from compopt._engine import meetings

    torch.set_num_threads(1)
    meetings.PATIENCE = meetings.PATIENCE_IN_BACKWARD = HANG_GUARD


def free_port() -> int:
    """A port for what is started later: below those that systems give to everything that asks for any."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("of 100 ports none is free")


def send_answer(results: Any, rank: int, *answer: Any) -> None:
    """Put a rank's answer into ``results`` by value.

    A queue of torch's processes sends tensors as files of the sender, which the receiver must open before it ends.
    """
    results.put(pickle.dumps((rank, *answer)))


def _work(rank: int, size: int, file: str, results: Any, function: Callable[..., Any], args: tuple) -> None:
    import torch.distributed as dist

    gc.freeze()  # what was imported before the fork stays: a collection would look through it, and copy its pages
    gc.enable()
    be_patient()
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=FOREVER)
        send_answer(results, rank, function(rank, *args), None)
        take_leave()
    except BaseException:
        send_answer(results, rank, None, traceback.format_exc())
        raise SystemExit(1) from None


def take_leave() -> None:
    """Wait until no rank needs this one's connections; a rank without a group ends at once.

    At the store, not in a barrier: ranks may have started unequal numbers of the group's collectives.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        store.set(f"ended/{rank}", "")
        store.wait([f"ended/{other}" for other in range(size)], FOREVER)
        dist.destroy_process_group()


def cpu_seconds(workers: Iterable[multiprocessing.Process]) -> float:
    """The processor time of these processes, their threads and their children, and how long their main threads have
    waited for a processor: a rank that other work keeps from computing does not wait for its peers.
    """
    ticks, delay, pids = 0, 0, {worker.pid for worker in workers}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            fields = stat.read_text().rpartition(")")[2].split()
            if int(stat.parent.name) in pids or int(fields[1]) in pids:
                ticks += sum(map(int, fields[11:15]))
                delay += int((stat.parent / "schedstat").read_text().split()[1])
    return ticks / os.sysconf("SC_CLK_TCK") + delay / 1e9


class HangGuard:
    """Raises when processes have waited for each other for ``IDLE`` seconds, or after ``HANG_GUARD``."""

    def __init__(self):
        self.used = 0.0
        self.start = self.last_work = time.monotonic()

    def check(self, silent: dict[int, multiprocessing.Process]) -> None:
        """``silent``: the ranks that have not answered."""
        now, used = time.monotonic(), cpu_seconds(silent.values())
        idle = 0.1 + WAITING * len(silent) * (now - self.last_work)
        if not used or used < self.used or used > self.used + idle:  # not told on this system, of fewer ranks, or more
            self.used, self.last_work = used, now
        assert now < self.last_work + IDLE, f"ranks {[*silent]} wait, and none has worked for {IDLE:g} s"
        assert now < self.start + HANG_GUARD, f"ranks {[*silent]} have not ended in {HANG_GUARD:g} s"


def answers_of(workers: dict[int, multiprocessing.Process], results: Any) -> Iterator[tuple]:
    """Return what each of these ranks has put into ``results``, which begins with the rank, as they come."""
    silent, guard = dict(workers), HangGuard()
    while silent:
        # Before it is asked for: what a rank has said arrives although it has ended since.
        gone = {rank: worker.exitcode for rank, worker in silent.items() if worker.exitcode is not None}
        try:
            answer = pickle.loads(results.get(timeout=1))
        except queue.Empty:
            assert not gone, f"ranks ended and said nothing (rank: exit code): {gone}"
            guard.check(silent)
            continue
        del silent[answer[0]]
        yield answer


def errors_of_others(results: Any, seconds: float = 3.0) -> Iterator[str]:
    """Yield what else ranks report: the first report is often of a connection that another rank's error has closed."""
    with contextlib.suppress(queue.Empty):
        while True:
            rank, _, error = pickle.loads(results.get(timeout=seconds))
            yield f"rank {rank}:\n{error or 'ended without an error'}"


def run_ranks(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """``function(rank, *args)`` on ``size`` processes; what each returned (plain numbers, strings, lists)."""
    results = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "rendezvous")
        workers = [
            _context.Process(target=_work, args=(rank, size, file, results, function, args)) for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        try:
            answers = {}
            for rank, value, error in answers_of(dict(enumerate(workers)), results):
                assert error is None, "\n".join([f"rank {rank}:\n{error}", *errors_of_others(results)])
                answers[rank] = value
            for worker in workers:
                worker.join(HANG_GUARD)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
    return [answers[rank] for rank in range(size)]


def catch_message(error: type[Exception], function) -> str:
    """Return what ``function`` raised; the ranks stay in step because all raise."""
    try:
        function()
    except error as caught:
        return str(caught)
    return f"no {error.__name__}"
