"""Ranks as a value: a process group that torch.distributed has not registered, with what its
registry would say. A library that makes groups anew while a run goes on (torchft) gives them so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .launch import ProcessGroup


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
