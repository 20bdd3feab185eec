"""Rounds: their options and counts, which fragment is synced at which step, what ``stats``
reports, and a warning where nobody ended the last one.

If rounds have ``every`` steps, the schedule depends on options and step counts alone, and is the
same on all ranks. A round of H steps syncs every fragment once: fragment p of P at step
p * H // P of the round, p = 0 at its last. Over ``growth_steps`` rounds grow from 1 step to
``every``, and the rates of the outer optimizer grow with them.

If rounds have ``round_seconds``, every rank ends one by its own clock, at the first step after that
time. Ranks then differ in their numbers of steps, and so in scheduled learning rates.

``LocalSteps`` asks it at every step; ``advise`` counts syncs by ``round_length``.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from time import monotonic

from torch.optim import Optimizer

from .._engine.options import (
    Group,
    check_compress,
    check_payload_and_clip,
    is_count,
    is_number,
    is_numeric,
    require,
    require_option,
)
from .._engine.stats import Stats, format_bytes
from .._wire.collectives import Communicator
from .._wire.warning import user_location, warn_at

MINIMUMS = {"every": 1, "fragments": 1, "dense_steps": 0, "growth_steps": 0, "delay": 0}


@dataclass
class RoundCounts:
    """The running round on this rank, beside its number of steps, which is in the groups.

    ``round``: the number of rounds that have ended. ``begun``: the step after which the running
    one began. ``mean_step``: the mean over ranks of the steps taken when it began, if rounds end by
    time. ``weight``: steps or samples of this rank since the last sync. ``seconds``: the time
    since the last sync, if rounds end by time.
    """

    round: int = 0
    begun: int = 0
    mean_step: float = 0.0
    weight: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.clock: float | None = None  # the last reading in the running round

    def begin_round(self, number: int, step: int, mean_step: float) -> None:
        """Begin a round that ends by time, on this rank's clock."""
        self.round, self.begun, self.mean_step = number, step, mean_step
        self.weight, self.seconds, self.clock = 0.0, 0.0, monotonic()

    def read_seconds(self) -> float:
        """Return the time of the running round."""
        return self.seconds + (0.0 if self.clock is None else monotonic() - self.clock)

    def read_clock(self) -> None:
        """Add the time since the last call to the time of the round."""
        now = monotonic()
        self.seconds += now - (now if self.clock is None else self.clock)
        self.clock = now


def check_options(group: Group, offload: str | None) -> None:
    """Raise where an option of a group is out of its range."""
    check_payload_and_clip(group, keeps_all_errors=True)
    check_compress(group)
    for name, least in MINIMUMS.items():
        is_good = is_number(group[name]) and is_count(group[name], least)
        require_option(is_good, group, name, f"an integer >= {least}")
    momentum, lr, seconds = (group[n] for n in ("outer_momentum", "outer_lr", "round_seconds"))
    is_factor = is_numeric(momentum) and 0 <= momentum < 1
    require_option(is_factor, group, "outer_momentum", "in [0, 1)")
    is_rate = lr == "auto" or (is_numeric(lr) and 0 < lr < math.inf)
    require_option(is_rate, group, "outer_lr", "'auto', or finite and > 0")
    share = group["average_anchors"]
    is_share = share is None or (is_numeric(share) and 0 < share <= 1)
    require_option(is_share, group, "average_anchors", "None or in (0, 1]")
    is_time = seconds is None or (is_numeric(seconds) and 0 < seconds < math.inf)
    require_option(is_time, group, "round_seconds", "None or finite and > 0")
    if group["weighted"]:  # a payload is made when the weights of all ranks are known
        for name, least in (("delay", 0), ("fragments", 1)):
            require_option(group[name] == least, group, name, f"{least} where ranks are weighted")
    has_dtensors = any(hasattr(p, "device_mesh") for p in group["params"])
    limit = group["every"] // group["fragments"]
    require_option(group["delay"] <= limit, group, "delay", f"at most every / fragments, {limit}")
    require(offload in (None, "outer"), "offload", offload, "None or 'outer'")
    # a DTensor's part is on the device of its mesh
    require(not (has_dtensors and offload), "offload", offload, "None where parameters are sharded")


def round_length(options: Group, since: int) -> int:
    """Return the steps of the round that begins ``since`` steps after the averaged start."""
    every, growth = int(options["every"]), int(options["growth_steps"])
    return every if since >= growth else 1 + (every - 1) * since // growth


def round_duration(options: Group, mean_step: float) -> float:
    """Return the seconds of the round that begins when ranks have taken ``mean_step`` steps."""
    seconds, growth = float(options["round_seconds"]), int(options["growth_steps"])
    return seconds * min(1.0, mean_step / growth) if growth else seconds


