"""``when="auto"``: stay dense where compression does not pay, as whole training steps say.

The steps of the dense start are timed, from the end of one ``step()`` to the end of the next, and so are the first
compressed ones; all ranks compare the same averages of their medians. Where compressed steps are not clearly faster, by
more than such timings err, the dense start has no end. The verdict is kept in the groups' ``warmup_steps``, so that a
checkpoint knows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator

import torch

from ._comm import Comm, Pending
from ._requests import AllReduceMean

SKIP, TIMED = 3, 8  # steps of each kind: not timed (buffers, hooks and masks are made in them), and timed
CLEARLY = 0.95  # of a dense step: what takes longer gains too little to approximate gradients for
FOREVER = 2**62  # steps
WAITS = ("resample",)  # phases that are neither: dense, and rare


def trial(groups: list[dict]) -> Trial | None:
    """Begin one where a group says "auto": its dense start is then long enough to be timed."""
    undecided = [group for group in groups if group.get("when") == "auto"]
    for group in undecided:
        group["warmup_steps"] = max(group["warmup_steps"], group["step"] + SKIP + TIMED + 2)
    return Trial() if undecided else None


class Trial:
    """The times of dense and of compressed steps, until both are known."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {"dense": [], "compressed": []}
        self._kind, self._since = "", 0.0

    def watch(
        self, groups: list[dict], phases: set[str], applied: bool, comm: Comm, device: torch.device
    ) -> Generator[Pending, None, str]:
        """Take the time of the step that has just ended; at the end of the trial write the verdict into the groups.

        Returns what was found, in words; nothing while the trial goes on.
        """
        kind = "dense" if phases <= {"dense"} else "compressed"
        settled = max(group["warmup_steps"] + group.get("density_warmup_steps", 0) for group in groups)
        typical = applied and not phases & set(WAITS) and (kind == "dense" or groups[0]["step"] > settled)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # in the steps of a trial only
        now = time.perf_counter()
        if typical and kind == self._kind:
            self._seconds[kind].append(now - self._since)
        self._kind, self._since = kind, now
        if any(len(seconds) < SKIP + TIMED for seconds in self._seconds.values()):
            return ""
        dense, compressed = yield from self._averages(comm, device)
        pays = compressed < CLEARLY * dense
        for group in groups:
            group["when"] = "always"  # from now on
            group["warmup_steps"] = group["warmup_steps"] if pays else FOREVER
        found = f"a compressed step took {1000 * compressed:.1f} ms, a dense one {1000 * dense:.1f} ms"
        return f"{'compressed' if pays else 'dense'}: {found}"

    def _averages(self, comm: Comm, device: torch.device) -> Generator[Pending, None, tuple[float, float]]:
        """Seconds of a dense and of a compressed step, the same on all ranks."""
        medians = [statistics.median(seconds[SKIP:]) for seconds in self._seconds.values()]
        pending = comm.start(AllReduceMean(torch.tensor(medians, dtype=torch.float32, device=device)))
        yield pending
        dense, compressed = pending.wait().tolist()
        return dense, compressed
