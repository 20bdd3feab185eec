"""What is raised where ranks found that they cannot go on as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._wire.requests import CommunicationError
from .decision import StepDecision

if TYPE_CHECKING:
    from .engine import Engine


def misplaced(engine: Engine, decision: StepDecision) -> CommunicationError:
    """Payloads of different buckets or steps met."""
    where = ", ".join(
        f"bucket {i}, of {engine.buckets[i].names[0]}" if i >= 0 else "another shard"
        for i in decision.misplaced
    )
    return CommunicationError(
        f"payloads of different buckets or steps met ({where}): ranks start their "
        "collectives in different order, or are steps apart. Run backward and step() "
        "equally often on all ranks."
    )


def watch_skips(engine: Engine, applied: bool) -> FloatingPointError | None:
    """Count steps that were skipped in a row; what is to be raised where they are too many."""
    engine.skipped_in_a_row = 0 if applied else engine.skipped_in_a_row + 1
    if engine.skipped_in_a_row < engine.face.max_skipped:
        return None
    return FloatingPointError(
        f"{engine.skipped_in_a_row} steps in a row were skipped, the last because of "
        f"{engine.stats.reason}: lower the learning rate or look for what makes the loss "
        "overflow (max_skipped is the limit)."
    )
