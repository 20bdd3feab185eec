"""The warning where nobody ended the round that was running."""

from __future__ import annotations

import sys
import weakref

import torch

from .._wire.collectives import Communicator
from .._wire.warning import user_location, warn_at


class OpenRound:
    """Warns on rank 0 when the optimizer or the process ends before the round does."""

    def __init__(self, optimizer: torch.optim.Optimizer, equal_at: int):
        self._equal_at = equal_at  # the last step after which parameters were equal
        self._steps = 0  # local steps since then
        self._warns = False
        self._name = type(optimizer).__name__
        self._location = user_location()
        weakref.finalize(optimizer, self._on_end)

    def update(self, is_open: bool, step: int, comm: Communicator) -> None:
        """Note whether parameters may differ from rank to rank after a step."""
        if not is_open:
            self._equal_at = step
        self._steps = step - self._equal_at
        is_distributed = getattr(comm, "group", None) is not None  # not so in a simulation
        self._warns = is_distributed and comm.rank == 0 and comm.size > 1

    def _on_end(self) -> None:
        # An error that ends the process has a message of its own.
        if not self._steps or not self._warns or hasattr(sys, "last_value"):
            return
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        warn_at(
            self._location,
            f"{self._name} ended within a round: ranks took {steps} since parameters were last "
            "equal, and each holds a model of its own. Call end_round() on all ranks after the "
            "last step.",
        )
