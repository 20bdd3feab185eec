"""Tables of the older runs: of runs that can be compared, and of those that are kept; and the writer of all tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import quality
from _table import print_rows, read_rows, write_rows

DENSE, OURS = "AdamW (DDP)", "SeparateAdam tracked 16, int8"


def kept(name: str, loss: float, **others) -> dict:
    """A line of results/quality.jsonl."""
    evals = [{"step": 800 * k // 8, "bytes": 1e6 * k, "train_loss": loss, "val_loss": loss} for k in range(1, 9)]
    line = {"run": name, "lr": 2e-3, "steps": 800, "ranks": 2, "seed": 0, "parameters": 1000, **others}
    return line | {"bytes_per_step": {"dense": 4000, "compressed": 2000}, "phases": {}, "evals": evals}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> dict:
    """One of each method to compare, seeds, and runs that are wider, or in bfloat16, and end lower."""
    lines = [kept(DENSE, 2.0), kept(OURS, 2.2), kept(OURS, 2.1, lr=4e-3), kept(OURS, 1.0, lr=2e-3, seed=1)]
    lines += [kept(DENSE, 3.0, seed=1), kept(OURS, 3.3, lr=4e-3, seed=1)]
    lines += [kept(name, 1.0, **other) for name in (DENSE, OURS) for other in ({"bf16": True}, {"width": 512})]
    path = tmp_path / "quality.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(quality, "KEPT", path)
    return quality.kept()


def test_runs_are_compared_with_those_that_differ_in_method_rate_and_seed_only(runs):
    assert len(runs) == 10
    rows = {(row["run"], row["width"], row["bf16"]): row for row in quality.tabulate(runs)}
    assert len(rows) == 6
    dense, ours = rows[DENSE, 128, False], rows[OURS, 128, False]
    assert (dense["loss"], dense["to_adamw"], dense["seeds"]) == (2.5, 1.0, 2)
    assert (ours["lr"], ours["loss"], ours["low"], ours["high"]) == (4e-3, pytest.approx(2.7), 2.1, 3.3)
    assert ours["to_adamw"] == pytest.approx(2.7 / 2.5) and ours["by_seed"] == "1.050 1.100"
    assert ours["at_rates"] == "0.002:2.2 0.004:2.1" and ours["to_adamw_same_lr"] is None
    assert ours["step_share"] == 0.5 and ours["run_share"] == pytest.approx(8e6 / (4 * 1000 * 800))


def test_the_runs_that_are_kept_make_every_table():
    """An empty one was noticed late: runs had got another field."""
    runs = quality.kept()
    rows, kinds = quality.tabulate(runs), {}
    for row in rows:
        kinds.setdefault((row["width"], row["bf16"], row["ranks"], row["steps"]), set()).add(row["run"])
    assert len(kinds[128, False, 2, 800]) > 40 and len(kinds[128, False, 2, 8000]) > 10
    assert len(kinds[128, False, 4, 2000]) > 10 and len(kinds[512, True, 2, 1500]) > 10
    assert all(row["run"] in {*quality.METHODS, *quality.REMOVED} for row in rows)
    assert len(quality.seconds_rows(runs)) > 10


def test_rows_of_other_names_stay_in_a_file(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    write_rows(path, [{"name": "a", "x": 1.2345}, {"name": "b", "x": None}], digits={"x": 2})
    write_rows(path, [{"name": "b", "x": 3.0}, {"name": "c", "x": 4.0}], keep=["name"])
    assert read_rows(path) == [{"name": "a", "x": "1.23"}, {"name": "b", "x": "3.0"}, {"name": "c", "x": "4.0"}]
    assert read_rows(tmp_path / "none.csv") == []
    print_rows([{"name": "a", "x": 1.25}, {"name": "b", "x": ""}], {"x": ("bytes", "8.1%")}, "name", 10)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "bytes"],
        ["a", "125.0%"],
        ["b", "-"],
    ]
