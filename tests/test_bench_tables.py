"""Tables of the benchmarks that train: made of runs that can be compared, of those that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import frontier
import length
import quality
import quality_per_byte
import width

DENSE, OURS = "AdamW (DDP)", "SeparateAdam tracked 16, int8"


def kept(name: str, loss: float, **others) -> dict:
    """A line of results/quality.jsonl."""
    evals = [{"step": 800 * k // 8, "bytes": 1e6 * k, "train_loss": loss, "val_loss": loss} for k in range(1, 9)]
    line = {"run": name, "lr": 2e-3, "steps": 800, "ranks": 2, "seed": 0, "parameters": 1000, **others}
    return line | {"bytes_per_step": {"dense": 4000, "compressed": 2000}, "phases": {}, "evals": evals}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """One of each method to compare; and runs of the same length that are wider, or in bfloat16, and end lower."""
    lines = [kept(DENSE, 2.0), kept(OURS, 2.2)]
    lines += [kept(name, 1.0, **other) for name in (DENSE, OURS) for other in ({"bf16": True}, {"width": 512})]
    path = tmp_path / "quality.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(quality, "KEPT", path)


def test_runs_are_known_by_all_that_they_differ_in(runs):
    assert len(quality.kept()) == 6 and len(quality.in_float32()) == len(quality.in_float32(512)) == 2


@pytest.mark.parametrize(
    "table",
    [
        lambda: length.rows(2, 128),
        lambda: quality_per_byte.rows(2, 800),
        lambda: frontier.rows(2, 800, 128),
    ],
    ids=["length", "quality_per_byte", "frontier"],
)
def test_runs_in_bfloat16_and_wider_ones_are_not_compared_with_others(runs, table):
    results = {row["run"]: row["loss"] for row in table()}
    assert results == {DENSE: 2.0, OURS: 2.2}


def test_the_runs_that_are_kept_make_every_table():
    """An empty one was noticed late: runs had got another field."""
    assert {row["steps"] for row in length.rows(2, 128)} >= {800, 2000, 8000}
    assert len(quality_per_byte.rows(2, 800)) > 15 and len(frontier.rows(4, 2000, 128)) > 5
    assert len(width.rows(512)) >= 9
    assert all(len(quality.best_of(name)) > 2 for name in quality.TABLES)
