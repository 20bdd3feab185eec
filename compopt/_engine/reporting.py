"""What a step did becomes ``stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .stats import Stats
from .verdicts import Verdict
from .weakly import weakly

if TYPE_CHECKING:
    from .engine import Engine


def report(engine: Engine, verdict: Verdict, sent: int, number: int) -> None:
    """Renew ``stats``, after a step that was applied or skipped; ``sent``: bytes, in this step."""
    applied = verdict.applied
    phase = "+".join(sorted(set(verdict.phase_of.values()))) or "dense"
    gathered = sum(bucket.parameter_bytes for bucket in engine.buckets)
    stats = Stats(
        step=number,
        phase=phase if applied else "skipped",
        bytes_sent=sent,
        bytes_dense=sum(bucket.dense_bytes for bucket in engine.buckets),
        parameter_bytes=gathered if applied else 0,
        grad_norm=verdict.norm,
        early_buckets=verdict.early,
        buckets=len(engine.buckets),
        resent=verdict.resent,
        skipped=engine.stats.skipped + (not applied),
        reason="" if applied else "non-finite gradient: " + ", ".join(verdict.bad[:3]),
        residual_norm=weakly(engine.residual_norm),
        when=engine.found,
    )
    engine.stats = engine.face.add_to_stats(stats, verdict)
