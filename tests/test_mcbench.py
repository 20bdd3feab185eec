"""What bench/results says of compressed activations, and the page about them."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def accuracy() -> dict[str, list[float]]:
    """On digits, by compressor, a number a seed."""
    found: dict[str, list[float]] = {}
    with (ROOT / "bench" / "results" / "mcbench-quality.csv").open() as file:
        for row in csv.DictReader(file):
            if row["task"] == "digits":
                found.setdefault(row["compressor"], []).append(float(row["accuracy"]))
    return found


def test_two_bits_keep_the_digits_over_three_seeds(accuracy):
    assert len(accuracy["Q1"]) == 3 and min(accuracy["Q1"]) >= 92


def test_the_page_quotes_what_was_measured(accuracy):
    page = (ROOT / "docs" / "activations.md").read_text()
    for name, values in accuracy.items():
        assert f"| {name} | {statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f}) |" in page
        assert len(values) == 3, name
