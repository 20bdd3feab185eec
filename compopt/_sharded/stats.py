"""What TAGC reports of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .._engine.stats import Stats


@dataclass
class TagcStats(Stats):
    """Adds what TAGC did in the last step.

    ``density``: share of the compressed elements at which some rank had something to send.
    ``leftovers``: elements, over all shards, that the sketch could not have given back and that
    were sent as they are.
    """

    density: float = 1.0
    leftovers: int = 0


def tagc_stats(stats: Stats, counts: Iterable[tuple[int, int | None, int]]) -> TagcStats:
    """What all optimizers report, and what TAGC adds.

    ``counts``: of each exchange how many elements were compressed, how many of them were sent
    (None: all), and leftovers.
    """
    rows = list(counts)
    sent = sum(n if union is None else union for n, union, _ in rows)
    return TagcStats(
        **vars(stats),
        density=sent / max(1, sum(n for n, _, _ in rows)),
        leftovers=sum(left for _, _, left in rows),
    )
