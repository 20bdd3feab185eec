"""Rows of a test that `make slow` runs, and which rows of a file were selected: for what is made once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(is_fast: Callable[..., bool], rows: Iterable[Any]) -> list[Any]:
    """Return the rows for ``parametrize``: those that are not ``is_fast`` run in `make slow` alone."""
    listed = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=() if is_fast(*row) else pytest.mark.slow) for row in listed]


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values that this parameter has in the tests of the file that run, each once."""
    items = (item for item in request.session.items if item.path == request.path)
    rows = (item.callspec.params for item in items if hasattr(item, "callspec"))
    return list(dict.fromkeys(row[name] for row in rows if name in row))
