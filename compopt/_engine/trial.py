"""``when="auto"``: stay dense where compression does not pay.

With "auto" the last steps of the dense start are timed, from the end of one ``step()`` to the end
of the next, and so are the first compressed ones. The next step's handshake compares the medians of
all ranks, before that step writes anything. Unless compressed steps are clearly faster, the dense
start has no end. Only groups with "auto" are tried. The result is kept in them (``pays``); the
user's ``dense_steps`` do not change.

``Engine`` owns the trial; ``step`` times it, and ``handshake`` compares the times of ranks.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .._state.bucket import Bucket
from .._state.tensors import synchronize
from .options import FOREVER, count_dense_steps, ramp_of

# steps of each kind: not timed (they allocate buffers, hooks and masks), and timed
UNTIMED_STEPS, TIMED_STEPS = 3, 8
# A compressed step must take less than this share of a dense one: a smaller gain is not worth
# approximate gradients.
WORTHWHILE_RATIO = 0.95
UNTIMED_PHASES = {"resample"}  # phases that are not timed: dense, and rare


def begin_trial(groups: list[dict[str, Any]], buckets: list[Bucket]) -> Trial | None:
    """Return a trial if a group with compressed tensors has "auto" and no result yet."""
    compressing = [g for g in groups if any(b.group is g and any(b.compressed) for b in buckets)]
    tried = [g for g in compressing if g.get("when") == "auto" and g["pays"] is None]
    if not tried:
        return None
    others = [g for g in compressing if all(g is not other for other in tried)]
    return Trial(tried, others, [b.index for b in buckets if any(b.group is g for g in tried)])


class Trial:
    """The times of dense and of compressed steps, until all ranks have compared them.

    ``tried``: the groups of the trial, dense until it has timed enough dense steps. Timing waits
    until each of the ``others`` has reached its final density.
    """

    def __init__(
        self, tried: list[dict[str, Any]], others: list[dict[str, Any]], indices: list[int]
    ):
        self.result = ""  # a sentence
        self._tried, self._indices = tried, indices
        self._others_steady = max(map(_first_steady_step, others), default=0)
        for group in tried:
            group["dense_until"] = (
                max(group["step"], self._others_steady) + UNTIMED_STEPS + TIMED_STEPS + 2
            )
        self._all_steady = max(map(_first_steady_step, [*tried, *others]))
        self._seconds: dict[str, list[float]] = {"dense": [], "compressed": []}
        self._kind, self._since = "", 0.0
        self._pays = False

    def time_step(self, phase_of: dict[int, str], applied: bool, device: torch.device) -> bool:
        """Record the time of the step that has just ended.

        Returns True once this rank has timed enough steps to compare.
        """
        phases = {phase for index, phase in phase_of.items() if index in self._indices}
        kind = "dense" if phases <= {"dense"} else "compressed"
        steady = self._others_steady if kind == "dense" else self._all_steady
        is_typical = applied and not phases & UNTIMED_PHASES and self._tried[0]["step"] > steady
        synchronize(device)  # in the steps of a trial only
        now = time.perf_counter()
        if is_typical and kind == self._kind:
            self._seconds[kind].append(now - self._since)
        self._kind, self._since = kind, now
        return bool(self.compute_medians())

    def compute_medians(self) -> list[int]:
        """Return this rank's medians, dense and compressed, in nanoseconds; empty until enough
        steps are timed.
        """
        if any(len(seconds) < UNTIMED_STEPS + TIMED_STEPS for seconds in self._seconds.values()):
            return []
        return [
            int(1e9 * statistics.median(seconds[UNTIMED_STEPS:]))
            for seconds in self._seconds.values()
        ]

    def compare_medians(self, rows: list[list[int]]) -> None:
        """Decide, from the medians of all ranks; ``record_result`` commits it with the step."""
        dense, compressed = (sum(times) / len(rows) / 1e6 for times in zip(*rows, strict=True))
        self._pays = compressed < WORTHWHILE_RATIO * dense
        choice = "compressed" if self._pays else "dense"
        self.result = (
            f"{choice}: a compressed step took {compressed:.1f} ms, a dense one {dense:.1f} ms"
        )

    def record_result(self) -> None:
        for group in self._tried:
            group["pays"] = self._pays


def _first_steady_step(group: dict[str, Any]) -> int:
    """Return the step from which all steps of a group are alike; 0 if it stays dense."""
    start = count_dense_steps(group)
    return 0 if start >= FOREVER else start + ramp_of(group)
