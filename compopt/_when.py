"""``when="auto"``: stay dense where compression does not pay, as whole training steps say.

The steps of the dense start are timed, from the end of one ``step()`` to the end of the next, and so are the first
compressed ones; all ranks compare the same averages of their medians. Where compressed steps are not faster the dense
start has no end. The verdict is kept in the groups' ``warmup_steps``, so that a checkpoint knows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator

import torch

from ._comm import Comm, Pending
from ._requests import AllReduceMean

SKIP, TIMED = 3, 8  # steps of each kind: not timed (buffers, hooks and masks are made in them), and timed
FOREVER = 2**62  # steps
WAITS = ("resample",)  # phases that are neither: dense, and rare


class Trial:
    """The times of dense and of compressed steps, until both are known."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {"dense": [], "compressed": []}
        self._kind, self._since = "", 0.0

    def least_warmup(self, group: dict) -> int:
        """Dense steps, from where the optimizer is, that the trial needs."""
        return group["step"] + SKIP + TIMED + 2

    def watch(self, phases: set[str], counts: bool, device: torch.device) -> bool:
        """Take the time of the step that has just ended; whether both kinds are known.

        ``counts``: the step is a typical one of its kind.
        """
        kind = "dense" if phases <= {"dense"} else "compressed"
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # in the steps of a trial only
        now = time.perf_counter()
        if counts and kind == self._kind and not phases & set(WAITS):
            self._seconds[kind].append(now - self._since)
        self._kind, self._since = kind, now
        return all(len(seconds) >= SKIP + TIMED for seconds in self._seconds.values())

    def verdict(self, comm: Comm, device: torch.device) -> Generator[Pending, None, tuple[float, float]]:
        """Seconds of a dense and of a compressed step, the same on all ranks."""
        medians = [statistics.median(seconds[SKIP:]) for seconds in self._seconds.values()]
        pending = comm.start(AllReduceMean(torch.tensor(medians, dtype=torch.float32, device=device)))
        yield pending
        dense, compressed = pending.wait().tolist()
        return dense, compressed
