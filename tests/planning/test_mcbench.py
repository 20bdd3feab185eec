"""Results of compressed activations in bench/results, and the page about them."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def accuracy() -> dict[str, list[float]]:
    """On digits, by compressor, a number a seed."""
    results: dict[str, list[float]] = {}
    with (ROOT / "bench" / "results" / "mcbench-quality.csv").open() as file:
        for row in csv.DictReader(file):
            if row["task"] == "digits":
                results.setdefault(row["compressor"], []).append(float(row["accuracy"]))
    return results


def test_two_bits_keep_the_digits_over_three_seeds(accuracy):
    assert len(accuracy["Q1"]) == 3 and min(accuracy["Q1"]) >= 92


def test_the_page_shows_table_5():
    results: dict[str, dict[str, list[float]]] = {}
    with (ROOT / "bench" / "results" / "mcbench-pretraining.csv").open() as file:
        for row in csv.DictReader(file):
            results.setdefault(row["compressor"], {}).setdefault(row["task"], []).append(float(row["accuracy"]))
    page = (ROOT / "docs" / "activations.md").read_text()
    assert {"w/o", "A2", "T2", "Q2"} <= set(results)
    for name, tasks in results.items():
        quoted = "".join(f" {statistics.mean(v):.1f} ({min(v):.1f} to {max(v):.1f}) |" for v in tasks.values())
        assert f"| {name} |{quoted}" in page
        assert all(len(values) == 3 for values in tasks.values())


def test_the_page_shows_table_7():
    with (ROOT / "bench" / "results" / "mcbench-boundaries.csv").open() as file:
        rows = {(row["compressor"], row["boundary"]): row for row in csv.DictReader(file)}
    page = (ROOT / "docs" / "activations.md").read_text()
    for name in ("w/o", "A2", "T2", "P2", "Q1", "Q2"):
        last = rows[name, "2-3"]
        nbytes = f"{float(last['MB_forth']):.2f} + {float(last['MB_back']):.2f}"
        assert f"| {name} | {float(last['ms']):.0f} | {nbytes} |" in page
    share = float(rows["A2", "1-2"]["ms"]) / float(rows["w/o", "1-2"]["ms"])
    assert 0.08 < share < 0.12  # a tenth of the bytes


def test_the_page_quotes_what_was_measured(accuracy):
    page = (ROOT / "docs" / "activations.md").read_text()
    for name, values in accuracy.items():
        assert f"| {name} | {statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f}) |" in page
        assert len(values) == 3, name
