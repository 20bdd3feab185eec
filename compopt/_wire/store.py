"""Rendezvous and notes in the store of a process group, beside its collectives.

A collective that only some ranks start hangs, and desynchronizes a gloo group permanently. Where
other ranks may be missing, ranks therefore meet in the store first. A rank that gives up there has
not started a collective.
"""

from __future__ import annotations

import time
from typing import Protocol

PREFIX = "compopt/"  # of all keys, since the store is shared


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class RanksMissing(Exception):
    """Some ranks did not come to a meeting; the message names them."""


class GroupStore:
    """The keys that the ranks of one group share.

    Raises RuntimeError, as the store does, if the store does not answer.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def post_note(self, text: str) -> None:
        """Write this rank's note for the other ranks, in place of the last one."""
        self._store.set(f"{PREFIX}note/{self.rank}", text)

    def read_notes(self) -> dict[int, str]:
        """Read the last note of every other rank that has written one."""
        keys = {r: f"{PREFIX}note/{r}" for r in range(self.size) if r != self.rank}
        return {r: self._get(key) for r, key in keys.items() if self._store.check([key])}

    def meet(self, text: str, patience: float) -> list[str]:
        """Wait until all ranks have called this, and return the texts of all.

        Raises RanksMissing on all waiting ranks if one of them gives up after ``patience`` seconds
        or is interrupted.
        """
        ended = f"{PREFIX}meetings"  # the number of ended meetings, and of the running one
        number = int(self._get(ended)) if self._store.check([ended]) else 0
        place = f"{PREFIX}meeting/{number}/"

        def end(failure: str) -> None:
            """End the meeting with this outcome, unless another rank has ended it."""
            if self._store.add(f"{place}ends", 1) == 1:
                # before the outcome: a rank that has seen it may start the next meeting
                self._store.add(ended, 1)
                self._store.set(f"{place}outcome", failure)

        self._store.set(f"{place}{self.rank}", text)
        if self._store.add(f"{place}arrived", 1) == self.size:
            end("")
        until = time.monotonic() + patience
        try:
            while not self._store.check([f"{place}outcome"]):
                if time.monotonic() > until:
                    absent = [
                        f"rank {r}"
                        for r in range(self.size)
                        if not self._store.check([f"{place}{r}"])
                    ]
                    end(f"{', '.join(absent)} did not come within {patience:g} s")
                time.sleep(0.01)
        except BaseException:
            end(f"rank {self.rank} was interrupted")
            raise
        if failure := self._get(f"{place}outcome"):
            raise RanksMissing(failure)
        texts = [self._get(f"{place}{r}") for r in range(self.size)]
        if self.rank == 0:  # every rank has left the previous meeting
            for key in ("ends", "arrived", "outcome", *map(str, range(self.size))):
                self._store.delete_key(f"{PREFIX}meeting/{number - 1}/{key}")
        return texts

    def _get(self, key: str) -> str:
        return self._store.get(key).decode()
