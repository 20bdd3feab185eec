"""What ranks tell each other beside the collectives: notes in the store of their group.

A collective that only some ranks start is never answered, and leaves the ranks of gloo out of step
for good. So where a rank may be alone, all first write in the store that they have come, and a rank
that gives up has started nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

OURS = "compopt/"  # keys of a store that others use too


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Visit(NamedTuple):
    """One rank's coming to the board."""

    number: int  # how often this rank has come
    objections: int  # of any rank, until then


class Board:
    """The notes of one group. All ranks come to it equally often.

    Raises RuntimeError, as the store does, when that does not answer.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def come(self, text: str) -> Visit:
        """This rank is here, and says ``text``."""
        visit = Visit(self._count(f"came/{self.rank}") + 1, self._count("objections"))
        # two places in turns: nobody comes twice before all have read what was said
        self._set(self._place(visit.number, self.rank), text)
        self._add(f"came/{self.rank}", 1)
        self._add("came", 1)
        return visit

    def all_here(self, visit: Visit) -> bool:
        """Whether all ranks have come as often as this one."""
        return self._count("came") >= visit.number * self.size

    def leave(self, visit: Visit) -> bool:
        """Take the visit back. False where all have come meanwhile: then it stands."""
        if self._add("came", -1) + 1 >= visit.number * self.size:
            self._add("came", 1)
            return False
        self._add(f"came/{self.rank}", -1)
        return True

    def absent(self, visit: Visit) -> list[int]:
        """The ranks that have not come."""
        return [r for r in range(self.size) if self._count(f"came/{r}") < visit.number]

    def said(self, visit: Visit) -> list[str]:
        """What every rank says, when all are here."""
        ranks = range(self.size)
        return [self._get(self._place(visit.number, r)) for r in ranks]

    def waiting(self) -> dict[int, str]:
        """The ranks that have come where this one has not, and what they say."""
        mine = self._count(f"came/{self.rank}")
        counts = {r: self._count(f"came/{r}") for r in range(self.size)}
        return {r: self._get(self._place(count, r)) for r, count in counts.items() if count > mine}

    def object(self, text: str, reason: str = "") -> None:
        """Tell all that wait here why they need not go on waiting.

        ``reason``: the same for those who do not wait here.
        """
        self._set("reason", reason)
        self._set("objection", text)
        self._add("objections", 1)

    def objection(self, visit: Visit) -> str:
        """The last one since this rank came; nothing where there is none."""
        if self._count("objections") == visit.objections:
            return ""
        return self._get("objection")

    def last_reason(self) -> str:
        """What was said with the last objection of all."""
        return self._get("reason") if self._count("objections") else ""

    def note(self, kind: str, text: str) -> None:
        """Leave a note of this kind, in place of this rank's last."""
        self._set(f"{kind}/{self.rank}", text)

    def notes(self, kind: str) -> dict[int, str]:
        """Every rank's last of this kind."""
        keys = {rank: f"{kind}/{rank}" for rank in range(self.size)}
        return {r: self._get(key) for r, key in keys.items() if self._store.check([OURS + key])}

    def _count(self, key: str) -> int:
        return int(self._get(key)) if self._store.check([OURS + key]) else 0

    def _add(self, key: str, amount: int) -> int:
        return self._store.add(OURS + key, amount)

    def _get(self, key: str) -> str:
        return self._store.get(OURS + key).decode()

    def _set(self, key: str, text: str) -> None:
        self._store.set(OURS + key, text)

    @staticmethod
    def _place(number: int, rank: int) -> str:
        return f"said/{number % 2}/{rank}"
