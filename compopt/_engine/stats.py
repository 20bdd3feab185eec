"""Stats of steps and of the run, a line at the first step and a summary at the end.

The first line says what is compressed, from which step on, and how many bytes a step then sends. It
goes to the logger "compopt" if that shows INFO, else to stderr: a warning would be wrong, and
Python's loggers show no INFO by default. COMPOPT_QUIET=1 silences it, and so does a level above
INFO on the logger.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from .._state.bucket import Bucket
from .._wire.codec import PAYLOAD_CODECS
from .options import FOREVER, count_dense_steps, ramp_of

log = logging.getLogger("compopt")
SHORTEST_RUN = 20  # steps of a run with a summary


@dataclass
class RunTotals:
    """Sums over all steps of this optimizer in this process, of this rank.

    ``skipped`` counts the skipped steps. ``bytes_sent`` includes ``bytes_of_saves``, what
    ``consolidate_state()`` has sent. ``share`` is ``bytes_sent`` over ``bytes_dense``. The other
    fields are sums of those of :class:`Stats`. A run that resumes from a checkpoint begins at 0.
    """

    steps: int = 0
    skipped: int = 0
    bytes_sent: int = 0
    bytes_dense: int = 0
    bytes_of_saves: int = 0
    wait_seconds: float = 0.0
    straggler_seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.bytes_sent / self.bytes_dense if self.bytes_dense else 0.0

    def add_exchange(self, stats: Stats, is_step: bool) -> None:
        """Add what was sent, in a step or after one."""
        if is_step:
            self.steps += 1
            self.bytes_dense += stats.bytes_dense
        self.bytes_sent += stats.bytes_sent
        self.wait_seconds += stats.wait_seconds
        self.straggler_seconds += stats.straggler_seconds

    def add_save(self, bytes_sent: int, waited: float) -> None:
        """Add what ``consolidate_state()`` sent, and the seconds that it waited."""
        self.bytes_sent += bytes_sent
        self.bytes_of_saves += bytes_sent
        self.wait_seconds += waited


@dataclass
class Stats:
    """The last step, as this rank saw it.

    ``applied_steps`` is the number of steps applied so far, also before a checkpoint was loaded.
    ``bytes_sent`` is what this rank handed to collectives in the step, ``bytes_dense`` what DDP
    would have, or FSDP2 to its reduce-scatter; what ``consolidate_state()`` sends is in ``run``
    alone. An all-reduce crosses each link twice, a reduce-scatter and a gather once each: so bytes
    of sharded state, of which each of N ranks gathers N - 1 parts, weigh otherwise than an
    all-reduce's.
    ``parameter_bytes`` is the part of ``bytes_sent`` that went into gathering updated parameters,
    where the optimizer shards state; what FSDP2 gathers is in neither number. ``grad_norm`` is the
    number that ``max_grad_norm`` clips by: of the average over ranks, before the clip. ``skipped``
    counts the skipped steps so far. ``when`` is the result of the trial of ``when="auto"``, with
    the milliseconds of a step of each kind. ``phase`` is what the compressed tensors did: "dense",
    "skipped" (nothing was applied), or a phase of the class.

    ``wait_seconds`` is how long this rank's host waited for collectives. ``straggler_seconds`` is
    this wait less the shortest wait of any rank: it was spent on slower ranks, not on the network.
    Ranks report their waits in turn, one rank per step, so it is 0 at first. ``run`` has the
    totals.
    """

    applied_steps: int = 0
    phase: str = "none"
    bytes_sent: int = 0
    bytes_dense: int = 0
    parameter_bytes: int = 0
    grad_norm: float = 0.0
    early_buckets: int = 0
    buckets: int = 0
    resent: bool = False
    skipped: int = 0
    reason: str = ""
    when: str = ""
    wait_seconds: float = 0.0
    straggler_seconds: float = 0.0
    run: RunTotals = field(default_factory=RunTotals, repr=False)
    residual_norm: Callable[[], float] = field(default=lambda: 0.0, repr=False)

    def as_dict(self) -> dict[str, int | float | str]:
        """Return all of it flat, for loggers and ``json.dumps``: numbers and texts, the totals as
        "run_bytes_sent" and so on. Fields that are functions, as ``residual_norm``, are called.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "run"}
        values = {name: value() if callable(value) else value for name, value in values.items()}
        totals = {f.name: getattr(self.run, f.name) for f in fields(self.run)}
        values |= {f"run_{name}": value for name, value in totals.items()}
        return values | {"run_share": self.run.share}


