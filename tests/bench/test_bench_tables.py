"""The writer and printer of all tables, and when a loss is reached."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from _ladder_seconds import seconds_to
from _table import print_rows, read_rows, show_kept, write_rows


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


def test_a_kept_table_is_shown_as_it_is(capsys):
    show_kept("quality", "run", "steps", "loss")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "steps", "loss"] and lines[1].split() == ["AdamW", "(DDP)", "200", "2.3308"]
    assert len(lines) == 144


def test_a_loss_is_reached_between_two_evaluations():
    evals = [{"seconds": s, "val_loss": v} for s, v in ((10, 2.0), (20, 1.5), (30, 1.6), (40, 1.2))]
    assert seconds_to(1.6, evals) == pytest.approx(18)
    assert seconds_to(1.4, evals) == pytest.approx(35)
    assert seconds_to(2.5, evals) == 10
    assert seconds_to(1.1, evals) is None
