"""The ranks that save and resume together, and the course of a resume: all ranks choose the same
snapshots, read them into memory, combine and compare them, and load the result when all are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._engine.exchange import exchange_one
from .._engine.handshake import gather_json
from .._state.tensors import HOST
from .._wire.collectives import Communicator
from .._wire.requests import Broadcast
from .._wire.warning import warn, warn_on_rank_0
from . import _snapshot_files as files
from ._snapshot_files import Damaged, Manifest, Packed, Snapshot
from ._snapshot_parts import (
    Choice,
    RankParts,
    State,
    assign_snapshots,
    check_structure,
    choose_snapshots,
    explain_misfit,
    hash_replica,
    iterate_leaves,
    read_weight,
)

# The ranks, and what they tell each other


@dataclass
class Meeting:
    """The ranks that save together, and what they have agreed on.

    ``comm``: the optimizer's ranks. ``world``: those of all shards. ``ranks``: the number of each
    rank of ``world`` in its ``comm``. ``lineage``: this run, and those that it went on from.
    ``resumed``: the stamp from which it went on. ``known``: the runs whose snapshots this rank saw
    when ranks met. ``written``: the stamps of this rank's snapshots since then, which it keeps.
    """

    comm: Communicator
    world: Communicator
    device: torch.device
    ranks: list[int]
    lineage: list[str]
    resumed: int
    known: set[str]
    written: list[int] = field(default_factory=list)

    @property
    def members(self) -> list[list[int]]:
        """The ranks of ``world`` that hold each replica, one for each shard."""
        numbers = sorted({*self.ranks})
        return [[r for r, n in enumerate(self.ranks) if n == number] for number in numbers]

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

    def gather(self, value: object) -> list[Any]:
        """Return the value of every rank of ``world``."""
        return gather_json(value, self.device, self.world)

    def raise_problems(self, problem: str, what: str) -> None:
        """Raise RuntimeError on all ranks if any has a problem."""
        raise_told((self.gather(problem)), what)


def raise_told(problems: Iterable[str], what: str) -> None:
    """Raise RuntimeError if any rank has a problem. All ranks call this with the same list."""
    told = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if told:
        raise RuntimeError(f"{what}, and nothing was loaded. {'; '.join(told)}.")


def describe(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# Loading


class Loaded(NamedTuple):
    """The snapshots that this rank has read, and which each rank was to read."""

    read: list[tuple[Manifest, State]]
    assignment: list[list[Snapshot]]

    def are_own(self) -> bool:
        """Return True if every rank has read its own snapshot, and there are no others."""
        size = len(self.assignment)
        read = [[(s.replica, s.replicas) for s in one] for one in self.assignment]
        return read == [[(rank, size)] for rank in range(size)]


@dataclass
class Resume:
    """One call of ``Snapshots.resume()``.

    ``read_present`` returns the state of the model, the optimizer and further objects, and
    ``write`` loads one into them. ``refused``: the snapshots that this rank cannot use, and why.
    """

    folder: Path
    meeting: Meeting
    rank_parts: RankParts
    read_present: Callable[[], State]
    write: Callable[[State], None]
    refused: dict[Snapshot, str] = field(default_factory=dict)

    def run(self) -> bool | None:
        """Load the newest snapshots that can be used. Return whether each rank has its own part
        back; None if there are no snapshots.
        """
        while True:
            rows = self.meeting.gather(self._list_intact())
            seen = [[Snapshot(*fields) for fields in row] for row in rows]
            choice = choose_snapshots(s for snapshots in seen for s in snapshots)
            if choice is None:
                self._raise_if_refused()
                return None
            loaded = self._read_assigned(choice, seen)
            if loaded is None:
                continue
            state, checksum = self._combine(choice, loaded)
            if not (self._refuse_if_different(choice, checksum)):
                break
        self._warn_of_lost_parts(choice)
        self._put_in_place(choice, state)
        self.meeting.resumed = choice.snapshots[0].stamp
        return loaded.are_own()

    # Reading

    def _list_intact(self) -> list[Snapshot]:
        """Return the complete snapshots that this rank sees, whose manifests are right."""
        intact = []
        for snapshot in files.list_snapshots(self.folder):
            if files.is_complete(self.folder, snapshot) and snapshot not in self.refused:
                try:
                    files.read_manifest(self.folder, snapshot)
                    intact.append(snapshot)
                except Damaged as error:
                    self._refuse(snapshot, error)
        return intact

    def _refuse(self, snapshot: Snapshot, error: Damaged) -> None:
        self.refused[snapshot] = str(error)
        if files.is_complete(self.folder, snapshot):  # else another rank has removed it meanwhile
            path = self.folder / snapshot.name
            warn(f"the snapshot {path} is damaged, and is passed over: {error}.")

    def _raise_if_refused(self) -> None:
        """Raise on all ranks if any has complete snapshots, none of which can be used."""
        told = "; ".join(f"{self.folder / s.name}: {why}" for s, why in self.refused.items())
        self.meeting.raise_problems(
            told, f"no snapshot in {self.folder} can be loaded (move it away to begin anew)"
        )

    def _read_assigned(self, choice: Choice, seen: list[list[Snapshot]]) -> Loaded | None:
        """Read the snapshots that are assigned to this rank into memory; None if any rank could not
        read one of its own.
        """
        meeting = self.meeting
        shard, shards = meeting.place
        if choice.shards != shards:
            raise RuntimeError(
                f"{choice} in {self.folder} are of replicas of {choice.shards} ranks, and here a "
                f"replica has {shards}: nothing was loaded. Resume with as many shards."
            )
        chosen = [s for s in choice.snapshots if s.shard == shard]
        assignment = assign_snapshots(chosen, [seen[rank] for rank in meeting.peers])
        loaded = Loaded([], assignment)
        for snapshot in assignment[meeting.comm.rank]:
            try:
                manifest = files.read_manifest(self.folder, snapshot)
                state = files.read_state(self.folder, manifest)
                check_structure(state)
                loaded.read.append((manifest, state))
            except Damaged as error:
                self._refuse(snapshot, error)
        is_read = len(loaded.read) == len(assignment[meeting.comm.rank])
        return loaded if all(meeting.gather(is_read)) else None

    # Combining

    def _combine(self, choice: Choice, loaded: Loaded) -> tuple[State, str]:
        """Return what ranks have in common, with this rank's share of their own parts, and the
        checksum of what replicas have equal.

        Raises RuntimeError on all ranks if any cannot.
        """
        meeting, states = self.meeting, [state for _, state in loaded.read]
        told = [(read_weight(state), manifest.lineage) for manifest, state in loaded.read]
        rows = meeting.gather(told)
        lineage = next(lineage for row in rows for _, lineage in row)
        meeting.lineage += [run for run in lineage if run not in meeting.lineage]
        state = states[0] if states else None
        if not all(loaded.assignment):
            source = next(rank for rank, one in enumerate(loaded.assignment) if one)
            received = self._share(state, source)
            state = state or received
        assert state is not None
        checksum = problem = ""
        try:
            if not loaded.are_own():
                weights = [weight for rank in meeting.peers for weight, _ in rows[rank]]
                self._set_own_parts(state, states, weights)
            checksum = hash_replica(state, self.rank_parts)
        except Exception as error:
            problem = describe(error)
        meeting.raise_problems(problem, f"{choice} in {self.folder} cannot be loaded")
        return state, checksum

    def _set_own_parts(self, state: State, states: list[State], weights: list[float]) -> None:
        """Set the own parts of ``state`` to this rank's share of those that all ranks have read;
        ``states`` are those of this rank.
        """
        read = [(self.rank_parts.list_parts(one), read_weight(one)) for one in states]
        self.rank_parts.combine(state, read, self.meeting.comm.size, weights)
        for group in state["optimizer"]["param_groups"]:
            if "residuals" in group:
                group["residuals"] = "mean"

    def _share(self, state: State | None, source: int) -> State:
        """Send what ranks have in common from rank ``source`` to those without a snapshot."""
        comm, device = self.meeting.comm, self.meeting.device
        packed = files.pack(state) if comm.rank == source else Packed(None, [])
        size = sum(tensor.nbytes for tensor in packed.tensors)
        rows = gather_json([*packed.describe(), size], device, comm)
        if comm.rank != source:
            packed = files.make_empty(*rows[source])
        leaves = iterate_leaves(files.unpack(packed))
        own = {id(value) for path, value in leaves if self.rank_parts.is_rank_part(path, value)}
        for tensor in packed.tensors:
            if id(tensor) not in own:
                raw = tensor.view(-1).view(torch.uint8).to(device)
                raw = exchange_one(comm, Broadcast(raw, source)).to(HOST)
                tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
        shared: State = files.unpack(packed)
        return shared

    def _refuse_if_different(self, choice: Choice, checksum: str) -> bool:
        """Return whether replicas differ in what they have in common; these snapshots are then
        passed over on all ranks.
        """
        meeting = self.meeting
        rows = meeting.gather(checksum)
        hashes = [[rows[rank] for rank in ranks] for ranks in meeting.members]
        numbers = [n for n, shards in enumerate(hashes) if shards != hashes[0]]
        if not numbers:
            return False
        why = f"replica {', '.join(map(str, numbers))} had other values than replica 0"
        self.refused.update(dict.fromkeys(choice.snapshots, why))
        warn_on_rank_0(f"{choice} in {self.folder} are passed over: {why}.", meeting.world.rank)
        return True

    def _warn_of_lost_parts(self, choice: Choice) -> None:
        rank = self.meeting.world.rank
        if missing := ", ".join(map(str, choice.missing_replicas)):
            warn_on_rank_0(
                f"{choice} are not there of replica {missing} of {choice.snapshots[0].replicas}: "
                "the residuals of these ranks are lost, and what they moved in a running round of "
                "LocalSteps.",
                rank,
            )
        if steps := ", ".join(map(str, choice.passed_over)):
            warn_on_rank_0(
                f"{choice} are loaded. Those of step {steps} were saved later, but are not there "
                "of all replicas, complete and intact.",
                rank,
            )

    # Putting in place

    def _put_in_place(self, choice: Choice, state: State) -> None:
        """Load a state on all ranks, or on none."""
        meeting, problem, before = self.meeting, "", None
        what = f"{choice} in {self.folder}"
        try:
            before = files.unpack(files.pack(self.read_present()))
            problem = explain_misfit(state, before)
        except Exception as error:
            problem = describe(error)
        meeting.raise_problems(problem, f"{what} cannot be loaded")
        try:
            self.write(state)
        except Exception as error:
            problem = describe(error)
        problems = meeting.gather(problem)
        if any(problems) and before is not None:
            with suppress(Exception):  # what failed in loading may fail again
                self.write(before)
        meeting.raise_problems(problem, f"{what} cannot be loaded")
