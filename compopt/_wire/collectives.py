"""Collectives of ``torch.distributed``. Outside of this folder only ``_fsdp``, ``integrations``,
``activations`` and ``planning`` call it.

``Communicator.start`` never blocks; ``PendingCollective.wait`` does. All ranks must start
collectives in the same order, each from one thread at a time: two threads on one gloo group
silently mix results.

``exchange`` starts those of steps, ``handshake`` and ``resharding`` by ``exchange_one``, and
``fragment_sync`` those of local steps.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .codec import QuantizedCodec, QuantizedMean
from .groups import (
    BoundedStore,
    ProcessGroup,
    Ranks,
    get_group_store,
    get_timeout,
    is_initialized,
    name_apart,
)
from .in_flight import (
    PendingCollective,
    _in_flight,
    abandon_group,
    first_line,
    profiler_range,
    release_ended,
)
from .payload import Payload
from .requests import (
    AllGather,
    AllReduceMean,
    BitOr,
    Broadcast,
    Collective,
    CommunicationError,
    EncodeError,
    RankSilent,
    ReduceScatterMean,
    Request,
    average_rows,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Backends that compute a mean, and those that gather into one tensor without copies.
AVERAGING, GATHERING = ("nccl",), ("nccl", "xccl")

WAY_TO_MAKE_A_GROUP = (
    "pass compopt.Ranks(group, rank=, size=), and call rebind() with new ones after each change of "
    "ranks (compopt.integrations.torchft does)"
)

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own, for a group whose timeout cannot be read


# Communicators


class Communicator:
    """The ranks of one process group. Without a group, or with ``single_process``, one rank."""

    # None: a single process, or ranks that no process group connects
    group: ProcessGroup | None = None
    may_grow = False  # one rank that is left goes on as one of several
    counts_alone = True  # one rank counts what several would send

    def __init__(self, group: ProcessGroup | None = None, single_process: bool = False):
        check_process_group(group)
        single_process = single_process or not is_initialized()
        if single_process and group is not None:
            raise ValueError(
                "process_group was given, but torch.distributed is not initialized: call "
                "init_process_group first."
            )
        self.group = None if single_process else group or dist.group.WORLD
        self.rank, self.size = (0, 1) if self.group is None else _read_place(self.group)
        self._bytes_sent = 0
        self.started = 0  # collectives, in the same order on all ranks
        # called with the seconds that a collective blocked the host
        self.on_wait: Callable[[float], None] | None = None
        self._own_group: Communicator | None = None

    @property
    def bytes_sent(self) -> int:
        """The bytes that were handed to collectives, also to those of its own group."""
        return self._bytes_sent + (self._own_group.bytes_sent if self._own_group else 0)

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def check_unchanged(self) -> None:
        """Raise CommunicationError if the group has other ranks now than when it was given."""
        group = self.group
        if group is not None and (group.rank(), group.size()) != (self.rank, self.size):
            raise CommunicationError(
                f"the process group of rank {self.rank} of {self.size} has changed since it was "
                f"given: it calls itself rank {group.rank()} of {group.size()} now, and nothing "
                "was applied. Make a new process group, and call rebind() with it on all ranks."
            )

    def with_own_group(self) -> Communicator:
        """Return a communicator of the same ranks over another process group, for collectives that
        run beside others: the delayed syncs of LocalSteps. All ranks must call this.

        The group is made once and destroyed with this communicator. A group of only some of all
        ranks is not destroyed: torch would reuse its name for the next one, whose ranks then wait
        for each other forever.
        """
        if self.size == 1:
            return self
        if self._own_group is None:
            limit, is_world = get_timeout(self.group), self.size == dist.get_world_size()
            try:
                with contextlib.nullcontext() if is_world else name_apart(self.ranks):
                    group = dist.new_group(
                        self.ranks, timeout=limit, use_local_synchronization=not is_world
                    )
            except RuntimeError as error:
                why = f"the process group of delayed exchanges could not be made: {error}"
                raise CommunicationError(why) from error
            self._own_group = Communicator(group)
            self._own_group.on_wait = self.on_wait
            if is_world:
                weakref.finalize(self, abandon_group, group).atexit = False
        return self._own_group

    @property
    def beside(self) -> Communicator:
        """The communicator of its own process group, if that was made; else this one."""
        return self._own_group or self

    def start(self, request: Request) -> PendingCollective:
        """Start the collective that answers ``request``, and count its bytes."""
        assert isinstance(request, Collective), f"{request} needs no other rank"
        self.check_unchanged()
        release_ended()
        size = count_bytes(request)
        if self.size > 1 or self.counts_alone:  # bytes of a rank that is alone go nowhere
            self._bytes_sent += size
        self.started += 1
        description = f"{type(request).__name__} of {size} bytes over {self.size} ranks"
        if self.size == 1:
            answer = _answer_alone(request)
            return PendingCollective(description, None, lambda: answer)
        match request:
            case AllReduceMean():
                pending = self._all_reduce_mean(request, description)
            case AllGather(tensor, into):
                pending = self._all_gather(tensor, into, description)
            case Broadcast(tensor, source):
                pending = self._broadcast(tensor, source, description)
            case ReduceScatterMean(tensor, sizes):
                pending = self._reduce_scatter_mean(tensor, sizes, description)
            case BitOr(tensor):
                pending = self._bit_or(tensor, description)
        pending.on_wait = self.on_wait
        return pending

    def _all_reduce_mean(self, request: AllReduceMean, description: str) -> PendingCollective:
        message = request.message
        if isinstance(message, Payload) and isinstance(message.codec, QuantizedCodec):
            mean = message.codec.make_mean(message, self.rank, self.size)
            return self._quantized_mean(mean, description, request.has_next)
        tensor = request.tensor
        if self.get_backend(tensor.device) in AVERAGING:
            work = self._call(dist.all_reduce, description, tensor, dist.ReduceOp.AVG)
            return PendingCollective(description, work, lambda: request.message, request.has_next)
        work = self._call(dist.all_reduce, description, tensor)

        def divide() -> object:
            torch.div(tensor, self.size, out=tensor)
            return request.message

        return PendingCollective(description, work, divide, request.has_next)

    def _quantized_mean(
        self, mean: QuantizedMean, description: str, has_next: bool
    ) -> PendingCollective:
        """Send every rank its chunk, which it averages; then gather the averages."""
        try:
            with profiler_range("compopt::encode"):
                sent = mean.encode_for_owners()
            received = torch.empty_like(sent)
        except Exception as error:
            raise EncodeError(description) from error
        work = self._call(dist.all_to_all_single, description, received, sent)

        def gather_averages() -> PendingCollective:
            average = mean.average_own_chunk(received)
            rows = average.new_empty((self.size, *average.shape))
            work = self._gather(description, rows, average)

            def decode() -> Payload:
                mean.payload.receive(mean, received, rows)
                return mean.payload

            return PendingCollective(description, work, decode, has_next)

        return PendingCollective(description, work, gather_averages, has_next=True)

    def _all_gather(
        self, tensor: Tensor, into: Tensor | None, description: str
    ) -> PendingCollective:
        rows = tensor.new_empty((self.size, *tensor.shape)) if into is None else into
        work = self._gather(description, rows, tensor.contiguous())
        return PendingCollective(description, work, lambda: rows)

    def _broadcast(self, tensor: Tensor, source: int, description: str) -> PendingCollective:
        call = functools.partial(dist.broadcast, tensor, group_src=source)
        work = self._call(call, description)
        return PendingCollective(description, work, lambda: tensor)

    def _reduce_scatter_mean(
        self, tensor: Tensor, sizes: list[int], description: str
    ) -> PendingCollective:
        """Use all_to_all and a sum, which move (N-1)/N of the tensor's bytes; gloo's reduce_scatter
        moves as many as an all-reduce.
        """
        received = tensor.new_empty(self.size * sizes[self.rank])
        counts = [sizes[self.rank]] * self.size
        work = self._call(dist.all_to_all_single, description, received, tensor, counts, sizes)
        rows = received.view(self.size, -1)
        return PendingCollective(description, work, lambda: average_rows(rows))

    def _bit_or(self, tensor: Tensor, description: str) -> PendingCollective:
        """All-reduce, where the backend has bitwise or; otherwise every rank combines a segment."""
        if self.has_bitwise_or(tensor.device):
            work = self._call(dist.all_reduce, description, tensor, dist.ReduceOp.BOR)
            return PendingCollective(description, work, lambda: tensor, has_next=True)
        segment = -(-tensor.numel() // self.size)
        sent = torch.nn.functional.pad(tensor, (0, segment * self.size - tensor.numel()))
        received = torch.empty_like(sent)
        work = self._call(dist.all_to_all_single, description, received, sent)

        def gather_segments() -> object:
            combined = bitwise_or_rows(received.view(self.size, segment))
            work = self._gather(description, sent.view(self.size, segment), combined)
            copy = functools.partial(tensor.copy_, sent[: tensor.numel()])
            return PendingCollective(description, work, copy, has_next=True)

        return PendingCollective(description, work, gather_segments, has_next=True)

    def _gather(self, description: str, rows: Tensor, tensor: Tensor) -> dist.Work | None:
        """Gather every rank's tensor into ``rows``."""
        if self.get_backend(tensor.device) not in GATHERING:
            return self._call(dist.all_gather, description, list(rows.unbind()), tensor)
        return self._call(gather_into, description, rows, tensor)

    def _call(
        self, collective: Callable[..., dist.Work | None], description: str, *args: object
    ) -> dist.Work | None:
        try:
            with profiler_range("compopt::exchange"):
                work = collective(*args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise RankSilent(f"{description} could not start: {first_line(error)}") from error
        if work is not None:
            _in_flight[work] = self.group
        return work

    @functools.cached_property
    def store(self) -> BoundedStore | None:
        """The store of the group, of which no call outlasts the group's timeout; None if there is
        none.
        """
        group = self.group
        if group is None or self.size == 1 or dist.get_backend(group) == "mpi":
            return None
        limit = get_timeout(group) or DEFAULT_TIMEOUT
        return BoundedStore(get_group_store(group), limit.total_seconds())

    def get_backend(self, device: torch.device) -> str:
        """Return the backend for tensors of this device; "" if there is none.

        A group may have several, as in "cpu:gloo,cuda:nccl".
        """
        for pair in dist.get_backend_config(self.group).split(","):
            kind, _, backend = pair.partition(":")
            if kind == device.type:
                return backend
        return ""

    def can_exchange(self, device: torch.device) -> bool:
        """True if a collective can be started for tensors of this device."""
        # A single process, or the tests' simulator, needs no backend.
        return self.group is None or bool(self.get_backend(device))

    def can_poll_store(self, device: torch.device) -> bool:
        """True if a wait may be interrupted to look into the store, and resumed: on gloo only."""
        return self.store is not None and self.get_backend(device) == "gloo"

    def has_bitwise_or(self, device: torch.device) -> bool:
        """True if the backend has ReduceOp.BOR; NCCL and the backends that copy it do not."""
        return self.get_backend(device) in ("gloo", "mpi")


def _answer_alone(request: Collective) -> object:
    """Return the answer of a collective of one rank."""
    if not isinstance(request, AllReduceMean):
        return request.tensor.unsqueeze(0) if isinstance(request, AllGather) else request.tensor
    message = request.message
    if isinstance(message, Payload) and isinstance(message.codec, QuantizedCodec):
        message.codec.make_mean(message, 0, 1).round_payload()
    return message


def gather_into(
    output: Tensor, tensor: Tensor, group: ProcessGroup | None, async_op: bool
) -> dist.Work | None:
    """Gather every rank's tensor into one."""
    # the second is the name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, tensor, group=group, async_op=async_op)
    return work


def count_bytes(request: Collective) -> int:
    """Return the bytes that this rank passes to the collective for ``request``."""
    message = request.message if isinstance(request, AllReduceMean) else request.tensor
    return message.nbytes


def check_process_group(group: object) -> None:
    """Raise TypeError or ValueError if ``group`` is no process group of this rank."""
    if group is None or isinstance(group, Communicator | Ranks):
        return
    if hasattr(group, "get_group"):
        raise ValueError(
            'process_group is a DeviceMesh: pass its group, as mesh.get_group("dp") returns it '
            "for the dimension to average over."
        )
    not_a_member = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
    if type(group) is type(not_a_member) and group == not_a_member:
        raise ValueError(
            "process_group does not contain this rank: give every rank the group it belongs to."
        )
    if not isinstance(group, getattr(dist, "ProcessGroup", ())):
        raise TypeError(
            f"process_group must be None or a group of torch.distributed, got {group!r}: pass what "
            "torch.distributed.new_group() returns, or compopt.Ranks."
        )


def _read_place(group: ProcessGroup) -> tuple[int, int]:
    """Return the rank of this process in ``group``, and the number of ranks.

    Raises ValueError if the group and torch.distributed differ in them: means over such a group
    would be divided by a wrong number, or two ranks would do the work of one.
    """
    try:
        rank, size = dist.get_rank(group), len(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        raise ValueError(
            f"process_group is not registered with torch.distributed: {WAY_TO_MAKE_A_GROUP}."
        ) from None
    if (group.rank(), group.size()) != (rank, size):
        raise ValueError(
            f"process_group calls itself rank {group.rank()} of {group.size()}, and "
            f"torch.distributed has registered it as rank {rank} of {size}, as it does with groups "
            f"that another library makes and resizes (torchft): {WAY_TO_MAKE_A_GROUP}."
        )
    return rank, size


def bitwise_or_rows(rows: Tensor) -> Tensor:
    """Return the bitwise or of all rows, computed by halves."""
    while len(rows) > 1:
        half = len(rows) // 2
        both = rows[:half] | rows[-half:]
        rows = torch.cat([both, rows[half:-half]]) if len(rows) % 2 else both
    return rows[0]


def notify_join(joinable: object) -> None:
    """Tell the ranks that have finished their data, in a ``Join`` of torch, that a step follows."""
    dist.algorithms.join.Join.notify_join_context(joinable)  # type: ignore[arg-type]


# Communicators of other ranks than those of a registered group


class QuorumCommunicator(Communicator):
    """The ranks of one generation, of which torch.distributed knows nothing. There is no store, so
    ranks leave no notes for others.
    """

    store = None
    may_grow = True

    def __init__(self, ranks: Ranks):
        super().__init__(single_process=True)
        self.group, self.rank, self.size = ranks.group, ranks.rank, ranks.size
        self._given, self._backend = ranks, ranks.read_backend()

    @property
    def ranks(self) -> list[int]:
        """No global ranks: there are none."""
        return []

    def check_unchanged(self) -> None:
        now, size = self._given.read_generation(), self.size
        if self.group is not None:
            try:
                size = self.group.size()
            except AssertionError:  # torchft's, of a group that could not be made anew
                size = 0
        before = self._given.generation_given
        if (now, size) == (before, self.size):
            return
        raise CommunicationError(
            f"the ranks have changed since they were given: generation {before!r} had "
            f"{self.size} ranks, of which this was rank {self.rank}, and {now!r} has {size}; "
            "nothing was applied. Call rebind() with the new Ranks on all of them."
        )

    def with_own_group(self) -> Communicator:
        """Return itself if it is alone; no second group of these ranks can be made."""
        if self.size == 1:
            return self
        raise ValueError(
            "delay needs a second process group of the same ranks, and ranks given as a value have "
            "one: set delay=0."
        )

    def get_backend(self, device: torch.device) -> str:
        return self._backend


def connect(group: ProcessGroup | Ranks | Communicator | None) -> Communicator:
    """Return a communicator over ``group``, which may be one already."""
    if isinstance(group, Communicator):
        return group
    return QuorumCommunicator(group) if isinstance(group, Ranks) else Communicator(group)


def list_mesh_groups(p: Tensor) -> list[tuple[ProcessGroup, Placement]]:
    """Return the group of each mesh dimension of a DTensor, and the placement of ``p`` on it."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return []
    return list(zip(mesh.get_all_groups(), getattr(p, "placements", ()), strict=True))


def is_sharded_over(p: Tensor, comm: Communicator) -> bool:
    """True if ``p`` is a DTensor that is sharded over exactly these ranks."""
    groups = list_mesh_groups(p)
    if len(groups) != 1 or comm.group is None or comm.size == 1 or not groups[0][1].is_shard():
        return False
    return Communicator(groups[0][0]).ranks == comm.ranks


def make_shard_communicators(params: Iterable[Tensor]) -> list[Communicator]:
    """Return a communicator for each mesh dimension of the DTensors: together, the ranks that hold
    one model.
    """
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in params)
    groups: dict[str, ProcessGroup] = {}
    for mesh in filter(None, meshes):
        for group in mesh.get_all_groups():
            groups.setdefault(group.group_name, group)
    return [comm for comm in map(Communicator, groups.values()) if comm.size > 1]


def get_replicate_size(p: Tensor, shards: list[Communicator]) -> int:
    """Return how many of the ranks that hold one model have the same part of ``p``."""
    cutting = {group.group_name for group, where in list_mesh_groups(p) if not where.is_replicate()}
    return math.prod(
        comm.size for comm in shards if comm.group is None or comm.group.group_name not in cutting
    )


def is_outdated(comm: Communicator) -> bool:
    """True if ``comm`` is of a single process, and torch.distributed was initialized since."""
    return comm.size == 1 and comm.group is None and is_initialized()
