"""tests/check_same_bits.py, so that it does not rot: this tree against itself, and against a change."""

from __future__ import annotations

import bits_cases as all_cases
import bits_run
import check_same_bits as check
import pytest

RADIUS, SCAPE = all_cases.FORMS[0], all_cases.FORMS[2]
CASES = [
    all_cases.Case(RADIUS, "torch", "float32", 2, all_cases.TINY, steps=10),
    all_cases.Case(SCAPE, "torch", "payload int8", 3, all_cases.TINY, steps=10),
    all_cases.Case(SCAPE, "torch", "payload int4", 3, all_cases.TINY, steps=10),
]


@pytest.mark.filterwarnings("ignore:gradients were changed")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form.name}, {case.precision}")
def test_two_runs_are_equal_and_a_change_is_told_with_its_step(case, monkeypatch):
    before, again = bits_run.run(case), bits_run.run(case)
    assert check.differences(before, again, set()) == []
    assert {"parameters", "messages", "bytes", "phase", "norm", "residual"} <= before.keys()
    assert check.compare_answers({"found": before}, {"raised": "KeyError: 1"}, set()).startswith("now it")

    gradient = bits_run.gradient
    change = lambda name, shape, n, rank, t: gradient(name, shape, n, rank, t) * (2 if t == 7 else 1)  # noqa: E731
    monkeypatch.setattr(bits_run, "gradient", change)
    report = check.differences(before, bits_run.run(case), {"messages"})
    assert "parameters from step 8" in report and not any("messages" in words for words in report)


def test_names_of_cases_tell_them_apart():
    names = [case.name for case in all_cases.cases()]
    assert len(set(names)) == len(names) > 300
