"""What a step did becomes ``stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .decision import StepDecision
from .stats import Stats
from .weakly import weakly

if TYPE_CHECKING:
    from .engine import Engine


def report(engine: Engine, decision: StepDecision, sent: int, number: int) -> None:
    """Renew ``stats``, after a step that was applied or skipped; ``sent``: bytes, in this step."""
    applied = decision.applied
    phase = "+".join(sorted(set(decision.phase_of.values()))) or "dense"
    gathered = sum(bucket.parameter_bytes for bucket in engine.buckets)
    stats = Stats(
        step=number,
        phase=phase if applied else "skipped",
        bytes_sent=sent,
        bytes_dense=sum(bucket.dense_bytes for bucket in engine.buckets),
        parameter_bytes=gathered if applied else 0,
        grad_norm=decision.norm,
        early_buckets=decision.early_buckets,
        buckets=len(engine.buckets),
        resent=decision.resent,
        skipped=engine.stats.skipped + (not applied),
        reason="" if applied else "non-finite gradient: " + ", ".join(decision.non_finite[:3]),
        residual_norm=weakly(engine.residual_norm),
        when=engine.found,
    )
    engine.stats = engine.face.add_to_stats(stats, decision)
