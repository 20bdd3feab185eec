"""Snapshots of a run, from which it goes on with any number of ranks.

Every replica of the model writes a complete snapshot of its own, into a folder that other replicas
need not see: nothing crosses the network. In most runs a replica is one rank. If parameters are
sharded, the ranks that hold its shards write together.

Each snapshot holds what ranks have in common, and a rank's own part: its residual and, in
LocalSteps, the moments of the inner optimizer and what the rank has moved in the running round. If
the same ranks resume, each gets its own part back, to the bit. If others resume, they get what
ranks have in common, and own parts become their mean over the snapshots that are left.

A snapshot's name has a stamp of the ``save()`` that wrote it, the same on all ranks. Two runs that
continue from one snapshot reach the same steps; the stamp keeps ranks from mixing their snapshots.
The file ``.metadata`` is written last; a snapshot that has it is complete::

    folder/step-00000120-1759312345678901234/replica-1-of-3/.metadata
"""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._engine.collective_generators import exchange_one
from .._engine.handshake import gather_json
from .._engine.optimizer import CompressedOptimizer
from .._state.tensors import to_local
from .._wire.collectives import Communicator
from .._wire.requests import Broadcast
from .._wire.warning import warn
from ._shared import list_group_ranks

State = dict[str, Any]
Path_ = tuple[Any, ...]  # the keys of a value in nested dicts
Result = TypeVar("Result")

PATTERN = re.compile(r"step-(\d+)-(\d+)/replica-(\d+)-of-(\d+)$")


