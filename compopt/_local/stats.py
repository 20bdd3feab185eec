"""What a step did, where ranks step on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .._engine.stats import Stats
from .fragments import Fragment


@dataclass
class LocalStats(Stats):
    """The last step, and the rounds so far.

    ``round`` of them have ended, and the running one is ``steps_into_round`` old. Of the last
    exchange: ``spread``, how far ranks were apart, as the norm of what they moved less the mean of
    that, by the norm of the mean; ``cosine``, of the angle between what two ranks moved, the mean
    over pairs. ``phase`` is "local", "exchanged" (an exchange was applied), "skipped" (this rank's
    gradient was not finite), or in the start that of :class:`Average`.
    """

    round: int = 0
    steps_into_round: int = 0
    spread: float = 0.0
    cosine: float = 0.0


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
