"""What a step did becomes ``stats``."""

from __future__ import annotations

from .._wire.comm import Comm
from .engine import Engine
from .stats import Stats
from .verdicts import Verdict
from .weakly import weakly


def report(engine: Engine, verdict: Verdict, comm: Comm) -> None:
    """Renew ``stats``, after a step that was applied or skipped."""
    sent, engine.counted = comm.bytes_sent - engine.counted, comm.bytes_sent
    applied = verdict.applied
    phase = "+".join(sorted(set(verdict.phase_of.values()))) or "dense"
    gathered = sum(bucket.parameter_bytes for bucket in engine.buckets)
    stats = Stats(
        step=engine.steps,
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
