"""The ranks that save and resume together, and the course of a resume: all ranks choose the same
snapshots, read them into memory, combine and compare them, and load the result when all are ready.

Ranks have most of a state in common. The rest is a rank's own part: its residual and, in
``LocalSteps``, the moments of the inner optimizer, and what the rank has moved in the running
round, with its weight there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._engine.exchange import exchange_one
from .._engine.handshake import gather_json
from .._engine.optimizer import CompressedOptimizer
from .._inside.base_state import find_averaged
from .._state.leaves import read_leaves
from .._state.tensors import HOST, distribute_like, view_bytes
from .._wire.collectives import Communicator
from .._wire.requests import Broadcast
from .._wire.warning import warn, warn_on_rank_0
from . import _snapshot_files as files
from ._snapshot_files import Choice, Damaged, Manifest, Packed, Snapshot, State, iterate_anchored

Path_ = tuple[Any, ...]  # the keys of a value in nested dicts
Parts = dict[Path_, Tensor]

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


# The parts of a state


class RankParts:
    """The parts of a state that differ between ranks. Only their mean counts; of those that have
    none, such as factors and projections of an inner optimizer, those of one rank.
    """

    def __init__(self, optimizer: CompressedOptimizer):
        self._names = {*optimizer.rank_local_state, "residual", "pseudo_gradient"}
        self._has_local_moments = hasattr(optimizer, "end_round")
        self._is_weighted = bool(optimizer._engine.option_groups[0].get("weighted", False))

    def is_rank_part(self, path: Path_, value: Any) -> bool:
        """Return True if the value at ``path`` is a rank's own."""
        if path[:2] != ("optimizer", "state") or not isinstance(value, Tensor):
            return False
        is_moment = self._has_local_moments and path[3:4] == ("base",)
        return path[-1] in self._names or (
            is_moment and value.is_floating_point() and value.dim() > 0
        )

    def list_parts_without_mean(self, state: State) -> set[Path_]:
        """Return the paths of a rank's own parts that other ranks take over as they are."""
        if not self._has_local_moments:
            return set()
        shapes = {name: value.shape for name, value in state["model"].items()}
        entries = {
            name: (read_leaves(entry["base"]), shapes[name])
            for name, entry in state["optimizer"]["state"].items()
            if entry.get("base") and name in shapes
        }
        whole = entries.keys() - find_averaged(entries)
        return {
            path
            for path, value in iterate_leaves(state)
            if self.is_rank_part(path, value) and path[3] == "base" and path[2] in whole
        }

    def list_parts(self, state: State) -> Parts:
        """Return a rank's own parts, among them what its parameters have moved from their anchors.

        They are copies.
        """
        parts = {
            path: value.clone()
            for path, value in iterate_leaves(state)
            if self.is_rank_part(path, value)
        }
        for name, outer in iterate_anchored(state):
            parts["moved", name] = state["model"][name] - outer["anchor"]
        return parts

    def combine(
        self, state: State, read: list[tuple[Parts, float]], ranks: int, weights: list[float]
    ) -> None:
        """Set the own parts of ``state`` to this rank's share of those of all snapshots. The mean
        of the shares of all ``ranks`` is the mean of the parts.

        ``read``: the parts and weights of the snapshots that this rank has read. ``weights``: those
        of all snapshots.
        """
        factor, total = ranks / len(weights), sum(weights)
        without_mean = self.list_parts_without_mean(state)
        for path, value in iterate_leaves(state):
            if self.is_rank_part(path, value) and path not in without_mean:
                value.zero_()
                for parts, _ in read:
                    value.add_(parts[path], alpha=factor)
        for name, outer in iterate_anchored(state):
            moved = torch.zeros_like(outer["anchor"])
            for parts, weight in read:
                is_weighted = self._is_weighted and total
                moved += parts["moved", name] * (ranks * weight / total if is_weighted else factor)
            state["model"][name].copy_(outer["anchor"] + moved)
            outer["weight"].fill_(total / len(weights))  # the next exchange weighs what was moved


def read_weight(state: State) -> float:
    """Return the rank's weight in the running round of ``LocalSteps``; 0 where there is none."""
    return next((float(outer["weight"]) for _, outer in iterate_anchored(state)), 0.0)


