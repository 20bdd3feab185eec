"""Every pair of values of two factors, in few rows: what stands in place of a full product of three factors or more.

A fault that one value shows, or two values together, is seen; one that needs three is for test_fuzz.py, which
draws all factors.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any


def pairs(*factors: Iterable[Any], where: Callable[..., bool] = lambda *row: True) -> list[tuple]:
    """Return rows of one value a factor, in which every pair of values of two factors meets that ``where`` allows.

    Greedy: of all rows the one that has most pairs which are not in an earlier row, the first of equals.
    """
    values = [list(factor) for factor in factors]

    def row_of(key: tuple[int, ...]) -> tuple:
        return tuple(of_factor[n] for of_factor, n in zip(values, key, strict=True))

    keys = [key for key in itertools.product(*(range(len(of_factor)) for of_factor in values)) if where(*row_of(key))]
    pairs_of = [set(itertools.combinations(enumerate(key), 2)) for key in keys]
    missing = set().union(*pairs_of)
    queue = [(-len(of_row), n) for n, of_row in enumerate(pairs_of)]
    heapq.heapify(queue)
    chosen = []
    while missing:  # what a row adds only becomes less: one that still adds as much as it did is the best
        added, n = heapq.heappop(queue)
        if (now := len(pairs_of[n] & missing)) < -added:
            heapq.heappush(queue, (-now, n))
            continue
        chosen.append(n)
        missing -= pairs_of[n]
    return [row_of(keys[n]) for n in sorted(chosen)]


def name_of(value: Any) -> str:
    """Return what a test's name has of a value: for ``ids=``."""
    return getattr(value, "name", None) or str(value)
