"""What a step did, where ranks step on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .._engine.engine import Engine
from .._engine.stats import Stats
from .._engine.weakly import weakly
from .exchanges import Exchanges, Group
from .fragments import Fragment


@dataclass
class LocalStats(Stats):
    """The last step, and the rounds so far.

    ``round`` of them have ended, and the running one is ``steps_into_round`` old. Of the last
    exchange: ``spread``, how far ranks were apart, as the norm of what they moved less the mean of
    that, by the norm of the mean; ``cosine``, of the angle between what two ranks moved, the mean
    over pairs. ``phase`` is "local", "exchanged" (an exchange was applied), "skipped" (this rank's
    gradient was not finite), "dense" on one process, or in the start that of :class:`Average`.
    """

    round: int = 0
    steps_into_round: int = 0
    spread: float = 0.0
    cosine: float = 0.0


def report(
    engine: Engine,
    h: Group,
    exchanges: Exchanges | None,
    norm: float,
    applied: Sequence[Fragment],
    taken: bool = True,
) -> None:
    """Renew ``stats``, after this rank's own step or after a round that was ended."""
    phase = "exchanged" if applied else "dense" if engine.dense else "local"
    stats = Stats(
        step=h["step"],
        phase=phase if taken else "skipped",
        bytes_sent=exchanges.bytes_sent() if exchanges else 0,
        bytes_dense=sum(bucket.dense_bytes for bucket in engine.buckets),
        grad_norm=norm,
        buckets=len(engine.buckets),
        skipped=engine.stats.skipped + (not taken),
        reason="" if taken else "non-finite gradient on this rank",
        residual_norm=weakly(exchanges.residual_norm) if exchanges else float,
    )
    at = h["step"] - h["begun"]
    here = replace(with_rounds(stats, engine.stats), round=h["round"], steps_into_round=at)
    engine.stats = with_distances(here, applied, engine.comm.size)


def begun(stats: Stats, h: Group) -> LocalStats:
    """``stats`` of before the first step, over these ranks."""
    at = max(0, h["step"] - max(h["begun"], h["warmup_steps"]))
    return replace(with_rounds(stats, stats), round=h["round"], steps_into_round=at)


def with_rounds(stats: Stats, last: Stats) -> LocalStats:
    """``stats``, with what ``last`` says of the last exchange."""
    known = {field.name: getattr(stats, field.name) for field in fields(stats)}
    if isinstance(last, LocalStats):
        known |= {"spread": last.spread, "cosine": last.cosine}
    return LocalStats(**known)


def with_distances(stats: LocalStats, applied: Sequence[Fragment], ranks: int) -> LocalStats:
    """``stats``, with how far ranks were apart; two sums tell, the squared norms of what they moved
    and of the mean of that.
    """
    own = sum(fragment.norms[0] for fragment in applied)
    mean = sum(fragment.norms[1] for fragment in applied)
    if ranks == 1 or not own or not mean:
        return stats
    spread = (max(0.0, own - mean) / mean) ** 0.5
    return replace(stats, spread=spread, cosine=(ranks * mean - own) / ((ranks - 1) * own))
