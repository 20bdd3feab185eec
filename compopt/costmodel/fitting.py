"""Constants from measurements, by non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Fit:
    """Result of `fit`: `coefficients` a feature, and how far each measured point is from its
    prediction.

    `residuals` are (predicted - measured) / measured, in the order of the points.
    """

    coefficients: dict[str, float]
    residuals: list[float]

    def predict(self, point: Mapping[str, float]) -> float:
        """Seconds of a point that need not have been measured."""
        return sum(value * point.get(name, 0.0) for name, value in self.coefficients.items())

    def __str__(self) -> str:
        lines = [f"{name} = {value:.4g}" for name, value in self.coefficients.items()]
        return "\n".join(
            lines + [f"point {i}: {100 * error:+.1f} %" for i, error in enumerate(self.residuals)]
        )


def fit(
    points: Sequence[Mapping[str, float]],
    seconds: Sequence[float],
    weights: Literal["relative", "absolute"] = "relative",
) -> Fit:
    """Fit seconds = sum of coefficient * feature, coefficients >= 0, over measured points.

    Args:
        points: one mapping a measurement, feature to amount (FLOPs, bytes on the wire, messages, 1
            for a constant).
        seconds: what was measured, positive.
        weights: "relative" minimises relative errors, "absolute" seconds.

    Raises:
        ValueError: fewer points than features, or a measurement that is not positive.
    """
    names = sorted({name for point in points for name in point})
    if len(points) != len(seconds) or len(points) < len(names):
        raise ValueError(
            f"fit needs as many measurements as points and at least one a feature; "
            f"got {len(seconds)} measurements, {len(points)} points and {len(names)} features."
        )
    if min(seconds, default=0.0) <= 0:
        raise ValueError("fit needs positive measurements: drop the points that took no time.")
    if weights not in ("relative", "absolute"):
        raise ValueError(f"weights must be 'relative' or 'absolute'; got {weights!r}.")
    target = torch.tensor(seconds, dtype=torch.float64)
    table = torch.tensor(
        [[point.get(name, 0.0) for name in names] for point in points], dtype=torch.float64
    )
    weight = 1 / target if weights == "relative" else torch.ones_like(target)
    solution = _non_negative(table * weight[:, None], target * weight)
    residuals = (table @ solution / target - 1).tolist()
    return Fit(dict(zip(names, solution.tolist(), strict=True)), residuals)


def _non_negative(table: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Least squares with coefficients >= 0: the most negative one leaves until none is (few
    features: good enough).
    """
    # Features differ by 15 orders of magnitude.
    scale = table.abs().amax(0).clamp_min(1e-300)
    kept = list(range(table.shape[1]))
    solution = torch.zeros(table.shape[1], dtype=table.dtype)
    while kept:
        part = torch.linalg.lstsq(table[:, kept] / scale[kept], target[:, None]).solution.view(-1)
        if part.min() >= 0:
            solution[kept] = part / scale[kept]
            break
        kept.pop(int(part.argmin()))
    return solution


def fit_communication(
    elements: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, int, list[float]]:
    """The piecewise all-reduce time of MCBench: (beta, C, d, residuals).

    C below d elements, beta an element from there; every measured size is tried as d and the one
    with the smallest relative squared error is kept. C is the mean of the points below d (0 when
    there are none).
    """
    if len(elements) != len(seconds) or len(elements) < 2:
        raise ValueError(
            f"At least two (elements, seconds) pairs are needed; got {len(elements)} and "
            f"{len(seconds)}."
        )
    found = [_cut_at(threshold, elements, seconds) for threshold in sorted(set(elements))]
    return min(found, key=lambda pieces: sum(r * r for r in pieces[3]))


def _cut_at(
    threshold: float, elements: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, int, list[float]]:
    """(beta, C, d, residuals) where d is ``threshold``."""
    points = list(zip(elements, seconds, strict=True))
    below = [t for n, t in points if n < threshold]
    above = [(n, t) for n, t in points if n >= threshold]
    constant = sum(below) / len(below) if below else 0.0
    beta = fit([{"n": n} for n, _ in above], [t for _, t in above]).coefficients["n"]
    residuals = [(constant if n < threshold else beta * n) / t - 1 for n, t in points]
    return beta, constant, int(threshold), residuals