class WaitRecord:
    """Wait times of ranks for collectives; they report them in turn, one rank per exchange."""

    def __init__(self) -> None:
        self.seconds = 0.0  # waited by this rank in all
        self.reported = 0.0  # the part of it that `take_seconds` has returned
        self.steps = 0  # with collectives, since this rank's last turn
        self.since_turn = 0.0
        self.mean_of_rank: dict[int, float] = {}  # seconds per step, as last reported

    def add_wait(self, seconds: float) -> None:
        self.seconds += seconds

    def make_field(self, step: int, rank: int, size: int) -> list[float]:
        """Return the control field of a step: this rank's seconds per step in its turn, else 0."""
        if step % size != rank or not self.steps:
            return [0.0]
        mean, self.steps, self.since_turn = self.since_turn / self.steps, 0, 0.0
        return [mean]

    def note_field(self, step: int, size: int, mean: float) -> None:
        """Note the report of the rank whose turn it was; ``mean`` is over all ranks."""
        if mean > 0:
            self.mean_of_rank[step % size] = mean * size

    def take_seconds(self) -> float:
        """Return the seconds waited since the last call."""
        waited, self.reported = self.seconds - self.reported, self.seconds
        return waited

    def take_step(self) -> tuple[float, float]:
        """Return the seconds waited since the last call, and the part due to slower ranks."""
        waited = self.take_seconds()
        self.steps += waited > 0  # local steps wait for no one
        self.since_turn += waited
        least = min(self.mean_of_rank.values(), default=waited)
        return waited, max(0.0, waited - least)


def show_line(text: str) -> None:
    """Log or print one line to the user, unless that is silenced."""
    if os.environ.get("COMPOPT_QUIET", "0") not in ("", "0") or log.level > logging.INFO:
        return
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(f"compopt: {text}", file=sys.stderr, flush=True)


def show_summary(name: str, run: RunTotals, baseline: str) -> None:
    """Show a line about the whole run, unless it had a few steps only.

    ``baseline``: who averages gradients without this optimizer, "DDP" or "FSDP2".
    """
    if run.steps < SHORTEST_RUN:
        return
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    sent, dense = (format_bytes(count) for count in (run.bytes_sent, run.bytes_dense))
    for_saves = format_bytes(run.bytes_of_saves)
    saves = f", {for_saves} of them in consolidate_state()" if run.bytes_of_saves else ""
    for_ranks = run.straggler_seconds
    slower = f", {for_ranks:.1f} s of them for slower ranks" if for_ranks >= 0.05 else ""
    show_line(
        f"{name}: {run.steps} steps{skipped}. Rank 0 sent {sent}, {run.share:.1%} of {baseline}'s "
        f"{dense}{saves}, and waited {run.wait_seconds:.1f} s for collectives{slower}."
    )


def format_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def describe_compression(
    buckets: Sequence[Bucket], values_sent: Sequence[float | None], in_fsdp: bool
) -> str:
    """Describe what is compressed of ``buckets``, from which step on, and how much is then sent.

    ``values_sent``: by each bucket in a compressed step; None where a class cannot tell.
    ``in_fsdp``: dense steps use a reduce-scatter, which carries floats only.
    """
    tensors = sum(len(bucket.params) for bucket in buckets)
    compressing = [bucket for bucket in buckets if any(bucket.compressed)]
    if not compressing:
        return (
            f"none of {tensors} tensors is compressed: what has fewer than 2 dimensions or 4096 "
            "elements is averaged dense (compress=True in a parameter group compresses it)."
        )
    compressed = sum(sum(bucket.compressed) for bucket in buckets)
    starts = sorted({count_dense_steps(bucket.group) for bucket in compressing})
    ramp = max(ramp_of(bucket.group) for bucket in compressing)
    start = " and ".join(f"step {start + 1}" for start in starts)
    when = f"from {start} on" + (f", falling to their density over {ramp} steps" if ramp else "")
    if starts[0] >= FOREVER:
        when = "but stay dense, as a trial has found"
    text = f"{compressed} of {tensors} tensors are compressed, {when}."

    dense = sum(bucket.dense_bytes for bucket in buckets)
    if None in values_sent or not dense:
        return text
    sent = first = 0.0
    for bucket, count in zip(buckets, values_sent, strict=True):
        codec = PAYLOAD_CODECS[bucket.group["payload_dtype"]]
        size = codec.bytes_per_value(bucket.grad_dtype)
        sent += size * (count or 0)
        first += bucket.dense_bytes if in_fsdp and codec.bits else size * bucket.numel
    collective = "FSDP2's reduce-scatter" if in_fsdp else "an all-reduce"
    text += (
        f" A step then sends {sent / dense:.1%} of the bytes of {collective} of the "
        f"gradients, a dense one before it {first / dense:.0%}."
    )
    if in_fsdp:
        text += " The parameters that FSDP2 gathers are not counted."
    return text
