"""Rows of a test that only `make slow` runs; and which rows were selected, for what is made once for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def slow_but(is_fast: Callable[..., bool], rows: Iterable[Any]) -> list[Any]:
    """Return the rows for ``parametrize``: those that are not ``is_fast`` run in `make slow` alone."""
    listed = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=() if is_fast(*row) else pytest.mark.slow) for row in listed]


def in_turn(these: Iterable[Any], those: Sequence[Any]) -> list[Any]:
    """Return all pairs for ``parametrize``: each of ``these`` with one of ``those`` in turn, with others when slow."""
    numbered, others = enumerate(these), list(enumerate(those))
    return [
        pytest.param(this, that, marks=() if n % len(others) == m else pytest.mark.slow)
        for (n, this), (m, that) in itertools.product(numbered, others)
    ]


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values that this parameter has in the tests of the file that run and use this fixture, each once."""
    items = (item for item in request.session.items if item.path == request.path)
    items = (item for item in items if request.fixturename in getattr(item, "fixturenames", ()))
    rows = (item.callspec.params for item in items if hasattr(item, "callspec"))
    return list(dict.fromkeys(row[name] for row in rows if name in row))
