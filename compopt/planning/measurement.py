"""Measurements of a machine, and constants fitted to them.

``network_probe`` fits by it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .._state.tensors import synchronize

# Speeds


def measure_local(device: torch.device) -> tuple[float, float]:
    """Bytes a second that one process moves in this device's memory, and FLOPs a second in products
    of a matrix and a few columns, as projections have them.
    """
    vector = torch.ones(1 << 23, dtype=torch.float32, device=device)
    copy = torch.empty_like(vector)
    copy_s = median_seconds(lambda: copy.copy_(vector), device)
    # H Q and H^T P, with H of 1024 x 1024 and 16 columns.
    matrix = torch.ones(1024, 1024, dtype=torch.float32, device=device)
    columns = torch.ones(1024, 16, dtype=torch.float32, device=device)
    product_s = median_seconds(lambda: torch.mm(matrix.t(), torch.mm(matrix, columns)), device)
    return 2 * vector.nbytes / copy_s, 2 * 2 * 1024**2 * 16 / product_s


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median seconds of a call, after two that are not counted."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


# Constants


@dataclass(frozen=True)
class Fit:
    """Result of `fit`: `coefficients` by feature, and how far each measured point is from its
    prediction.

    `residuals` are (predicted - measured) / measured, in the order of the points.
    """

    coefficients: dict[str, float]
    residuals: list[float]

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
        seconds: the measurements, positive.
        weights: "relative" minimises relative errors, "absolute" seconds.

    Raises:
        ValueError: fewer points than features, or a measurement that is not positive.
    """
    names = sorted({name for point in points for name in point})
    if len(points) != len(seconds) or len(points) < len(names):
        raise ValueError(
            "fit needs as many measurements as points, and at least one per feature; "
            f"got {len(seconds)} measurements, {len(points)} points and {len(names)} features."
        )
    if min(seconds, default=0.0) <= 0:
        raise ValueError("fit needs positive measurements: drop the points that took no time.")
    if weights not in ("relative", "absolute"):
        raise ValueError(f"weights must be 'relative' or 'absolute'; got {weights!r}.")
    target = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    table = torch.tensor(
        [[point.get(name, 0.0) for name in names] for point in points],
        dtype=torch.float64,
        device="cpu",
    )
    weight = 1 / target if weights == "relative" else torch.ones_like(target)
    solution = solve_non_negative(table * weight[:, None], target * weight)
    residuals = (table @ solution / target - 1).tolist()
    return Fit(dict(zip(names, solution.tolist(), strict=True)), residuals)


def solve_non_negative(table: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Least squares with coefficients >= 0: the most negative one is dropped until none is, which
    is good enough for few features.
    """
    # Features differ by 15 orders of magnitude.
    scale = table.abs().amax(0).clamp_min(1e-300)
    kept = list(range(table.shape[1]))
    solution = torch.zeros(table.shape[1], dtype=table.dtype, device="cpu")
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
    points = list(zip(elements, seconds, strict=True))
    candidates = []
    for d in sorted(set(elements)):
        below = [t for n, t in points if n < d]
        above = [(n, t) for n, t in points if n >= d]
        constant = sum(below) / len(below) if below else 0.0
        beta = fit([{"n": n} for n, _ in above], [t for _, t in above]).coefficients["n"]
        residuals = [(constant if n < d else beta * n) / t - 1 for n, t in points]
        candidates.append((beta, constant, int(d), residuals))
    return min(candidates, key=lambda pieces: sum(r * r for r in pieces[3]))
