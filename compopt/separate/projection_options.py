"""The options of Separate and SeparateAdam: their defaults, and their checks."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, Literal

import torch

from .._engine.options import (
    Group,
    check_compression,
    is_count,
    is_numeric,
    require,
    require_option,
)
from .._state.bucket import Bucket
from .._wire.payload import PayloadDtype

# Steps after which the residual is set to zero, by default, for each value of ``projection=``. The
# residual of a contraction that follows the gradient is kept.
RESET_INTERVALS: dict[str, int | None] = {"gaussian": 128, "tracked": None}

DEFAULT_RANK, DEFAULT_RATIO = 16, 16.0
TRACKED_DENSE_STEPS = 10


def resolve_options(
    projection: str,
    ratio: float | None,
    rank: int | None,
    payload_dtype: PayloadDtype | Literal["auto"],
    dense_steps: int | None,
) -> Group:
    """Return the options whose defaults depend on the projection.

    Raises ValueError for a size that the projection does not use.
    """
    is_tracked = projection == "tracked"
    refuse_unused_size(projection, ratio, rank)
    if payload_dtype == "auto":
        payload_dtype = "int8" if is_tracked else None
    if dense_steps is None:
        dense_steps = TRACKED_DENSE_STEPS if is_tracked else 0
    return dict(
        projection=projection,
        ratio=DEFAULT_RATIO if ratio is None else ratio,
        rank=DEFAULT_RANK if rank is None else rank,
        payload_dtype=payload_dtype,
        dense_steps=dense_steps,
    )


def refuse_unused_size(projection: str, ratio: float | None, rank: int | None) -> None:
    """Raise ValueError where a size is given that the projection does not use."""
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


def check_group_sizes(group: Group, defaults: Group) -> None:
    """Raise ValueError where a group gives one size that its projection does not use.

    A group with both sizes has been copied from another optimizer and is accepted.
    """
    ratio, rank = group.get("ratio"), group.get("rank")
    if ratio is None or rank is None:
        refuse_unused_size(str({**defaults, **group}["projection"]), ratio, rank)


def check_options(group: Group) -> None:
    """Raise ValueError where an option of a group is out of its range."""
    check_compression(group)

    beta, reset = group["ef_beta"], group["reset_interval"]
    is_ratio = is_numeric(group["ratio"]) and 1 <= group["ratio"] < math.inf
    require_option(is_ratio, group, "ratio", "finite and >= 1")
    is_weight = beta == "auto" or (is_numeric(beta) and 0 <= beta <= 1)
    require_option(is_weight, group, "ef_beta", '"auto" or in [0, 1]')
    is_interval = reset in (None, "auto") or is_positive_integer(reset)
    require_option(is_interval, group, "reset_interval", 'None, "auto" or an integer >= 1')
    require_option(is_positive_integer(group["rank"]), group, "rank", "an integer >= 1")

    kind, interval = group["projection"], group["adapt_interval"]
    is_tracked = kind == "tracked"
    adapts_rank = is_tracked and group["adaptive"]
    require(not adapts_rank, "adaptive", True, "False with projection='tracked'")
    kinds = " or ".join(map(repr, RESET_INTERVALS))
    is_known = isinstance(kind, str) and kind in RESET_INTERVALS
    require_option(is_known, group, "projection", kinds)
    require_option(is_count(interval), group, "adapt_interval", "an integer >= 1")


def is_positive_integer(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def is_reset_step(group: Group, t: int) -> bool:
    """True where residuals are set to zero after step t."""
    interval = group["reset_interval"]
    if interval == "auto":
        interval = RESET_INTERVALS[group["projection"]]
    return interval is not None and t % interval == 0


def projects_tracked(bucket: Bucket) -> bool:
    """True if the bucket's matrices are projected on tracked columns, and nothing is float64."""
    group = bucket.group
    sent = bucket.codecs[group.get("payload_dtype")].dtype or bucket.grad_dtype
    return group.get("projection") == "tracked" and torch.float64 not in (sent, bucket.dtype)
