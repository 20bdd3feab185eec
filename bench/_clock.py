"""Seconds of a training run over links of a given rate, composed: measured step times x the steps of each phase.

Step times of the older runs are in results/time_to_loss.jsonl; _ladder_seconds.py times and composes the ladder's.
"""

from __future__ import annotations

import json
from pathlib import Path

KEPT = Path(__file__).parent / "results" / "time_to_loss.jsonl"
RATE = "100mbit"  # where nothing else is said


def timings(rate: str, ranks: int = 2) -> dict[str, dict[str, float]]:
    """Of each method timed at this rate: the phases of its steps and the seconds of one step in each."""
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {line["run"]: line["seconds"] for line in lines if (line["rate"], line["ranks"]) == (rate, ranks)}


def per_step(phases: dict[str, int], seconds: dict[str, float]) -> tuple[float, float]:
    """Seconds of a dense step, and of one after the dense start: the mean over the phases there, by their counts.

    NaN where the run has no such step.
    """
    rest = {phase: count for phase, count in phases.items() if phase != "dense"}
    dense = seconds["dense"] if phases.get("dense") else float("nan")
    return dense, sum(n * seconds[phase] for phase, n in rest.items()) / sum(rest.values()) if rest else float("nan")


def seconds_at(step: int, phases: dict[str, int], seconds: dict[str, float]) -> float:
    """Seconds that a run has taken after `step` steps; its dense steps are its first ones."""
    start = min(step, phases.get("dense", 0))
    dense, after = per_step(phases, seconds)
    return (start * dense if start else 0.0) + ((step - start) * after if step > start else 0.0)


def put_on(rows: list[dict], rate: str) -> None:
    """Add "seconds" to every evaluation of the runs whose phases have all been timed at this rate."""
    timed = timings(rate)
    for row in rows:
        seconds = timed.get(row["run"], {})
        if set(row["phases"]) <= set(seconds):
            row["dense_s"], row["compressed_s"] = per_step(row["phases"], seconds)
            for point in row["evals"]:
                point["seconds"] = seconds_at(point["step"], row["phases"], seconds)


def reached(level: float, evals: list[dict], key: str) -> float | None:
    """Where (in seconds, bytes or steps) the validation loss first is at `level`, between evaluations in a line.

    None if it never is; the first evaluation's place if it is there already.
    """
    for before, now in zip([None, *evals], evals, strict=False):
        if now["val_loss"] <= level:
            if before is None:
                return now[key]
            share = (before["val_loss"] - level) / (before["val_loss"] - now["val_loss"])
            return before[key] + share * (now[key] - before[key])
    return None
