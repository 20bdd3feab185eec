"""Snapshots of a run, from which it goes on with any number of ranks.

Every replica of the model writes a complete snapshot of its own, into a folder that other replicas
need not see. In most runs a replica is one rank. If parameters are sharded, each rank writes its
shard.

Each snapshot holds what ranks have in common, and a rank's own part: its residual and, in
LocalSteps, the moments of the inner optimizer and what the rank has moved in the running round. If
the same ranks resume, each gets its own part back, to the bit. If others resume, they get what
ranks have in common, and own parts become their mean over the snapshots that are left.

A snapshot's name has a stamp of the ``save()`` that wrote it, the same on all ranks, and the run,
which gets a new name in every ``resume()``. Two runs that continue from one snapshot reach the same
steps; stamps and runs keep ranks from mixing their snapshots. The files are those of
``_snapshot_files``. No file and no message is a pickle: reading them runs no code.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._engine.handshake import gather_json
from .._engine.meetings import wait_for_all_to_save
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import require
from .._wire.collectives import Communicator
from .._wire.warning import warn
from . import _snapshot_files as files
from ._snapshot_files import Manifest, Snapshot, State, Untrusted
from ._snapshot_loading import Meeting, RankParts, Resume, describe, distribute_state, raise_told


class Snapshots:
    """Snapshots of a model and its optimizer::

        snapshots = Snapshots("snapshots", model, optimizer, scheduler=scheduler)
        for step in range(snapshots.resume(), steps):
            ...
            if optimizer.stats.steps_into_round == 0:
                snapshots.save()
        snapshots.close()

    Args:
        folder: on this machine, or one that all machines see; nobody but this user may write it. It
            may be moved between runs. Each run needs one of its own.
        model: the model, also within DistributedDataParallel or FSDP2.
        optimizer: one of this package over its parameters.
        keep: the number of snapshots that are complete on all ranks and are kept while the next one
            is written.
        stateful: further objects with ``state_dict`` and ``load_state_dict``, such as a scheduler
            and the position in the data. Their states are the same on all ranks, and consist of
            numbers, strings, bytes, tensors, NumPy's arrays, and containers of these.

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
        **stateful: Any,
    ):
        require(keep >= 1, "keep", keep, "an integer >= 1")
        others = [name for name, s in stateful.items() if isinstance(s, CompressedOptimizer)]
        if not isinstance(optimizer, CompressedOptimizer) or others:
            got = f"{', '.join(others)} as well" if others else type(optimizer).__name__
            raise TypeError(
                f"Snapshots are of one optimizer of compopt, got {got}: give every optimizer "
                "Snapshots in a folder of its own, or wrap several of torch in one of compopt."
            )
        if optimizer.replaces_reduce_scatter:
            raise ValueError(
                "Snapshots are of whole replicas, and FSDP2 shards parameters over the optimizer's "
                "ranks: save with torch.distributed.checkpoint."
            )
        self.folder, self._keep = Path(folder), keep
        self._model, self._optimizer, self._stateful = model, optimizer, stateful
        self._meeting: Meeting | None = None
        self._pending: tuple[Meeting, Snapshot, Future[None]] | None = None
        self._stamp = 0  # of the last save

    def find(self) -> list[Snapshot]:
        """Return the complete snapshots in the folder, in the order in which they were saved."""
        return [s for s in files.list_snapshots(self.folder) if files.is_complete(self.folder, s)]

    # Ranks

    def _get_world(self) -> Communicator:
        """Return the ranks of all shards."""
        comm, met = self._optimizer.comm, self._meeting
        if met is not None and met.comm is comm:
            return met.world
        return comm if comm.group is None else Communicator()

    def _meet(self) -> Meeting:
        """Return what ranks have agreed on. The first call, also after ``rebind()``, agrees on the
        run's name, and on a stamp, at least that of all snapshots that any rank sees.
        """
        comm, before = self._optimizer.comm, self._meeting
        if before is not None and before.comm is comm:
            return before
        world = self._get_world()
        device = self._optimizer._engine.device
        problem, snapshots = "", []
        try:
            files.check_trust(self.folder)
            snapshots = files.list_snapshots(self.folder)
        except OSError as error:
            problem = describe(error)
        except Untrusted as error:
            problem = (
                f"{error}, so another user could change a snapshot: take away that access (chmod "
                "go-w), or name a folder of your own"
            )
        stamp = max([time.time_ns(), self._stamp, *(s.stamp for s in snapshots)])
        told = [comm.rank, stamp, secrets.token_hex(8), problem]
        rows = gather_json(told, device, world)
        numbers, stamps, tokens, problems = zip(*rows, strict=True)
        raise_told(problems, f"snapshots cannot be in {self.folder}")
        lineage = [tokens[0], *(before.lineage if before else [])]
        known = {s.run for s in snapshots}
        self._meeting = Meeting(comm, world, device, [*numbers], lineage, self._stamp, known)
        self._stamp = max(stamps)
        return self._meeting

    # Saving

    @torch.no_grad()
    def save(self) -> None:
        """Write a snapshot in the background. All ranks call this after the same step.

        It waits until the one before is written, and then for a copy of all state in host memory.
        Ranks tell each other which snapshots are complete, in a few bytes, and each removes those
        of its own that no ``resume()`` will need.

        Raises RuntimeError, on this rank, if the snapshot before could not be written. The earlier
        ones are complete, and the next ``save()`` writes another one. Raises CommunicationError,
        with nothing sent, if another rank has not come to ``save()`` within ``optimizer.patience``
        seconds, by default the timeout of the process group; and soon, on all ranks, if another is
        in ``end_round()`` of LocalSteps.
        """
        wait_for_all_to_save(self._optimizer._engine, self._get_world())
        meeting = self._meet()
        self._stamp += 1  # also if this rank could not write the last one: stamps are alike on all
        problem = self._finish_writing()
        if self._optimizer.sharded:  # with all ranks, also if this one has to raise
            self._optimizer._consolidate()
        try:
            packed = files.pack(self._read_state())  # a copy in host memory
        except Exception as error:
            problem = problem or error
        rows = meeting.gather(meeting.written)
        self._remove_old(meeting, sorted(set.intersection(*map(set, rows)))[-self._keep :])
        self._warn_of_other_runs(meeting)
        if problem is not None:  # now that ranks have told each other
            raise problem
        snapshot = meeting.name_snapshot(self._optimizer._engine.steps, self._stamp)
        manifest = Manifest(snapshot, [*meeting.lineage])
        executor = ThreadPoolExecutor(1, "compopt snapshot")
        future = executor.submit(files.write_snapshot, self.folder, packed, manifest)
        executor.shutdown(wait=False)  # the thread ends with the file
        self._pending = meeting, snapshot, future

    def wait(self) -> None:
        """Wait until the last snapshot is written. It sends nothing.

        Raises RuntimeError, on this rank, if writing failed. The snapshots before it are complete,
        and the next ``save()`` writes another one.
        """
        if (failure := self._finish_writing()) is not None:
            raise failure

    close = wait

    def _finish_writing(self) -> Exception | None:
        """Wait until the last snapshot is written; return why it could not be."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        meeting, snapshot, future = pending
        if (error := future.exception()) is None:
            meeting.written.append(snapshot.stamp)
            return None
        if not files.is_complete(self.folder, snapshot):  # free its part of a disk that may be full
            files.remove_snapshot(self.folder, snapshot)
        failure = RuntimeError(
            f"the snapshot {self.folder / snapshot.name} could not be written on rank "
            f"{snapshot.replica} ({describe(error)})."
        )
        failure.__cause__ = error
        return failure

    def _remove_old(self, meeting: Meeting, common: list[int]) -> None:
        """Remove what no resume will need of this rank's snapshots. ``common``: the stamps of the
        last ``keep`` that are complete on all ranks.

        Needed are those, the last ``keep`` of this rank and, of the runs that this one went on
        from, as many as are lacking in ``common``, up to the one that was resumed.
        """
        own = meeting.name_snapshot(0, 0)
        snapshots = files.list_snapshots(self.folder)
        mine = [s for s in snapshots if s._replace(step=0, stamp=0) == own]
        older = [s for s in snapshots if s.run in meeting.lineage[1:] and common]
        before = sorted({s.stamp for s in older if s.stamp <= meeting.resumed}, reverse=True)
        lacking = self._keep - len(common)
        needed = {*common, *meeting.written[-self._keep :], *before[:lacking]}
        for snapshot in [*mine, *older]:
            if snapshot.stamp not in needed:
                files.remove_snapshot(self.folder, snapshot)
        meeting.written = [stamp for stamp in meeting.written if stamp in needed]

    def _warn_of_other_runs(self, meeting: Meeting) -> None:
        known = {*meeting.lineage, *meeting.known}
        others = {s.run for s in files.list_snapshots(self.folder)} - known
        meeting.known |= others
        if others:
            warn(
                f"another run writes snapshots into {self.folder} too ({', '.join(others)}). Each "
                "keeps its own, but a resume would take the newest of both: give every run a "
                "folder of its own."
            )

    def _read_state(self) -> State:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        with _without_warning(self._optimizer):
            weights, optimizer_state = get_state_dict(self._model, self._optimizer)
        others = {name: thing.state_dict() for name, thing in self._stateful.items()}
        return {"model": weights, "optimizer": optimizer_state, "stateful": others}

    # Resuming

    @torch.no_grad()
    def resume(self) -> int:
        """Load the newest snapshot that is complete and intact on all replicas, and return its
        step; 0 if the folders of all ranks have none. All ranks must call this.

        If no snapshot is there of all replicas, the newest of any is loaded, with a warning that
        names those whose parts are lost. A damaged snapshot is passed over, with a warning.

        Raises RuntimeError, on all ranks and with nothing loaded, if snapshots are there and none
        can be loaded, or if they are of another model or optimizer.
        """
        meeting = self._meet()
        self._finish_writing()  # what could not be written is incomplete, and passed over
        parts = RankParts(self._optimizer)
        resume = Resume(self.folder, meeting, parts, self._read_state, self._write_state)
        are_own = resume.run()
        if are_own is None:
            return 0
        if not are_own:
            self._optimizer.average_shares()
        return self._optimizer._engine.steps

    def _write_state(self, state: State) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        with _without_warning(self._optimizer):
            present = self._read_state()
            model, optimizer = (
                distribute_state(state[n], present[n]) for n in ("model", "optimizer")
            )
            parts: State = {"model_state_dict": model, "optim_state_dict": optimizer}
            set_state_dict(self._model, self._optimizer, **parts)
        for name, thing in self._stateful.items():
            thing.load_state_dict(state["stateful"][name])


@contextmanager
def _without_warning(optimizer: CompressedOptimizer) -> Iterator[None]:
    """Do not warn in this block of state that other ranks have: they save it themselves."""
    warned = optimizer._engine.warned
    is_new = "saving" not in warned
    warned.add("saving")
    try:
        yield
    finally:
        if is_new:
            warned.discard("saving")
