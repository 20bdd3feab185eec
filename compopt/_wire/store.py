"""Texts that ranks leave each other in the store of their process group, beside its collectives.

A collective that only some ranks start hangs, and leaves the ranks of gloo out of step for good. So
ranks that may be alone meet in the store first: a rank that gives up there has started nothing.
"""

from __future__ import annotations

import time
from typing import Protocol

OURS = "compopt/"  # keys of a store that others use too


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class RanksMissing(Exception):
    """Not all ranks came to a meeting; the message says which did not."""


class GroupStore:
    """The keys that the ranks of one group share.

    Raises RuntimeError, as the store does, where that does not answer.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def post_note(self, text: str) -> None:
        """Leave a note for the other ranks, in place of this rank's last one."""
        self._store.set(f"{OURS}note/{self.rank}", text)

    def read_notes(self) -> dict[int, str]:
        """Read the last note of every other rank that has left one."""
        keys = {r: f"{OURS}note/{r}" for r in range(self.size) if r != self.rank}
        return {r: self._get(key) for r, key in keys.items() if self._store.check([key])}

    def meet(self, text: str, patience: float) -> list[str]:
        """Wait until all ranks have called this, and return the texts of all.

        Raises RanksMissing, on all ranks that wait, where one of them gives up after ``patience``
        seconds or is interrupted.
        """
        ended = f"{OURS}meetings"  # how many have: the number of the running one
        number = int(self._get(ended)) if self._store.check([ended]) else 0
        place = f"{OURS}meeting/{number}/"

        def end(failure: str) -> None:
            """Let the meeting end in this way, unless a rank was faster: it ends once."""
            if self._store.add(f"{place}ends", 1) == 1:
                self._store.add(ended, 1)  # first: who has seen the outcome comes to the next one
                self._store.set(f"{place}outcome", failure)

        self._store.set(f"{place}{self.rank}", text)
        if self._store.add(f"{place}arrived", 1) == self.size:
            end("")
        until = time.monotonic() + patience
        try:
            while not self._store.check([f"{place}outcome"]):
                if time.monotonic() > until:
                    there = [self._store.check([f"{place}{r}"]) for r in range(self.size)]
                    absent = ", ".join(
                        f"rank {r}" for r, is_here in enumerate(there) if not is_here
                    )
                    end(f"{absent} did not come within {patience:g} s")
                time.sleep(0.01)
        except BaseException:
            end(f"rank {self.rank} was interrupted")
            raise
        if failure := self._get(f"{place}outcome"):
            raise RanksMissing(failure)
        texts = [self._get(f"{place}{r}") for r in range(self.size)]
        self._forget(number - 1)
        return texts

    def _forget(self, number: int) -> None:
        """Delete the keys of a meeting that every rank has left."""
        if self.rank == 0:
            for key in ("ends", "arrived", "outcome", *map(str, range(self.size))):
                self._store.delete_key(f"{OURS}meeting/{number}/{key}")

    def _get(self, key: str) -> str:
        return self._store.get(key).decode()
