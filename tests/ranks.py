"""Real ranks: one process each, gloo, a file as rendezvous. Bounded in time; the first error of any rank is raised."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "compopt", "pytest"]
)


def _work(rank: int, size: int, file: str, results: Any, function: Callable[..., Any], args: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
        results.put((rank, function(rank, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None


def _next_answer(results: Any, workers: list, answers: dict[int, Any], until: float) -> tuple:
    while True:
        # Before it is asked for: what a rank has said arrives although it has ended since.
        gone = {rank: w.exitcode for rank, w in enumerate(workers) if w.exitcode is not None and rank not in answers}
        try:
            return results.get(timeout=1)
        except queue.Empty:
            silent = [rank for rank in range(len(workers)) if rank not in answers]
            assert not gone, f"ranks ended and said nothing (rank: exit code): {gone}"
            assert time.monotonic() < until, f"ranks {silent} have not ended in time"


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 90) -> list[Any]:
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
            for _ in workers:
                rank, value, error = _next_answer(results, workers, answers, time.monotonic() + timeout)
                assert error is None, f"rank {rank}:\n{error}"
                answers[rank] = value
            for worker in workers:
                worker.join(timeout)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
    return [answers[rank] for rank in range(size)]
