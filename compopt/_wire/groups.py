"""Process groups: who was launched, ranks as a value, the timeout and the store of a group, and a
context in which others of some ranks cannot be reached.

``Communicator`` (``collectives``) is made over them, and ``Engine`` asks who was launched.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Aliases, because torch may be built without torch.distributed.
ProcessGroup: TypeAlias = "dist.ProcessGroup"
Store: TypeAlias = "torch._C._distributed_c10d.Store | BoundedStore"
Result = TypeVar("Result")

FIRST_OF_OWN = 10**9  # numbers of groups of some ranks, above those that torch gives


# Who was launched


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return the global rank of this process; before initialization, the one torchrun gave it."""
    if is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def is_launched_by_torchrun() -> bool:
    """True if torchrun, or another elastic agent of torch, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def count_launched_ranks() -> int:
    """Return how many processes a launcher such as torchrun has started, while torch.distributed is
    not initialized; else 1.
    """
    if "RANK" not in os.environ or is_initialized():
        return 1
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def get_timeout(group: ProcessGroup | None) -> timedelta | None:
    """Return the timeout of the group's collectives, which torch has under a private name only;
    None if it cannot be read.
    """
    try:
        device = group._device_types[0]  # type: ignore[union-attr]
        limit = group._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, IndexError, RuntimeError):
        return None
    return limit if isinstance(limit, timedelta) else None


def list_ranks_of_call(operator: torch._ops.OpOverload, given: dict[str, Any]) -> list[int]:
    """Return the global ranks among which a call of an operator of PyTorch communicates.

    ``given``: its arguments by name. Nobody, if it is no collective.
    """
    kind = operator.namespace
    if kind == "c10d" and "process_group" in given:
        return list_group_ranks(dist.ProcessGroup.unbox(given["process_group"])) or []
    if kind == "_c10d_functional" and isinstance(name := given.get("group_name"), str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        return dist.get_process_group_ranks(resolve(name))
    return []


def list_group_ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    """Return the global ranks of a process group. None if there is no group, or torch has not
    registered it: it was destroyed, or a library made it (torchft).
    """
    try:
        return None if group is None else dist.get_process_group_ranks(group)
    except KeyError:
        return None


# Ranks as a value


@dataclass(frozen=True)
class Ranks:
    """The ranks to average over, in place of a process group of torch.distributed::

        optimizer.rebind(compopt.Ranks(group, rank=1, size=3, generation=quorum_id))

    One rank that is left goes on as one of several would: it keeps anchors, residuals and
    projections, so that others can join it.

    Args:
        group: what collectives are called on; None: this rank is the only one.
        rank: the number of this rank in the group, from 0.
        size: the number of ranks.
        generation: names these ranks, and no others before or after them. A function without
            arguments returns the present name: ranks that have changed are then noticed at the next
            collective, which raises CommunicationError until ``rebind()`` is given the new ones.
        backend: "gloo" or "nccl"; by default what the group calls itself.
    """

    group: ProcessGroup | None
    rank: int
    size: int
    generation: Hashable | Callable[[], Hashable] = None
    backend: str = ""
    generation_given: Hashable = field(init=False)  # the one that this value was made for

    def __post_init__(self) -> None:
        object.__setattr__(self, "generation_given", self.read_generation())
        is_good = isinstance(self.rank, int) and isinstance(self.size, int)
        if not (is_good and 0 <= self.rank < self.size):
            raise ValueError(f"rank {self.rank!r} of {self.size!r}: pass 0 <= rank < size.")
        if self.group is None and self.size > 1:
            raise ValueError(f"size is {self.size}, but there is no group to reach other ranks by.")

    def read_generation(self) -> Hashable:
        """Return the present generation of the group."""
        return self.generation() if callable(self.generation) else self.generation

    def read_backend(self) -> str:
        """Return the backend of collectives, "" if the group does not say."""
        if self.backend or self.group is None:
            return self.backend or "gloo"
        name: str = self.group.name()
        return name.lower().rpartition("-")[2]  # torchft's are named torchft-gloo, torchft-nccl


# Groups with a name of their own


# How many groups of its own a process has made of some of all ranks, by the group of all ranks.
_made: WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


@contextlib.contextmanager
def name_apart(ranks: list[int]) -> Iterator[None]:
    """Let torch name the next group by what its ranks have in common, and not count it.

    From 2.14 on its name has the number of groups that this process has made, and it counts as one:
    ranks outside of it would be one behind, and wait for the next group by another name.
    """
    all_ranks, world = dist.group.WORLD, dist.distributed_c10d._world
    assert all_ranks is not None
    counts = _made.setdefault(all_ranks, Counter())
    before, counts[tuple(ranks)] = world.group_count, counts[tuple(ranks)] + 1
    world.group_count = FIRST_OF_OWN + counts[tuple(ranks)]
    try:
        yield
    finally:
        world.group_count = before


# Stores


def get_group_store(group: ProcessGroup) -> Store:
    """Return the store of a group; before torch 2.9 a group does not know its own."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return torch.distributed.distributed_c10d._get_process_group_store(group)


class BoundedStore:
    """A store whose calls return, or raise RuntimeError, within ``limit`` seconds."""

    def __init__(self, store: Store, limit: float):
        self._store, self.limit = store, limit
        self._running: threading.Thread | None = None  # of the last call
        self._ends = 0.0  # when that call was given up, or will be

    def run(self, function: Callable[[Store], Result], limit: float | None = None) -> Result:
        """Return what ``function`` returns for the store, or raise what it raises."""
        if self._running is not None:
            self._running.join(max(0.0, self._ends - time.monotonic()))
            if self._running.is_alive():
                raise RuntimeError("an earlier call of the store has not been answered yet")
        limit = self.limit if limit is None else limit
        results: list[Result] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(function(self._store))
            except BaseException as error:
                errors.append(error)

        # a daemon: the process may end before the store answers
        self._running = threading.Thread(target=call, name="compopt store", daemon=True)
        self._ends = time.monotonic() + limit
        self._running.start()
        self._running.join(limit)
        if errors:
            raise errors.pop()
        if not results:
            raise RuntimeError(f"the store did not answer within {limit:g} s")
        return results[0]

    def add(self, key: str, amount: int, /) -> int:
        return self.run(lambda store: store.add(key, amount))

    def set(self, key: str, value: str, /) -> None:
        self.run(lambda store: store.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self.run(lambda store: store.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self.run(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self.run(lambda store: store.wait(keys, timeout), timeout.total_seconds() + self.limit)

    def delete_key(self, key: str, /) -> bool:
        return self.run(lambda store: store.delete_key(key))


# Collectives of code that is not ours


class ForeignCollective(RuntimeError):
    """Somebody else communicates among the ranks of a ``RefuseCollectives``; names the operator."""


class RefuseCollectives(TorchDispatchMode):
    """A context in which this thread cannot communicate with others of these ranks.

    It sees each operator that is called, not those that a DTensor calls within one: these are part
    of the arithmetic of shards.
    """

    def __init__(self, ranks: Iterable[int]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._ranks = frozenset(ranks)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: functions that are compiled stay so in this context."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if "c10d" in func.namespace:
            names = (argument.name for argument in func._schema.arguments)
            ranks = list_ranks_of_call(func, {**dict(zip(names, args, strict=False)), **named})
            if len(self._ranks.intersection(ranks)) > 1:
                raise ForeignCollective(f"{func.namespace}.{func.__name__}")
        return func(*args, **named)
