"""``when="auto"``: stay dense where compression does not pay, as whole training steps say.

The steps of the dense start are timed, from the end of one ``step()`` to the end of the next, and
so are the first compressed ones. Then the medians of all ranks go round with the handshake of the
next step, before anything of that step is written. Where compressed steps are not clearly faster,
by more than such timings err, the dense start has no end. Only groups that say "auto" are tried.
What was found is kept with them (``pays``); the user's ``warmup_steps`` stay as they are.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .._state.buckets import Bucket
from .._state.tensors import synchronize

# steps of each kind: not timed (buffers, hooks and masks are made in them), and timed
SKIP, TIMED = 3, 8
CLEARLY = 0.95  # of a dense step: what takes longer gains too little to approximate gradients for
FOREVER = 2**62  # steps
WAITS = {"resample"}  # phases that are neither: dense, and rare

SHARE = 0.15  # of a run of known length, where no warm-up is given: Radius's paper takes 15 to 20 %

OPTIONS = {
    "pays": None,  # what a trial has found: whether compressed steps are clearly faster
    "dense_until": 0,  # the step up to which a trial keeps the group dense, to have enough to time
}


def dense_steps(bucket: Bucket) -> int:
    """Steps of a bucket before compression starts; all where there is no other rank."""
    return FOREVER if bucket.is_single_process else start_of(bucket.group)


def start_of(group: dict[str, Any]) -> int:
    """Steps before compression starts: the user's, more where a trial needs them, all where it does
    not pay.
    """
    users = steps_of(group, "warmup_steps")
    if group["when"] != "auto":
        return users
    return FOREVER if group["pays"] is False else max(users, group["dense_until"])


def steps_of(group: dict[str, Any], name: str) -> int:
    """An option that is a number of steps, or a share of ``total_steps``."""
    given: int | float = group[name]
    share = isinstance(given, float) and 0 < given < 1
    return round(given * group["total_steps"]) if share else int(given)


def chosen(given: int | float | None, total_steps: int | None, steps: int) -> int | float:
    """A warm-up that was given; else a share of the run where its length is, else ``steps``."""
    if given is not None:
        return given
    return steps if total_steps is None else SHARE


def as_now(saved: dict[str, Any]) -> dict[str, Any]:
    """Options of a saved group, also where version 0.1.0 wrote them: "dense" was a warm-up without
    end then.
    """
    if "when" not in saved or "pays" in saved:
        return saved
    now = {**saved, **OPTIONS}
    if saved.get("warmup_steps") == FOREVER:
        now |= {"when": "auto", "pays": False}
        # the user's is not known any more: what the optimizer was made with stays
        del now["warmup_steps"]
    return now


def trial(groups: list[dict[str, Any]], buckets: list[Bucket]) -> Trial | None:
    """Begin one where a group with compressed tensors says "auto" and nothing is known of it."""
    compressing = [g for g in groups if any(b.group is g and any(b.compressed) for b in buckets)]
    tried = [g for g in compressing if g.get("when") == "auto" and g["pays"] is None]
    if not tried:
        return None
    others = [g for g in compressing if all(g is not other for other in tried)]
    return Trial(tried, others, [b.index for b in buckets if any(b.group is g for g in tried)])


class Trial:
    """The times of dense and of compressed steps, until all ranks have compared them.

    ``tried``: the groups it is about, which are dense until it has timed that. The ``others`` come
    to rest first: what is compared then differs in nothing else.
    """

    def __init__(
        self, tried: list[dict[str, Any]], others: list[dict[str, Any]], indices: list[int]
    ):
        self.found = ""  # in words
        self._tried, self._indices = tried, indices
        self._rest = max(map(_at_rest, others), default=0)
        for group in tried:
            group["dense_until"] = max(group["step"], self._rest) + SKIP + TIMED + 2
        self._settled = max(map(_at_rest, [*tried, *others]))
        self._seconds: dict[str, list[float]] = {"dense": [], "compressed": []}
        self._kind, self._since = "", 0.0
        self._pays = False

    def watch(self, phase_of: dict[int, str], applied: bool, device: torch.device) -> bool:
        """Take the time of the step that has just ended.

        Returns whether ranks have what they need to compare.
        """
        phases = {phase for index, phase in phase_of.items() if index in self._indices}
        kind = "dense" if phases <= {"dense"} else "compressed"
        step = self._tried[0]["step"]
        typical = (
            applied
            and not phases & WAITS
            and step > (self._rest if kind == "dense" else self._settled)
        )
        synchronize(device)  # in the steps of a trial only
        now = time.perf_counter()
        if typical and kind == self._kind:
            self._seconds[kind].append(now - self._since)
        self._kind, self._since = kind, now
        return bool(self.words())

    def words(self) -> list[int]:
        """This rank's medians, dense and compressed, in nanoseconds; nothing while they are not
        known.
        """
        if any(len(seconds) < SKIP + TIMED for seconds in self._seconds.values()):
            return []
        return [int(1e9 * statistics.median(seconds[SKIP:])) for seconds in self._seconds.values()]

    def compare(self, rows: list[list[int]]) -> None:
        """Decide, on the medians of all ranks.

        ``keep`` writes it down, with the step that this belongs to.
        """
        dense, compressed = (sum(times) / len(rows) / 1e6 for times in zip(*rows, strict=True))
        self._pays = compressed < CLEARLY * dense
        verdict = "compressed" if self._pays else "dense"
        self.found = (
            f"{verdict}: a compressed step took {compressed:.1f} ms, a dense one {dense:.1f} ms"
        )

    def keep(self) -> None:
        for group in self._tried:
            group["pays"] = self._pays


def ramp_of(group: dict[str, Any]) -> int:
    """Steps after the start over which density falls, where a class has such an option."""
    return steps_of(group, "density_warmup_steps") if "density_warmup_steps" in group else 0


def _at_rest(group: dict[str, Any]) -> int:
    """The step from which a group does the same in every step; 0 where it stays dense."""
    start = start_of(group)
    return 0 if start >= FOREVER else start + ramp_of(group)
