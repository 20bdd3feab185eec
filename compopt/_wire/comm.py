"""The only file that calls ``torch.distributed``'s collectives. Starts requests, counts their
bytes.

``start`` never blocks; ``Pending.wait`` does. Collectives must be started in the same order on all
ranks and from one thread at a time: two threads on one gloo group silently mix results.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .pending import Pending, first_line, profiler_range
from .quantised_mean import job_of
from .requests import (
    AllGather,
    AllReduceMean,
    BitOr,
    Broadcast,
    CommunicationError,
    NotSent,
    Payload,
    ReduceScatterMean,
    Request,
    bytes_of,
    mean_of_rows,
)
from .store import GroupStore

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# As a name for annotations: torch may be built without torch.distributed.
ProcessGroup: TypeAlias = "dist.ProcessGroup"


# Backends that find a mean by themselves, and those that gather into one tensor without copies.
AVERAGING, GATHERING = ("nccl",), ("nccl", "xccl")


class Comm:
    """The ranks of one process group; a single process when there is none, or when ``alone``."""

    def __init__(self, group: ProcessGroup | None = None, alone: bool = False):
        alone = alone or not (dist.is_available() and dist.is_initialized())
        if alone and group is not None:
            raise ValueError(
                "process_group was given, but torch.distributed is not initialised: call "
                "init_process_group first."
            )
        self.group: ProcessGroup | None = None if alone else group or dist.group.WORLD
        # what may still be on its way when this communicator is deleted
        self.unfinished: set[str] = set()
        self.rank = 0 if alone else dist.get_rank(self.group)
        self.size = 1 if alone else dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(
                "process_group does not contain this rank: give every rank the group it belongs to."
            )
        self.bytes_sent = 0
        self._apart: Comm | None = None

    def start(self, request: Request) -> Pending:
        """Start the collective that answers ``request``."""
        size = bytes_of(request)
        self.bytes_sent += size
        what = f"{type(request).__name__} of {size} bytes over {self.size} ranks"
        return self._start(request, what)

    def apart(self) -> Comm:
        """The same ranks in a process group of its own, for collectives that run beside others.

        All of them must ask for it. It is made once, and destroyed with this communicator; but not
        over some of all ranks, where torch would give the name of a group that was destroyed to
        the next one, whose ranks then do not meet.
        """
        if self.size == 1:
            return self
        if self._apart is None:
            limit, is_world = timeout_of(self.group), self.size == dist.get_world_size()
            group = dist.new_group(
                self.ranks, timeout=limit, use_local_synchronization=not is_world
            )
            self._apart = Comm(group)
            if is_world:
                unfinished = self._apart.unfinished
                weakref.finalize(self, _destroy, group, unfinished).atexit = False
        return self._apart

    @property
    def ranks(self) -> list[int]:
        """Its processes, by their numbers among all."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def _start(self, request: Request, what: str) -> Pending:
        match request:
            case AllReduceMean():
                return self._all_reduce_mean(request, what)
            case AllGather(tensor, into):
                if self.size == 1:
                    return Pending(what, None, lambda: tensor.unsqueeze(0))
                rows = tensor.new_empty((self.size, *tensor.shape)) if into is None else into
                work = self._gather(what, rows, tensor.contiguous())
                return Pending(what, work, lambda: rows)
            case Broadcast(tensor, source):
                if self.group is None or self.size == 1:
                    return Pending(what, None, lambda: tensor)
                source = dist.get_global_rank(self.group, source)
                work = self._call(dist.broadcast, what, tensor, source)
                return Pending(what, work, lambda: tensor)
            case ReduceScatterMean(tensor, sizes):
                return self._reduce_scatter_mean(tensor, sizes, what)
            case BitOr(tensor):
                return self._bit_or(tensor, what)
        raise TypeError(f"{type(request).__name__} is not a request a communicator can answer.")

    def _all_reduce_mean(self, request: AllReduceMean, what: str) -> Pending:
        if isinstance(request.message, Payload) and request.message.seed is not None:
            return self._quantised_mean(request.message, what, request.more)
        tensor = request.tensor
        if self.size == 1:
            return Pending(what, None, lambda: request.message)
        if self.backend_of(tensor.device) in AVERAGING:
            work = self._call(dist.all_reduce, what, tensor, dist.ReduceOp.AVG)
            return Pending(what, work, lambda: request.message, request.more)
        work = self._call(dist.all_reduce, what, tensor)

        def finish() -> object:
            torch.div(tensor, self.size, out=tensor)
            return request.message

        return Pending(what, work, finish, request.more)

    def _quantised_mean(self, payload: Payload, what: str, more: bool) -> Pending:
        job = job_of(payload, self.rank, self.size)
        if self.size == 1:
            job.alone()
            return Pending(what, None, lambda: payload)
        try:
            with profiler_range("compopt::encode"):
                sent = job.first()
            received = torch.empty_like(sent)
        except Exception as error:
            raise NotSent(what) from error
        work = self._call(dist.all_to_all_single, what, received, sent)

        def second() -> Pending:
            mine = job.second(received)
            rows = mine.new_empty((self.size, *mine.shape))
            work = self._gather(what, rows, mine)

            def finish() -> Payload:
                job.finish(rows)
                return payload

            return Pending(what, work, finish, more)

        return Pending(what, work, second, more=True)

    def _reduce_scatter_mean(self, tensor: Tensor, sizes: list[int], what: str) -> Pending:
        """By all_to_all and a sum: (N-1)/N of the tensor's bytes, where gloo's reduce_scatter moves
        an all-reduce's.
        """
        if self.size == 1:
            return Pending(what, None, lambda: tensor.clone())
        received = tensor.new_empty(self.size * sizes[self.rank])
        counts = [sizes[self.rank]] * self.size
        work = self._call(dist.all_to_all_single, what, received, tensor, counts, sizes)
        return Pending(what, work, lambda: mean_of_rows(received.view(self.size, -1)))

    def _bit_or(self, tensor: Tensor, what: str) -> Pending:
        """An all-reduce where the backend has bitwise or; else segments are exchanged, combined and
        gathered.
        """
        if self.size == 1:
            return Pending(what, None, lambda: tensor)
        if self.has_or(tensor.device):
            work = self._call(dist.all_reduce, what, tensor, dist.ReduceOp.BOR)
            return Pending(what, work, lambda: tensor, more=True)
        segment = -(-tensor.numel() // self.size)
        sent = torch.nn.functional.pad(tensor, (0, segment * self.size - tensor.numel()))
        received = torch.empty_like(sent)
        work = self._call(dist.all_to_all_single, what, received, sent)

        def finish() -> object:
            mine = or_of_rows(received.view(self.size, segment))
            work = self._gather(what, sent.view(self.size, segment), mine)
            return Pending(what, work, lambda: tensor.copy_(sent[: tensor.numel()]), more=True)

        return Pending(what, work, finish, more=True)

    def _gather(self, what: str, rows: Tensor, mine: Tensor) -> dist.Work | None:
        """Every rank's tensor into ``rows``: where the backend can, in one piece."""
        if self.backend_of(mine.device) not in GATHERING:
            return self._call(dist.all_gather, what, list(rows.unbind()), mine)
        # its name before torch 2.13
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._call(single, what, rows, mine)

    def _call(
        self, collective: Callable[..., dist.Work | None], what: str, *args: object
    ) -> dist.Work | None:
        """Start one of torch.distributed's collectives."""
        try:
            with profiler_range("compopt::exchange"):
                return collective(*args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise CommunicationError(f"{what} could not start: {first_line(error)}") from error

    @functools.cached_property
    def store(self) -> GroupStore | None:
        """Texts beside the collectives; None where ranks have nothing to leave them in."""
        group = getattr(self, "group", None)  # the tests' simulator has none
        if group is None or self.size == 1 or dist.get_backend(group) == "mpi":
            return None
        return GroupStore(group.get_group_store(), self.rank, self.size)

    def can_look_up(self, device: torch.device) -> bool:
        """Whether a wait for this device's tensors may be broken off to look into the store, and
        taken up again: on gloo alone.
        """
        return self.store is not None and self.backend_of(device) == "gloo"

    def has_or(self, device: torch.device) -> bool:
        """Whether this device's tensors have a bitwise or: gloo's and MPI's, not NCCL's and its
        like.
        """
        return self.backend_of(device) in ("gloo", "mpi")

    def carries(self, device: torch.device) -> bool:
        """Whether this device's tensors can be exchanged."""
        alone = getattr(self, "group", None) is None  # and in the tests' simulator
        return alone or bool(self.backend_of(device))

    def backend_of(self, device: torch.device) -> str:
        """What carries this device's tensors: a group may have a backend for each kind of device,
        as in "cpu:gloo,cuda:nccl".
        """
        for pair in dist.get_backend_config(self.group).split(","):
            kind, _, backend = pair.partition(":")
            if kind == device.type:
                return backend
        return ""


def _destroy(group: ProcessGroup, unfinished: set[str]) -> None:
    if unfinished:  # gloo would wait for its collectives, which other ranks may have given up
        _abandoned.append(group)
        return
    with contextlib.suppress(ValueError):  # all groups are gone already
        if dist.is_initialized():
            dist.destroy_process_group(group)


# groups with a collective on its way that nobody waits for
_abandoned: list[ProcessGroup] = []


def or_of_rows(rows: Tensor) -> Tensor:
    """Bitwise or, halves of the rows at a time."""
    while len(rows) > 1:
        half = len(rows) // 2
        both = rows[:half] | rows[-half:]
        rows = torch.cat([both, rows[half:-half]]) if len(rows) % 2 else both
    return rows[0]


def rank_here() -> int:
    """This process's rank among all: before they are connected, as torchrun says it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = os.environ.get("RANK", "0")
    return int(said) if said.isdigit() else 0


def count_launched_ranks() -> int:
    """How many processes a launcher such as torchrun has started, while torch.distributed is not
    initialized; else 1.
    """
    if "RANK" not in os.environ or (dist.is_available() and dist.is_initialized()):
        return 1
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """How long its collectives wait, which torch tells under a private name only; None where it
    does not.
    """
    try:
        device = group._device_types[0]  # type: ignore[union-attr]
        limit = group._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, IndexError, RuntimeError):
        return None
    return limit if isinstance(limit, timedelta) else None


def connect(group: ProcessGroup | Comm | None) -> Comm:
    """A communicator over ``group``, which may be one already (the tests' simulator)."""
    return group if isinstance(group, Comm) else Comm(group)


def mesh_groups(p: Tensor) -> list[tuple[ProcessGroup, Placement]]:
    """The group of each mesh dimension of a DTensor, and how ``p`` lies on it; of others none."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return []
    return list(zip(mesh.get_all_groups(), getattr(p, "placements", ()), strict=True))


def has_met_others(comm: Comm) -> bool:
    """Whether torch.distributed was initialised since ``comm`` was made, for a process alone."""
    return getattr(comm, "group", comm) is None and dist.is_available() and dist.is_initialized()
