"""Rounds: their options, which fragment is exchanged at which step, and what ``stats`` reports.

Where rounds have ``every`` steps the schedule is a function of options and step counts alone, the
same on all ranks. A round of H steps exchanges every fragment once: fragment p of P at step
p * H // P of the round, p = 0 at its last. Rounds grow from 1 step to ``every`` over
``every_warmup_steps``, and the outer optimizer with them.

Where rounds have ``round_seconds`` every rank ends one by its own clock, at the first step after
that time. Ranks then differ in their numbers of steps, and in what follows these: learning rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from .._engine.options import FREE, check_compress, check_payload, require
from .._engine.stats import Stats

Group = dict[str, Any]

# of the running round, and since the last exchange: each rank's own
CONTRIBUTED = ("weight", "seconds")
COUNTS = ("step", "round", "begun", "mean_step", *CONTRIBUTED)
LEAST = {"every": 1, "fragments": 1, "warmup_steps": 0, "every_warmup_steps": 0, "delay": 0}


def check_options(group: Group, offload: str | None) -> None:
    """Raise where an option of a group is out of its range."""
    check_payload(group, keeps_all_errors=True)
    check_compress(group)
    for name, least in LEAST.items():
        require(is_count(group[name], least), name, group[name], f"an integer >= {least}")
    for name in ("mix", "outer_momentum"):
        require(0 <= group[name] < 1, name, group[name], "in [0, 1)")
    require(group["outer_lr"] > 0, "outer_lr", group["outer_lr"], "> 0")
    seconds = group["round_seconds"]
    require(seconds is None or seconds > 0, "round_seconds", seconds, "None or > 0")
    for name, least in (("delay", 0), ("fragments", 1)) if group["weighted"] else ():
        # a payload is made when the weights of all ranks are known
        require(group[name] == least, name, group[name], f"{least} where ranks are weighted")
    is_sharded = any(hasattr(p, "device_mesh") for p in group["params"])
    delay, limit = group["delay"], group["every"] // group["fragments"]
    require(delay <= limit, "delay", delay, f"at most every / fragments, {limit}")
    require(offload in (None, "outer"), "offload", offload, "None or 'outer'")
    # a DTensor's part is on the device of its mesh
    require(not (is_sharded and offload), "offload", offload, "None where parameters are sharded")


def check_counts(group: Group) -> None:
    """Raise ValueError where the counts of a loaded group cannot be."""
    for name in COUNTS:
        count = group.get(name, 0)
        is_whole = name in ("step", "round", "begun")
        is_good = is_count(count, 0) if is_whole else is_number(count) and 0 <= count < math.inf
        if not is_good or (name == "begun" and count > group.get("step", count)):
            raise ValueError(f"loaded state dict has {name} {count!r}: it is damaged.")


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(number: Any, least: int) -> bool:
    """Return True if it is an integer of at least this much."""
    return is_number(number) and bool(number >= least and int(number) == number)


def list_unequal(options: Group) -> set[str]:
    """Return the names of options that may differ from rank to rank."""
    if options["round_seconds"] is None:
        return {*CONTRIBUTED}
    return {*CONTRIBUTED, "begun", "momentum", *FREE}  # schedulers set what is free


def round_length(options: Group, since: int) -> int:
    """Steps of the round that begins ``since`` steps after the averaged start."""
    every: int = options["every"]
    growth: int = options["every_warmup_steps"]
    return every if since >= growth else 1 + (every - 1) * since // growth


def round_duration(options: Group) -> float:
    """Seconds of the running round. They grow with the mean of the ranks' steps."""
    seconds: float = options["round_seconds"]
    growth: int = options["every_warmup_steps"]
    return seconds * min(1.0, options["mean_step"] / growth) if growth else seconds


def describe_rounds(options: Group, share: float) -> str:
    """Describe rounds, whose exchanges send this ``share`` of the bytes of an all-reduce."""
    every, fragments, growth = (options[n] for n in ("every", "fragments", "every_warmup_steps"))
    seconds = options["round_seconds"]
    share *= fragments  # the exchange was of one of them
    grown = f" once rounds have grown, over {growth} steps" if growth else ""
    if seconds is not None:
        return (
            f"ranks take steps of their own for {seconds:g} s between exchanges{grown}. An "
            f"exchange sends {share:.1%} of the bytes of an all-reduce of the gradients."
        )
    return (
        f"ranks take {every} steps of their own between exchanges{grown}. An exchange sends "
        f"{share:.1%} of the bytes of an all-reduce of the gradients, {share / every:.2%} per step."
    )


def outer_share(options: Group, steps: float, seconds: float) -> float:
    """Return the share of the outer rate and momentum that applies after a round of ``steps``, or
    of ``seconds`` with the mean of the ranks' ``steps``.

    It grows with the logarithm of the round's length, from 0 (plain averaging) to 1. The momentum
    of long rounds would add up over short ones: with the full momentum from the first round on, a
    small GPT ended at a loss of 2.29 instead of 1.56.
    """
    every: float = options["every"]
    steps = max(1.0, steps)
    if options["round_seconds"] is not None:  # a whole round would have had so many
        every = steps / min(1.0, max(seconds / options["round_seconds"], 1e-9))
    return 1.0 if steps >= every else math.log(steps) / math.log(every)


def is_due(fragment: int, at: int, steps: int, fragments: int) -> bool:
    """Return True if ``fragment`` is exchanged at step ``at``, from 1, of a round of ``steps``.

    Fragments that were added after the first ``fragments`` are exchanged at the last step.
    """
    place = fragment if fragment < fragments else 0
    return at == (place * steps // fragments or steps)


def delay_within(options: Group, steps: int) -> int:
    """Steps from an exchange's beginning to its application, in a round of this many ``steps``:
    never more than lie between two exchanges.
    """
    return min(int(options["delay"]), steps // int(options["fragments"]))


@dataclass
class LocalStats(Stats):
    """The last step, and the rounds so far.

    ``round`` of them have ended, and the running one is ``steps_into_round`` old. Of the last
    exchange: ``spread``, how far ranks were apart, as the norm of their pseudo-gradients less the
    mean of these, by the norm of the mean; ``cosine``, between the pseudo-gradients of two ranks,
    the mean over pairs. Both are estimated, to about .01. ``round_steps``: that this rank took for
    it; ``weight``: its share in the average; ``round_wait_seconds``: that it waited for collectives
    there. ``phase`` is "local", "exchanged" (an
    exchange was applied), "skipped" (this rank's gradient was not finite), "dense" on one process,
    or in the start that of :class:`Average`.
    """

    round: int = 0
    steps_into_round: int = 0
    spread: float = 0.0
    cosine: float = 0.0
    round_steps: int = 0
    weight: float = 0.0
    round_wait_seconds: float = 0.0


def with_rounds(stats: Stats, options: Group, exchanged: dict[str, Any]) -> LocalStats:
    """``stats``, with the rounds that ``options`` count, and values of the last exchange."""
    known = {field.name: getattr(stats, field.name) for field in fields(Stats)}
    at = max(0, options["step"] - max(options["begun"], options["warmup_steps"]))
    counts = {"round": options["round"], "steps_into_round": at}
    return LocalStats(**known, **counts, **exchanged)