def describe_rounds(options: Group, sent: float, dense: float) -> str:
    """Describe rounds, in which a sync of a fragment sends so many bytes; ``dense``: those of
    the gradients.
    """
    every, growth, seconds = (options[n] for n in ("every", "growth_steps", "round_seconds"))
    sent *= options["fragments"]  # the sync was of one of them
    duration, per_step = f"{every} steps of their own", f", {sent / dense / every:.2%} per step"
    if seconds is not None:
        duration, per_step = f"steps of their own for {seconds:g} s", ""
    grown = f" once rounds have grown, over {growth} steps" if growth else ""
    text = f"ranks take {duration} between syncs{grown}. A sync sends "
    if sent > dense:  # a message goes in front of it
        return (
            f"{text}{format_bytes(sent)}, the gradients of a step have {format_bytes(dense)}: this "
            "model is too small to save bytes in a sync."
        )
    return f"{text}{sent / dense:.1%} of the bytes of an all-reduce of the gradients{per_step}."


def outer_progress(options: Group, steps: float, seconds: float) -> float:
    """Return the share of the outer rate and momentum that applies after a round of ``steps``; if
    rounds end by time, of ``seconds``, in which ranks took ``steps`` on average.

    It grows with the logarithm of the round's length, from 0 (plain averaging) to 1. The momentum
    of long rounds would add up over short ones: with the full momentum from the first round on, a
    small GPT ended at a loss of 2.29 instead of 1.56.
    """
    every: float = options["every"]
    steps = max(1.0, steps)
    if options["round_seconds"] is not None:  # the steps that a round of full length would have
        every = steps / min(1.0, max(seconds / options["round_seconds"], 1e-9))
    return 1.0 if steps >= every else math.log(steps) / math.log(every)


def outer_gain(step_length: float, ranks: int) -> float:
    """Return the factor that gives the average of the ranks' movements the mean of their lengths.

    It is at most that of ranks which have moved at right angles, the square root of their number.
    """
    return 1 / min(1.0, max(step_length, 1 / math.sqrt(ranks)))


def trailing_weight(share: float, steps: float, step: float) -> float:
    """Return the weight of the anchors after ``step`` in their trailing mean, over about the last
    ``share`` of all steps, if the ones before had been there for ``steps`` steps.

    The mean weighs the anchors of step s by a power of s, whose mean age is that of the last
    ``share``: it needs no number of steps of the whole run.
    """
    kept: float = max(0.0, 1 - steps / max(step, 1)) ** (2 / share - 1)
    return 1 - kept


def find_due(
    fragments: Collection[int], options: Group, counts: RoundCounts, step: int, seconds: float
) -> set[int]:
    """Return the fragments that are synced after ``step`` steps, or ``seconds`` of the round.

    Fragments that were added after the first ones are synced at the last step of a round.
    """
    if options["round_seconds"] is not None:
        return {*fragments} if seconds >= round_duration(options, counts.mean_step) else set()
    at, count = step - counts.begun, options["fragments"]
    steps = round_length(options, counts.begun - options["dense_steps"])
    places = ((n, n if n < count else 0) for n in fragments)
    return {n for n, place in places if at == (place * steps // count or steps)}


# What stats report


@dataclass
class LocalStats(Stats):
    """The last step, and the rounds so far.

    ``round`` is the number of rounds that have ended, ``steps_into_round`` the steps of the running
    one. ``phase`` is "local", "exchanged" (a sync was applied), "skipped" (this rank's
    gradient was not finite), "dense" on one process, or in the averaged start that of
    :class:`Average`.

    The other fields describe the last sync. ``step_length`` is the norm of the average that
    ranks received over the mean of the norms of their pseudo-gradients, by the ranks' weights: 1 if
    all have moved the same way, about 1 / sqrt(ranks) if each has moved its own. ``round_steps``
    are the steps that this rank took before the sync, ``weight`` is its share in the average,
    and ``round_wait_seconds`` the time that it waited for collectives.
    """

    round: int = 0
    steps_into_round: int = 0
    step_length: float = 0.0
    round_steps: int = 0
    weight: float = 0.0
    round_wait_seconds: float = 0.0


class OpenRound:
    """Warns on rank 0 when the optimizer or the process ends before the round does."""

    def __init__(self, optimizer: Optimizer, equal_at: int):
        self._equal_at = equal_at  # the last step after which parameters were equal
        self._steps, self._warns = 0, False  # local steps since then
        self._name, self._location = type(optimizer).__name__, user_location()
        weakref.finalize(optimizer, self._on_end)

    def update(self, is_open: bool, step: int, comm: Communicator) -> None:
        """Note whether parameters may differ from rank to rank after a step."""
        if not is_open:
            self._equal_at = step
        self._steps = step - self._equal_at
        is_distributed = getattr(comm, "group", None) is not None  # not so in a simulation
        self._warns = is_distributed and comm.rank == 0 and comm.size > 1

    def _on_end(self) -> None:
        # An error that ends the process has a message of its own.
        if not self._steps or not self._warns or hasattr(sys, "last_value"):
            return
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        warn_at(
            self._location,
            f"{self._name} ended within a round: ranks took {steps} since parameters were last "
            "equal, and each holds a model of its own. Call end_round() on all ranks after the "
            "last step.",
        )
