"""The ranks that save and resume together, and what they tell each other, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import device

from .._engine.collective_generators import CollectiveGenerator
from .._engine.handshake import gather_json
from .._wire.collectives import Communicator
from ._snapshot_files import Snapshot


@dataclass
class Meeting:
    """The ranks that save together, since they met.

    ``comm``: the optimizer's ranks. ``world``: those of all shards. ``ranks``: the number of each
    rank of ``world`` in its ``comm``. ``lineage``: this run, and those that it went on from.
    ``resumed``: the stamp from which it went on. ``known``: the runs whose snapshots this rank saw
    when ranks met. ``written``: the stamps of this rank's snapshots since then, which it keeps.
    """

    comm: Communicator
    world: Communicator
    device: device
    ranks: list[int]
    lineage: list[str]
    resumed: int
    known: set[str] = field(default_factory=set)
    written: list[int] = field(default_factory=list)

    @property
    def members(self) -> list[list[int]]:
        """The ranks of ``world`` that hold each replica, one for each shard."""
        members: dict[int, list[int]] = {}
        for rank, number in enumerate(self.ranks):
            members.setdefault(number, []).append(rank)
        return [members[number] for number in sorted(members)]

    @property
    def place(self) -> tuple[int, int]:
        """The shard of this rank, and the number of shards of a replica."""
        replica = next(ranks for ranks in self.members if self.world.rank in ranks)
        return replica.index(self.world.rank), len(replica)

    @property
    def peers(self) -> list[int]:
        """The ranks of ``world`` that hold the same shard, by their numbers in ``comm``."""
        return [ranks[self.place[0]] for ranks in self.members]

    def name_snapshot(self, step: int, stamp: int) -> Snapshot:
        return Snapshot(step, stamp, self.lineage[0], self.comm.rank, self.comm.size, *self.place)

    def gather(self, value: object) -> CollectiveGenerator[list[Any]]:
        """Return the value of every rank of ``world``."""
        return (yield from gather(value, self.world, self.device))

    def raise_problems(self, problem: str, what: str) -> CollectiveGenerator[None]:
        """Raise RuntimeError on all ranks if any has a problem."""
        raise_told((yield from self.gather(problem)), what)


def gather(value: object, comm: Communicator, on: device) -> CollectiveGenerator[list[Any]]:
    """Return the value of every rank of ``comm``."""
    if comm.size == 1:
        return [json.loads(json.dumps(value))]
    return (yield from gather_json(value, on, comm))


def raise_told(problems: Iterable[str], what: str) -> None:
    """Raise RuntimeError if any rank has told a problem; all ranks call it with the same ones."""
    told = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if told:
        raise RuntimeError(f"{what}, and nothing was loaded. {'; '.join(told)}.")


def describe(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
