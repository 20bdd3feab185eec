"""A communicator over ``Ranks``, which other ones may replace while a run goes on."""

from __future__ import annotations

import torch

from .collectives import Communicator
from .launch import ProcessGroup
from .ranks import Ranks
from .requests import CommunicationError


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
