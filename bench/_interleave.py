"""Methods timed side by side: all in one set of processes, taking turns block by block, over shaped links.

A ratio then compares steps of the same minute on the same machine. One untimed step opens each block: it absorbs what
the method before left in flight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from _net import Links, sent_bytes
from torch import Tensor, nn


class Runner:
    """One method in one rank, and what its timed steps measured.

    Args:
        name: what its results are known by.
        model: called as model(inputs, targets), returns the loss.
        optimizer: steps on the model's gradients.
        batch: returns the next (inputs, targets).
        stats: has `phase` and `bytes_sent` of the last step; None takes the optimizer's own, if it has them.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Callable[[], tuple[Tensor, Tensor]],
        stats: object | None = None,
    ) -> None:
        self.name, self.model, self.optimizer, self.batch = name, model, optimizer, batch
        self.stats = stats
        self.seconds: list[float] = []
        self.cpu_seconds = 0.0  # of the timed steps, all threads
        self.counted: list[int] = []  # bytes that the method itself says it sent, where it says so
        self.phases: list[str] = []  # of the timed steps, likewise
        self.sent: int | None = 0  # bytes of all timed steps on this rank's socket

    def step(self) -> None:
        self.model(*self.batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, steps: int) -> None:
        dist.barrier()
        self.step()
        before, cpu = sent_bytes(), time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            self.seconds.append(time.perf_counter() - start)
            stats = self.stats or getattr(self.optimizer, "stats", None)
            if stats is not None:
                self.counted.append(stats.bytes_sent)
                self.phases.append(stats.phase)
        after = sent_bytes()
        self.cpu_seconds += time.process_time() - cpu
        self.sent = None if before is None or after is None else self.sent + after - before

    def result(self) -> dict:
        steps = len(self.seconds)
        return {
            "method": self.name,
            "seconds": self.seconds,
            "cpu_share": self.cpu_seconds / sum(self.seconds),
            "bytes": None if self.sent is None else self.sent / steps,
            "counted": self.counted,
            "phases": self.phases,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def interleave(runners: Sequence[Runner], rounds: int, steps: int) -> None:
    """In each rank, after init_process_group: time `rounds` blocks of `steps` steps of each runner, in turn.

    Rank 0 prints all ranks' results as JSON, a list of runners a rank, in its last line.
    """
    for _ in range(rounds):
        for runner in runners:
            runner.block(steps)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [runner.result() for runner in runners])
    if dist.get_rank() == 0:
        print(json.dumps(gathered))


def over_links(
    worker: Sequence[str], ranks: int, rate: str, burst: int | None = None, timeout: float = 1800
) -> tuple[str, list[tuple[dict, ...]]]:
    """Run a worker that ends in `interleave`, a process a rank, over links of this rate ("unshaped": no shaping).

    Returns:
        The rate, or "loopback" where links cannot be made; for each runner its results on all ranks.
    """
    with Links(ranks, None if rate == "unshaped" else rate, burst) as links:
        shaped = links.private
        outputs = links.run(worker, timeout=timeout)
    gathered = json.loads(outputs[0].splitlines()[-1])
    return rate if shaped else "loopback", list(zip(*gathered, strict=True))


def warn_if_busy(cpu_share: float) -> None:
    """Say so if steps without communication did not get their core to themselves."""
    if cpu_share < 0.9:
        print(f"Other work kept this machine busy: without communication a step got {cpu_share:.0%} of its core.")
