"""The options of SEPARATE: what they may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from .._engine.options import check_compression, require
from .._engine.when import choose_warmup
from .._wire.payload import PayloadDtype
from .kinds import KINDS
from .projections import is_sharded

Group = dict[str, Any]


# what an option is where nobody says it
RANK, RATIO = 16, 16.0
START = 10  # steps averaged dense at first, where projections are tracked


def resolved(
    projection: str,
    ratio: float | None,
    rank: int | None,
    payload_dtype: PayloadDtype | Literal["auto"],
    warmup_steps: int | float | None,
    total_steps: int | None,
) -> Group:
    """The options whose default depends on the projection.

    Raises ValueError where one says nothing for it.
    """
    follows = projection == "tracked"
    refuse_idle(projection, ratio, rank)
    start: int | float | None = warmup_steps
    if start is None:
        start = START if follows else choose_warmup(None, total_steps, 0)
    sent = ("int8" if follows else None) if payload_dtype == "auto" else payload_dtype
    return dict(
        projection=projection,
        ratio=RATIO if ratio is None else ratio,
        rank=RANK if rank is None else rank,
        payload_dtype=sent,
        warmup_steps=start,
        total_steps=total_steps,
    )


def refuse_idle(projection: str, ratio: float | None, rank: int | None) -> None:
    """Raise ValueError where a size was given that says nothing for this projection."""
    if projection == "tracked" and ratio is not None:
        raise ValueError(
            f"ratio={ratio} is for random projections, and this one is tracked: pass rank= in its "
            "place, or projection='gaussian' with it."
        )
    if projection != "tracked" and rank is not None:
        raise ValueError(
            f"rank={rank} is for tracked projections, and this one is {projection!r}: pass ratio= "
            "in its place, or projection='tracked' with it."
        )


def check_said(group: Group, defaults: Group) -> None:
    """Raise where a group says a size that means nothing for its projection.

    One that has both, as another optimizer's groups have, says nothing itself.
    """
    ratio, rank = group.get("ratio"), group.get("rank")
    if ratio is None or rank is None:
        refuse_idle(str({**defaults, **group}["projection"]), ratio, rank)


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
    height = group["block_rows"]
    good = height in (None, "auto") or (kind != "tracked" and is_count(height))
    require(good, "block_rows", height, "None, 'auto' or, of a random projection, an integer >= 1")


def check_inside(groups: Iterable[Group]) -> None:
    """Raise where an option cannot be followed inside FSDP."""
    if any(group["adaptive"] for group in groups):
        raise ValueError(
            "adaptive=True compares gradients with their reconstructions, and inside FSDP no rank "
            "has these whole: leave it out."
        )


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
