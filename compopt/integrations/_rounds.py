"""Rounds of local steps in trainers, which need the same model on all ranks to evaluate or save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def end_open_rounds(optimizers: Iterable[Any]) -> None:
    """Call ``end_round()`` of those whose ranks may hold different parameters. On all ranks."""
    for optimizer in optimizers:
        if has_open_round(optimizer):
            optimizer.end_round()


def has_open_round(optimizer: Any) -> bool:
    """True if parameters may differ from rank to rank: only within a round of LocalSteps."""
    return bool(getattr(optimizer, "round_is_open", False))
