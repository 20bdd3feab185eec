"""Which run is next: a walk on a grid of settings, until nothing beside the best is untried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from _ladder_model import SIZES
from _ladder_rows import MOMENTA, OUTER_LRS, ROWS, Run

Lines = Mapping[Run, dict[str, Any]]  # finished runs, and the line that is kept of each


def loss_of(line: dict[str, Any]) -> float:
    """Infinite where the run has diverged."""
    return math.inf if line["val_loss"] is None else line["val_loss"]


def best_of(runs: Lines, like: Run) -> Run | None:
    """The best run of the row, among those that differ from ``like`` in what is tuned."""
    tuned = {"lr": like.lr, "outer_lr": like.outer_lr, "momentum": like.momentum}
    alike = [run for run in runs if run._replace(**tuned) == like]
    return min(alike, key=lambda run: loss_of(runs[run]), default=None)


def neighbours(run: Run, outer: bool) -> Iterator[Run]:
    """Twice and half its rate; with ``outer`` the momenta beside its own, and the other outer rates."""
    yield run._replace(lr=run.lr * 2)
    yield run._replace(lr=run.lr / 2)
    if outer and run.momentum is not None:
        at = MOMENTA.index(run.momentum)
        yield from (run._replace(momentum=momentum) for momentum in MOMENTA[max(0, at - 1) : at + 2])
        yield from (run._replace(outer_lr=rate) for rate in OUTER_LRS)


def list_missing(runs: Lines, start: Run, outer: bool) -> list[Run]:
    """The runs to do next: the start, then what is missing around the best. Empty: the best is at no edge."""
    best = best_of(runs, start)
    if best is None:
        return [start]
    return [run for run in neighbours(best, outer) if run not in runs]


def start_of(row: str, size: str, runs: Lines, **others: Any) -> Run:
    """The best of the next smaller size that has runs of the row, else the row's own start."""
    start = ROWS[row].start(size, **others)
    names = list(SIZES)
    for smaller in reversed(names[: names.index(size)]):
        if best := best_of(runs, start._replace(size=smaller)):
            return best._replace(size=size)
    return start
