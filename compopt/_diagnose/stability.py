"""Whether the largest elements stay the same: Radius's Figure 1 and SCAPE's Figure 6, as numbers.

Of a quantity x and a density d, let A(t) be the positions of the round(d n) largest |x| of each
tensor at step t. Two numbers for every lag: the share of A(t) that was in A(t - lag) already, and
the norm that x(t) has on A(t - lag), over the norm that it has on A(t).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DENSITIES = (0.4, 0.1, 0.01)
LAGS = (1, 10, 100)
EVERY = 10  # steps between two sets that are kept for the longer lags
ELEMENTS = 1 << 15  # looked at of one tensor


class Stability:
    """Of one quantity, a part of the model after the other, each of so many elements."""

    def __init__(self, sizes: Sequence[int], densities: Sequence[float] = DENSITIES):
        self.densities = densities
        self.strides = [max(1, size // ELEMENTS) for size in sizes]
        self.step = 0
        self.sets: dict[int, list[Tensor | None]] = {}  # by steps: of every part (densities, n)
        self.overlaps: dict[tuple[float, int, int], list[float]] = {}  # density, lag, part
        self.norms: dict[tuple[float, int, int], list[float]] = {}

    def see(self, values: Sequence[Tensor | None]) -> None:
        """The quantity at the next step; None where a part has no gradient."""
        self.step += 1
        lags = [lag for lag in LAGS if lag == 1 or self.step % EVERY == 0]
        now: list[Tensor | None] = []
        for i, value in enumerate(values):
            if value is None:
                now.append(None)
                continue
            x = value.reshape(-1)[:: self.strides[i]].abs()
            now.append(chosen := largest(x, self.densities))
            for lag in lags:
                before = self.sets.get(self.step - lag, [None] * len(values))[i]
                if before is not None:
                    self._compare(i, lag, x, chosen, before)
        self.sets[self.step] = now
        oldest = self.step - max(LAGS)
        for step in list(self.sets):
            if step < oldest or (step < self.step and step % EVERY):
                del self.sets[step]

    def _compare(self, i: int, lag: int, x: Tensor, now: Tensor, before: Tensor) -> None:
        squares = x.double().square()
        shared = (now & before).sum(1) / now.sum(1)
        fresh = (squares * now).sum(1)
        old = ((squares * before).sum(1) / fresh.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
        found = torch.stack([shared.double(), old]).tolist()
        for density, overlap, norm in zip(self.densities, *found, strict=True):
            self.overlaps.setdefault((density, lag, i), []).append(overlap)
            self.norms.setdefault((density, lag, i), []).append(norm)


def largest(x: Tensor, densities: Sequence[float]) -> Tensor:
    """For every density a row: whether an element is among the round(density n) largest of x, which
    is not negative; at least one is.
    """
    counts = [max(1, round(density * x.numel())) for density in densities]
    positions = x.topk(max(counts)).indices  # the largest first
    chosen = torch.zeros(len(counts), x.numel(), dtype=torch.bool, device=x.device)
    for row, count in zip(chosen, counts, strict=True):
        row[positions[:count]] = True
    return chosen
