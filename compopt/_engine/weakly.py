"""Bound methods for objects that their owner holds: without a reference back, which would be a
cycle.

An optimizer in a cycle stays, with its model, until Python's collector runs, at another time on
every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, which does not keep its object.

    Called when that is gone it raises ReferenceError.
    """
    ref, name = weakref.WeakMethod(method), method.__name__

    def call(*args: Any) -> Any:
        alive = ref()
        if alive is None:
            raise ReferenceError(
                f"{name}() belongs to an optimizer that was deleted: ask while it lives."
            )
        return alive(*args)

    return call
