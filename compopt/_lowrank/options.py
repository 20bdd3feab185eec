"""The options of SEPARATE: what they may be."""

from __future__ import annotations

from typing import Any

from .._engine.options import check_compression, require
from .kinds import KINDS
from .projections import is_sharded

Group = dict[str, Any]


def check(group: Group) -> None:
    """Raise where an option of a group is out of its range."""
    check_compression(group)
    check_error_feedback(group)
    check_projection(group)
    check_clip(group)


def check_error_feedback(group: Group) -> None:
    beta, reset = group["ef_beta"], group["reset_interval"]
    require(group["ratio"] >= 1, "ratio", group["ratio"], ">= 1")
    require(is_auto_or_in_0_1(beta), "ef_beta", beta, '"auto" or in [0, 1]')
    good = reset in (None, "auto") or is_count(reset)
    require(good, "reset_interval", reset, 'None, "auto" or an integer >= 1')
    require(is_count(group["rank"]), "rank", group["rank"], "an integer >= 1")


def check_projection(group: Group) -> None:
    kind, interval = group["projection"], group["adapt_interval"]
    adapts = kind == "tracked" and group["adaptive"]
    require(not adapts, "adaptive", True, "False with projection='tracked'")
    require(kind in KINDS, "projection", kind, " or ".join(map(repr, KINDS)))
    require(interval >= 1, "adapt_interval", interval, "an integer >= 1")


def check_clip(group: Group) -> None:
    if group["clip"] == "reconstructed":  # what 0.1.0 called it
        group["clip"] = "average"
    clip = group["clip"]
    require(clip in ("average", "local"), "clip", clip, "'average' or 'local'")
    if clips_locally(group) and any(map(is_sharded, group["params"])):
        raise ValueError(
            "max_grad_norm with clip='local' would clip every shard by its own norm: leave clip at "
            "'average', whose norm is of the whole model."
        )


def is_auto_or_in_0_1(beta: Any) -> bool:
    return bool(beta == "auto" or (not isinstance(beta, str) and 0 <= beta <= 1))


def is_count(number: Any) -> bool:
    return not isinstance(number, str) and number >= 1 and int(number) == number


# What follows from them


def clips_locally(group: Group) -> bool:
    """Whether each rank's gradient is clipped before it is projected."""
    return group["clip"] == "local" and group["max_grad_norm"] is not None


def clips_average(group: Group) -> bool:
    """Whether the averaged gradient is clipped."""
    return group["clip"] == "average" and group["max_grad_norm"] is not None


def forgets(group: Group, t: int) -> bool:
    """Whether the error is forgotten after step t."""
    interval = group["reset_interval"]
    if interval == "auto":
        interval = KINDS[group["projection"]].forgets_after
    return interval is not None and t % interval == 0


def adapts(group: Group, t: int) -> bool:
    """Whether ratios are adapted after step t (G-SEPARATE)."""
    return bool(group["adaptive"] and t % group["adapt_interval"] == 0)