class Stateful(Protocol):
    """An object with a state to save: a scheduler, a sampler."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


class Snapshot(NamedTuple):
    """A complete snapshot: the step after which it was taken, the stamp of the ``save()`` that took
    it, greater for later ones, its replica, and how many there were.
    """

    step: int
    stamp: int
    replica: int
    replicas: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08}-{self.stamp}/replica-{self.replica}-of-{self.replicas}"


class Snapshots:
    """Snapshots of a model and its optimizer::

        snapshots = Snapshots("snapshots", model, optimizer, scheduler=scheduler)
        for step in range(snapshots.resume(), steps):
            ...
            if optimizer.stats.steps_into_round == 0:
                snapshots.save()
        snapshots.close()

    Args:
        folder: on this machine, or one that all machines see. It may be moved between runs.
        model: the model, also within DistributedDataParallel or FSDP2.
        optimizer: one of this package over its parameters.
        keep: the number of complete snapshots that are kept while the next one is written.
        stateful: further objects with ``state_dict`` and ``load_state_dict``, such as a scheduler
            and the position in the data. Their states are the same on all ranks.

    Raises:
        TypeError: ``optimizer`` is not one of this package, or ``stateful`` has a second one.
        ValueError: FSDP2 shards the parameters over the optimizer's own ranks; keep is below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: CompressedOptimizer,
        *,
        keep: int = 2,
        **stateful: Stateful,
    ):
        if keep < 1:
            raise ValueError(f"keep must be an integer >= 1, got {keep!r}.")
        others = [name for name, s in stateful.items() if isinstance(s, CompressedOptimizer)]
        if not isinstance(optimizer, CompressedOptimizer) or others:
            raise TypeError(
                "Snapshots are of one optimizer of compopt, got "
                f"{', '.join(others) or type(optimizer).__name__}{' as well' * bool(others)}: give "
                "every optimizer Snapshots in a folder of its own, or wrap several of torch in one "
                "of compopt."
            )
        if optimizer.replaces_reduce_scatter:
            raise ValueError(
                "Snapshots are of whole replicas, and FSDP2 shards parameters over the optimizer's "
                "ranks: save with torch.distributed.checkpoint."
            )
        self.folder, self._keep = Path(folder), keep
        self._model, self._optimizer, self._stateful = model, optimizer, stateful
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Path, Future[Any]] | None = None
        # stamps: of the newest snapshot before this run, and of the last save
        self._begun = self._stamp = 0

    # Saving

    def save(self) -> None:
        """Write a snapshot in the background. All ranks call this after the same step.

        It waits until the one before is written, and then for a copy of all state in host memory.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save

        comm, group = self._optimizer.comm, self._get_group()
        self._stamp += 1  # also if this rank could not write the last one: stamps are alike on all
        failure: RuntimeError | None = None
        try:
            self.wait()
        except RuntimeError as error:
            failure = error
        if self._optimizer.sharded:  # with all ranks, also if this one has to raise
            self._consolidate_state()
        if failure is not None:
            raise failure
        snapshot = Snapshot(self._optimizer._session.steps, self._stamp, comm.rank, comm.size)
        path = self.folder / snapshot.name
        with _without_warning(self._optimizer):
            state = self._read_state()
        with _raise_brief_errors(path, "written", comm):
            written: Any = async_save(state, checkpoint_id=path, process_group=group)
        self._pending = path, getattr(written, "upload_completion", written)

    def wait(self) -> None:
        """Wait until the last snapshot is written, then remove all but the last ``keep``.

        Raises RuntimeError, on this rank, if writing failed. The snapshots before it are complete,
        and the next ``save()`` writes another one.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        path, future = pending
        try:
            with _raise_brief_errors(path, "written", self._optimizer.comm):
                future.result()
        except RuntimeError:
            if not (path / ".metadata").exists():  # free its part of a disk that may be full
                shutil.rmtree(path, ignore_errors=True)
            raise
        group = self._group
        if group is None or (list_group_ranks(group) and dist.get_rank(group) == 0):
            self._remove_old()

    close = wait

    def _remove_old(self) -> None:
        """Remove old snapshots of this replica, and those of earlier runs.

        Other replicas of this run may still write theirs into the same folder.
        """
        replica = self._optimizer.comm.rank
        removable = [
            s for s in self._list_snapshots() if s.replica == replica or s.stamp <= self._begun
        ]
        complete = sorted({s.stamp for s in removable if self._is_complete(s)})
        for old in removable:
            if old.stamp < min(complete[-self._keep :], default=0):
                path = self.folder / old.name
                with suppress(OSError):  # first: what is removed in part is not complete
                    (path / ".metadata").unlink()
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):  # other replicas are in it
                    path.parent.rmdir()

    def _read_state(self) -> State:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, optimizer_state = get_state_dict(self._model, self._optimizer)
        # bytes: torch.distributed.checkpoint loads only what a dict or a list has already
        others = _to_bytes({name: thing.state_dict() for name, thing in self._stateful.items()})
        return {"model": weights, "optimizer": optimizer_state, "stateful": others}

    @torch.no_grad()
    def _consolidate_state(self) -> None:
        """Consolidate the optimizer's state, and wait for slow ranks as long as collectives do."""
        _run(self._optimizer.consolidate_as_generator())

    def _get_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that write a replica's snapshot together.

        The first call, also after the default group was made anew, agrees on a stamp, at least that
        of all snapshots that any rank sees.
        """
        if self._group is not None and not list_group_ranks(self._group):  # ranks have met anew
            try:
                self.wait()
            except RuntimeError as error:  # it may have been written over that group
                warn(str(error), 0)
            self._group = None
        if self._group is None and (dist.is_initialized() or not self._stamp):
            replica = self._optimizer.comm.rank
            rows = [(replica, max([time.time_ns(), *(s.stamp for s in self._list_snapshots())]))]
            if dist.is_initialized():
                rows *= dist.get_world_size()
                dist.all_gather_object(rows, rows[0])
                ranks_of: dict[int, list[int]] = {}
                for rank, (n, _) in enumerate(rows):
                    ranks_of.setdefault(n, []).append(rank)
                members = [*ranks_of.values()]
                self._group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
            self._begun = self._stamp = max(stamp for _, stamp in rows)
        return self._group

    # Resuming

    def find(self) -> list[Snapshot]:
        """Return the complete snapshots in the folder, by step."""
        return [snapshot for snapshot in self._list_snapshots() if self._is_complete(snapshot)]

    def _find_readable(self) -> list[Snapshot]:
        """Return the complete snapshots whose files are as they were; warn of others."""
        found = self.find()
        readable = [snapshot for snapshot in found if _has_all_bytes(self.folder / snapshot.name)]
        for damaged in sorted({*found} - {*readable}):
            warn(
                f"the snapshot {self.folder / damaged.name} is damaged, and is passed over: files "
                "in it are missing or cut short.",
                0,  # warn on this rank, whatever its number
            )
        return readable

    def _list_snapshots(self) -> list[Snapshot]:
        """Return all snapshots in the folder, also incomplete ones, by step."""
        snapshots = []
        for step in self.folder.glob("step-*"):
            with suppress(FileNotFoundError, NotADirectoryError):  # another rank removed it
                for path in step.iterdir():
                    if match := PATTERN.search(path.as_posix()):
                        snapshots.append(Snapshot(*map(int, match.groups())))
        return sorted(snapshots)

    def _is_complete(self, snapshot: Snapshot) -> bool:
        return (self.folder / snapshot.name / ".metadata").exists()

    def resume(self) -> int:
        """Load the snapshot of the last ``save()`` that any rank has, and return its step, or 0.

        All ranks must call this.
        """
        optimizer = self._optimizer
        comm, device = optimizer.comm, optimizer._session.device
        self._get_group()  # on all ranks, those without a snapshot too
        visible = _run(gather_json(self._find_readable(), device, comm))
        visible = [[Snapshot(*fields) for fields in snapshots] for snapshots in visible]
        assignment = assign_snapshots(visible)
        if not any(assignment):
            return 0
        assigned = assignment[comm.rank]
        others = {(s.replica, s.replicas) for snapshots in assignment for s in snapshots}
        is_unchanged = others == {(rank, comm.size) for rank in range(comm.size)}
        with _without_warning(optimizer):
            if is_unchanged and len(assigned) == 1:
                state = self._read(assigned[0])
            else:
                state = self._combine_parts(assignment)
            self._write_state(state)
        if not is_unchanged:
            self._consolidate_state()
        return optimizer._session.steps

    def _read(self, snapshot: Snapshot) -> State:
        from torch.distributed.checkpoint.state_dict_loader import load

        state, path, comm = self._read_state(), self.folder / snapshot.name, self._optimizer.comm
        with _raise_brief_errors(
            path, "read", comm, ": move it away, and resume from what is left"
        ):
            load(state, checkpoint_id=path, process_group=self._get_group())
        stateful = torch.load(io.BytesIO(state["stateful"]), "cpu", weights_only=False)
        return {**state, "stateful": stateful}

    def _combine_parts(self, assignment: list[list[Snapshot]]) -> State:
        """Return what ranks have in common, with this rank's share of their own parts: its mean
        over ranks is the mean over snapshots.
        """
        comm = self._optimizer.comm
        source = next(rank for rank, snapshots in enumerate(assignment) if snapshots)
        rank_parts, parts, state = RankParts(self._optimizer), [], self._read_state()
        for snapshot in assignment[comm.rank]:
            state = self._read(snapshot)  # overwrites the memory of the snapshot before
            parts.append(rank_parts.list_parts(state))
        if not all(assignment):
            self._share(state, source)
        rank_parts.scale(state, parts, comm.size / sum(map(len, assignment)))
        for group in state["optimizer"]["param_groups"]:
            if "residuals" in group:
                group["residuals"] = "mean"
        return state

    def _share(self, state: State, source: int) -> None:
        """Copy what ranks have in common from rank ``source`` to those without a snapshot."""
        optimizer = self._optimizer
        comm, device = optimizer.comm, optimizer._session.device
        rank_parts = RankParts(optimizer)
        stateful = state.pop("stateful")
        leaves = list(iterate_leaves(state))
        shared = [
            to_local(value)
            for path, value in leaves
            if isinstance(value, Tensor) and not rank_parts.is_rank_part(path, value)
        ]
        for tensor in shared:
            copied = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
            message = copied.to(device).contiguous()
            copied.copy_(_run(exchange_one(comm, Broadcast(message, source))))
        plain = {path: value for path, value in leaves if not isinstance(value, Tensor)}
        plain["stateful",] = stateful
        raw = torch.frombuffer(bytearray(_to_bytes(plain)), dtype=torch.uint8)
        size = torch.tensor([raw.numel()], dtype=torch.int64, device=device)
        size = _run(exchange_one(comm, Broadcast(size, source)))
        message = (
            raw.to(device)
            if comm.rank == source
            else torch.empty(int(size), dtype=torch.uint8, device=device)
        )
        received = _run(exchange_one(comm, Broadcast(message, source)))
        file = io.BytesIO(bytes(received.cpu().tolist()))
        # weights_only: it runs no code, whatever another rank has sent
        for path, value in torch.load(file, "cpu", weights_only=True).items():
            entry: Any = state
            for key in path[:-1]:
                entry = entry[key]
            entry[path[-1]] = value

    def _write_state(self, state: State) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for name, thing in self._stateful.items():
            thing.load_state_dict(state["stateful"][name])


def assign_snapshots(visible: list[list[Snapshot]]) -> list[list[Snapshot]]:
    """Return which of the newest snapshots each rank loads, of those that it sees.

    Each is loaded once, by the rank that has the fewest; among equals by the rank of its number.
    """
    newest = max((s.stamp for snapshots in visible for s in snapshots), default=0)
    assignment: list[list[Snapshot]] = [[] for _ in visible]
    candidates = {s for snapshots in visible for s in snapshots if s.stamp == newest}
    for snapshot in sorted(candidates):
        visible_to = [rank for rank, snapshots in enumerate(visible) if snapshot in snapshots]
        rank = min(visible_to, key=lambda r: (len(assignment[r]), r != snapshot.replica, r))
        assignment[rank].append(snapshot)
    return assignment


class RankParts:
    """The parts of a state that differ between ranks, and of which only the mean counts."""

    def __init__(self, optimizer: CompressedOptimizer):
        self._names = {*optimizer.rank_local_state, "residual", "pseudo_gradient"}
        self._has_local_moments = hasattr(optimizer, "end_round")

    def is_rank_part(self, path: Path_, value: Tensor) -> bool:
        """Return True if the value at ``path`` is a rank's own."""
        if path[:2] != ("optimizer", "state"):
            return False
        is_moment = self._has_local_moments and path[3:4] == ("base",)
        return path[-1] in self._names or (
            is_moment and value.is_floating_point() and value.dim() > 0
        )

    def list_parts(self, state: State) -> dict[Path_, Tensor]:
        """Return copies of a rank's own parts, among them what its parameters have moved from
        their anchors.
        """
        parts = {
            path: to_local(value).clone()
            for path, value in iterate_leaves(state)
            if isinstance(value, Tensor) and self.is_rank_part(path, value)
        }
        for name, anchor in _iterate_anchors(state):
            parts["moved", name] = to_local(state["model"][name]) - anchor
        return parts

    def scale(self, state: State, parts: list[dict[Path_, Tensor]], factor: float) -> None:
        """Set the own parts of ``state`` to the sum of ``parts`` times ``factor``."""
        for path, value in iterate_leaves(state):
            if isinstance(value, Tensor) and self.is_rank_part(path, value):
                local = to_local(value).zero_()
                for part in parts:
                    local.add_(part[path], alpha=factor)
        for name, anchor in _iterate_anchors(state):
            distances = (part["moved", name] * factor for part in parts)
            to_local(state["model"][name]).copy_(anchor + sum(distances, torch.zeros_like(anchor)))


