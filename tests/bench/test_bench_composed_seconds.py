"""Seconds composed of measured step times: what bench/quality.py says of a slow link."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import quality

# 100 steps: 10 dense, then 9 blocks of 9 sparse steps and a resampling one.
PHASES = {"dense": 10, "resample": 9, "sparse": 81}
SECONDS = {"dense": 3.0, "resample": 5.0, "sparse": 1.0}


def test_seconds_are_those_of_the_dense_start_and_of_the_mean_step_after_it():
    at = [quality.seconds_at(step, PHASES, SECONDS) for step in (0, 4, 10, 20, 100)]
    assert at == pytest.approx([0, 12, 30, 30 + 5 + 9, 10 * 3 + 9 * 5 + 81 * 1])


def test_a_run_of_one_kind_of_steps_needs_no_time_of_the_other():
    assert quality.seconds_at(7, {"dense": 100}, {"dense": 3.0}) == 21
    assert quality.seconds_at(7, {"sparse": 100}, {"sparse": 0.5}) == 3.5
    dense, after = quality.per_step({"dense": 100}, {"dense": 3.0})
    assert dense == 3 and math.isnan(after)


def test_a_run_with_a_phase_that_was_not_timed_gets_no_seconds(tmp_path, monkeypatch):
    lines = [
        {"run": "A", "rate": "100mbit", "ranks": 2, "seconds": {"dense": 9.0}},
        {"run": "A", "rate": "100mbit", "ranks": 2, "seconds": {"dense": 3.0}},  # the later one holds
        {"run": "A", "rate": "1gbit", "ranks": 2, "seconds": {"dense": 1.0, "sparse": 1.0}},
    ]
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(quality, "TIMED", kept)
    rows = [{"run": "A", "phases": phases, "evals": [{"step": 5}]} for phases in ({"dense": 5}, PHASES)]
    quality.put_on(rows, "100mbit")
    assert rows[0]["evals"] == [{"step": 5, "seconds": 15.0}]
    assert rows[1]["evals"] == [{"step": 5}]


def test_a_level_is_reached_between_two_evaluations():
    evals = [{"seconds": s, "val_loss": v} for s, v in ((10, 2.0), (20, 1.5), (30, 1.6), (40, 1.2))]
    assert quality.reached(1.6, evals, "seconds") == pytest.approx(18)
    assert quality.reached(1.4, evals, "seconds") == pytest.approx(35)
    assert quality.reached(2.5, evals, "seconds") == 10
    assert quality.reached(1.1, evals, "seconds") is None
