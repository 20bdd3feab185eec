"""tests/check_same_bits.py, so that it does not rot: this tree against itself, and against a change."""

from __future__ import annotations

import check_same_bits as check
import pytest

RADIUS, SCAPE = check.FORMS[0], check.FORMS[2]
CASES = [
    check.Case(RADIUS, "torch", "float32", 2, check.TINY, steps=10),
    check.Case(SCAPE, "torch", "payload int8", 3, check.TINY, steps=10),
]


@pytest.mark.filterwarnings("ignore:gradients were changed")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.form.name)
def test_two_runs_are_equal_and_a_change_is_told_with_its_step(case, monkeypatch):
    before, again = check.run(case), check.run(case)
    assert check.differences(before, again, set()) == []
    assert {"parameters", "messages", "bytes", "phase", "norm", "residual"} <= before.keys()
    assert check.verdict({"found": before}, {"raised": "KeyError: 1"}, set()).startswith("now it")

    gradient = check.gradient
    change = lambda name, shape, n, rank, t: gradient(name, shape, n, rank, t) * (2 if t == 7 else 1)  # noqa: E731
    monkeypatch.setattr(check, "gradient", change)
    told = check.differences(before, check.run(case), {"messages"})
    assert "parameters from step 8" in told and not any("messages" in words for words in told)


def test_names_of_cases_tell_them_apart():
    names = [case.name for case in check.cases()]
    assert len(set(names)) == len(names) > 300