def _iterate_anchors(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of every parameter that has an anchor, and this rank's part of it."""
    for name, entry in state["optimizer"]["state"].items():
        outer = entry.get("outer") or {}
        if int(outer.get("fragment", -1)) >= 0:
            yield name, to_local(outer["anchor"])


# Files


def _has_all_bytes(path: Path) -> bool:
    """Return True if the files of a snapshot are as long as they were when it was complete."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        parts = FileSystemReader(path).read_metadata().storage_data.values()
    except Exception:  # whatever a damaged pickle raises
        return False
    lengths: dict[str, int] = {}
    for part in parts:
        end = part.offset + part.length
        lengths[part.relative_path] = max(end, lengths.get(part.relative_path, 0))
    try:
        return all((path / name).stat().st_size >= n for name, n in lengths.items())
    except OSError:
        return False


@contextmanager
def _raise_brief_errors(
    path: Path, done: str, comm: Communicator, advice: str = ""
) -> Iterator[None]:
    """Raise RuntimeError with the rank and a short cause in place of what torch raises, which is
    long and not even an Exception.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, Exception) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((cause for cause, _ in failures), error)
        why = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
        raise RuntimeError(
            f"the snapshot {path} could not be {done} on rank {comm.rank} ({why}){advice}."
        ) from error


# Nested states


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


def _to_bytes(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _run(turns: Generator[Any, None, Result]) -> Result:
    """Run a generator of collectives to its end, and return its result."""
    while True:
        try:
            next(turns)
        except StopIteration as stop:
            result: Result = stop.value
            return result


@contextmanager
def _without_warning(optimizer: CompressedOptimizer) -> Iterator[None]:
    """Do not warn in this block of state that other ranks have: they save it themselves."""
    warned = optimizer._session.warned
    is_new = "saving" not in warned
    warned.add("saving")
    try:
        yield
    finally:
        if is_new:
            warned.discard("saving")
