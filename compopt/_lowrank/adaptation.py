"""G-SEPARATE: ratios that follow how well tensors are reconstructed (SEPARATE, Algorithm 3).

With c_i the cosine between the gradient of tensor i and its reconstruction, the mean over ranks,
and c the mean of these over tensors, every ``adapt_interval`` steps::

    6  ratio_i <- max(2, ratio_i (1 + c_i - c));  beta_i <- the same, between 0.90 and 0.99

More columns where the reconstruction is worse than on average, fewer where it is better.

Where we differ from the paper: beta never leaves what is stable (see ``Kind.least_beta``), and
"auto" follows the ratio by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .._state.tensors import to_local
from .projections import is_sharded, projection

Group = dict[str, Any]
Adapted = tuple[float, float | str]  # the ratio and ef_beta of one tensor


class Adaptation:
    """The cosines that a step has found, until all buckets have committed it."""

    def __init__(self) -> None:
        self._cosines: dict[Tensor, float] = {}

    def take(self, cosines: dict[Tensor, float]) -> None:
        """Cosines of the tensors of one bucket."""
        self._cosines.update(cosines)

    def adapt(self, groups: Iterable[Group]) -> None:
        """Line 6, where this step has found any."""
        if not self._cosines:
            return
        mean = sum(self._cosines.values()) / len(self._cosines)
        for group in groups:
            group["adapted"] = [
                self._next(p, group, current(group, place), mean)
                for place, p in enumerate(group["params"])
            ]
        self._cosines.clear()

    def _next(self, p: Tensor, group: Group, old: Adapted, mean: float) -> Adapted:
        return adapted(p, group, old, self._cosines[p] - mean) if p in self._cosines else old


def current(group: Group, place: int) -> Adapted:
    """What a tensor of a group was adapted to, else what the group says."""
    if group["adapted"]:
        ratio, beta = group["adapted"][place]
        return ratio, beta
    return group["ratio"], group["ef_beta"]


def adapted(p: Tensor, group: Group, old: Adapted, better: float) -> Adapted:
    """Line 6 for a tensor whose cosine is ``better`` than the mean."""
    ratio, beta = old
    ratio = max(2.0, ratio * (1 + better))
    if isinstance(beta, str):
        return ratio, beta
    q = projection(to_local(p).shape, is_sharded(p), ratio, group["projection"], beta)
    least = q.least_beta if q else 0.0
    return ratio, max(min(beta * (1 + better), 0.99), 0.90, least)
