"""The store of a process group, for messages beside its collectives, with a limit to every call.

torch's TCPStore waits for an answer for as long as the link to its host is cut, whatever timeout it
is given, and holds a lock meanwhile, at which every other call waits. So each call runs in a thread
of its own: one that does not end in time is left to that thread, and until it has ended all others
raise at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...


class BoundedStore:
    """A store whose calls return, or raise RuntimeError, within ``limit`` seconds."""

    def __init__(self, store: Store, limit: float):
        self._store, self.limit = store, limit
        self._running: threading.Thread | None = None  # of the last call
        self._ends = 0.0  # when that call was given up, or will be

    def run(self, function: Callable[[Store], Result], limit: float | None = None) -> Result:
        """Return what ``function`` returns for the store, or raise what it raises."""
        if self._running is not None:
            self._running.join(max(0.0, self._ends - time.monotonic()))
            if self._running.is_alive():
                raise RuntimeError("an earlier call of the store has not been answered yet")
        limit = self.limit if limit is None else limit
        results: list[Result] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(function(self._store))
            except BaseException as error:
                errors.append(error)

        # a daemon: the process may end before the store answers
        self._running = threading.Thread(target=call, name="compopt store", daemon=True)
        self._ends = time.monotonic() + limit
        self._running.start()
        self._running.join(limit)
        if errors:
            raise errors.pop()
        if not results:
            raise RuntimeError(f"the store did not answer within {limit:g} s")
        return results[0]

    def add(self, key: str, amount: int, /) -> int:
        return self.run(lambda store: store.add(key, amount))

    def set(self, key: str, value: str, /) -> None:
        self.run(lambda store: store.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self.run(lambda store: store.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self.run(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self.run(lambda store: store.wait(keys, timeout), timeout.total_seconds() + self.limit)

    def delete_key(self, key: str, /) -> bool:
        return self.run(lambda store: store.delete_key(key))
