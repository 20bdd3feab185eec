"""The parts of a snapshot's state, and the snapshots that a run may resume from.

A state is ``{"model": ..., "optimizer": ..., "stateful": ...}``. Ranks have most of it in common.
The rest is a rank's own part: its residual and, in ``LocalSteps``, the moments of the inner
optimizer, and what the rank has moved in the running round, with its weight there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._engine.optimizer import CompressedOptimizer
from .._state.tensors import distribute_like
from ._snapshot_files import Damaged, Snapshot, is_list_of, memory_of

State = dict[str, Any]
Path_ = tuple[Any, ...]  # the keys of a value in nested dicts
Parts = dict[Path_, Tensor]


# Which snapshots are loaded


class Choice(NamedTuple):
    """The snapshots of one ``save()``, of replicas that are there with all their shards.

    ``passed_over``: the steps of later ones, of which not every replica is there.
    """

    snapshots: list[Snapshot]
    passed_over: list[int]

    def __str__(self) -> str:
        return f"the snapshots of step {self.snapshots[0].step}"

    @property
    def shards(self) -> int:
        """The number of ranks that wrote one replica."""
        return self.snapshots[0].shards

    @property
    def missing_replicas(self) -> list[int]:
        return sorted({*range(self.snapshots[0].replicas)} - {s.replica for s in self.snapshots})


def choose_snapshots(visible: Iterable[Snapshot]) -> Choice | None:
    """Return the newest snapshots of which every replica is there, else the newest; None if there
    are none.
    """
    saves: dict[tuple[Any, ...], set[Snapshot]] = {}
    for s in visible:
        # not by step: where rounds end by time, ranks differ in theirs
        saves.setdefault((s.stamp, s.run, s.replicas, s.shards), set()).add(s)
    known = []
    for (stamp, run, replicas, shards), members in saves.items():
        counts = [s.replica for s in members]
        whole = sorted(s for s in members if counts.count(s.replica) == shards)
        if whole:
            is_whole = len(whole) == replicas * shards
            known.append(((is_whole, stamp, run), whole))
    if not known:
        return None
    (_, stamp, _), chosen = max(known)
    passed_over = [whole[0].step for (_, other, _), whole in known if other > stamp]
    return Choice(chosen, sorted(passed_over))


def assign_snapshots(
    chosen: Sequence[Snapshot], visible: Sequence[Iterable[Snapshot]]
) -> list[list[Snapshot]]:
    """Return which of the chosen snapshots each rank loads, of those that it sees.

    Each is loaded once, by the rank that has the fewest; among equals by the rank of its number.
    """
    seen = [{*snapshots} for snapshots in visible]
    assignment: list[list[Snapshot]] = [[] for _ in seen]
    for snapshot in sorted(chosen):
        visible_to = [rank for rank, snapshots in enumerate(seen) if snapshot in snapshots]
        rank = min(visible_to, key=lambda r: (len(assignment[r]), r != snapshot.replica, r))
        assignment[rank].append(snapshot)
    return assignment


# The parts of a state


def check_structure(state: Any) -> None:
    """Raise Damaged if a state is not built as that of a snapshot, of whatever model."""
    model, optimizer, stateful = (_get_dict(state, n) for n in ("model", "optimizer", "stateful"))
    entries = _get_dict(optimizer, "state")
    groups: Any = optimizer.get("param_groups")
    if not is_list_of(dict, groups) or not all(is_list_of(str, g.get("params")) for g in groups):
        raise Damaged("its param_groups are not groups of names")
    if not all(is_list_of(str, [*names]) for names in (model, entries, stateful)):
        raise Damaged("not everything in it has a name")
    if not is_list_of(dict, [*entries.values()]):
        raise Damaged("not every parameter's state in it is a dict")
    try:
        for _, outer in iterate_anchored(state):
            float(outer["weight"])
    except Exception as error:
        raise Damaged(f"its round cannot be read ({type(error).__name__}: {error})") from error


def _get_dict(parent: Any, name: str) -> State:
    value = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(value, dict):
        raise Damaged(f"its {name} is of type {type(value).__name__}, not a dict")
    return value


class RankParts:
    """The parts of a state that differ between ranks. Only their mean counts."""

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
        for path, value in iterate_leaves(state):
            if self.is_rank_part(path, value):
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


def iterate_anchored(state: State) -> Iterator[tuple[str, State]]:
    """Yield the name of every parameter that has an anchor, and its entry of the round."""
    for name, entry in state["optimizer"]["state"].items():
        outer = entry.get("outer") or {}
        if int(outer.get("fragment", -1)) >= 0:
            yield name, outer


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
            checksum.update(memory_of(value))
    return checksum.hexdigest()


# Loading


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