def iterate_leaves(state: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield the path and the value of every leaf of nested dicts. The optimizer's list of groups is
    descended into, other lists are leaves.
    """
    items = enumerate(state) if isinstance(state, list) else state.items()
    for key, value in items:
        if isinstance(value, dict) or (isinstance(value, list) and path[-1:] == ("optimizer",)):
            yield from iterate_leaves(value, (*path, key))
        else:
            yield (*path, key), value


def hash_replica(state: State, rank_parts: RankParts) -> str:
    """Return a checksum of what all replicas have equal: parameters, or their anchors in a round,
    and the optimizer's moments. Buffers are not: each rank's forward changes its own.
    """
    anchored = {name for name, _ in iterate_anchored(state)}
    names = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
    checksum = hashlib.sha256()
    for path, value in sorted(iterate_leaves(state), key=lambda leaf: repr(leaf[0])):
        is_param = path[0] == "model" and path[1] in names - anchored
        is_moment = path[:2] == ("optimizer", "state") and not rank_parts.is_rank_part(path, value)
        if not isinstance(value, Tensor) or not (is_param or is_moment):
            continue
        if value.dim() and value.is_floating_point():  # counts may differ where rounds end by time
            checksum.update(repr((path, value.dtype, value.shape)).encode())
            checksum.update(files.memory_of(value))
    return checksum.hexdigest()


def explain_misfit(state: State, present: State) -> str:
    """Return why a state does not fit a model and optimizer whose state is ``present``; "" if it
    does, as far as can be seen.
    """
    if missing := sorted(present["stateful"].keys() - state["stateful"].keys()):
        return f"it has no state of {', '.join(missing)}"
    for name in sorted(present["model"].keys() | state["model"].keys()):
        saved, own = (str(getattr(s["model"].get(name), "shape", None)) for s in (state, present))
        if saved != own:
            return f"{name} has the shape {saved}, and {own} in the model"
    groups = [s["optimizer"]["param_groups"] for s in (state, present)]
    for what in ("class", "params"):
        saved, own = (str([group.get(what) for group in one]) for one in groups)
        if saved != own:
            return f"{what} of parameter groups is {saved}, and {own} in the optimizer"
    return _explain_misfit_of_base(state, present)


def _explain_misfit_of_base(state: State, present: State) -> str:
    """Return what is missing, or no tensor, of a wrapped optimizer's state: torch loads anything,
    and the next step would raise. Only what has a parameter's shape is compared.
    """
    for name, entry in present["optimizer"]["state"].items():
        own, saved = (e.get("base") for e in (entry, state["optimizer"]["state"].get(name, {})))
        if not own or saved is None:  # a parameter that was frozen has none
            continue
        if missing := own.keys() - (saved.keys() if isinstance(saved, dict) else ()):
            return f"the base's state of {name} lacks {', '.join(sorted(missing))}"
        shape = getattr(present["model"].get(name), "shape", None)
        for key, value in own.items():
            is_compared = isinstance(value, Tensor) and value.dim() and value.shape == shape
            if is_compared and getattr(saved[key], "shape", None) != shape:
                return f"{key} in the base's state of {name} is no tensor of {[*value.shape]}"
    return ""


def distribute_state(state: Any, present: Any) -> Any:
    """Return a state with DTensors where ``present`` has some; this rank's parts are in it."""
    if isinstance(state, dict) and isinstance(present, dict):
        return {k: distribute_state(value, present.get(k)) for k, value in state.items()}
    if isinstance(state, Tensor) and isinstance(present, Tensor):
        return distribute_like(present, state)
    return state


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
            choice = files.choose_snapshots(s for snapshots in seen for s in snapshots)
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
        assignment = files.assign_snapshots(chosen, [seen[rank] for rank in meeting.peers])
        loaded = Loaded([], assignment)
        for snapshot in assignment[meeting.comm.rank]:
            try:
                manifest = files.read_manifest(self.folder, snapshot)
                state = files.read_state(self.folder, manifest)
                files.check_structure(state)
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
        unpacked, parts = files.unpack(packed), self.rank_parts
        without_mean = parts.list_parts_without_mean(unpacked)
        own = {
            id(value)
            for path, value in iterate_leaves(unpacked)
            if parts.is_rank_part(path, value) and path not in without_mean
        }
        for tensor in packed.tensors:
            if id(tensor) not in own:
                raw = view_bytes(tensor).to(device)
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
