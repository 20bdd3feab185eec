"""The round that is running: how many local steps ranks took since their parameters were equal."""

from __future__ import annotations

import sys
import weakref

import torch

from .._wire.collectives import Communicator
from .._wire.warning import user_location, warn_at


class OpenRound:
    """Counts local steps, and warns on rank 0 where the optimizer goes, or the process ends, before
    the round does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.steps = 0
        self._warns = False
        self._name = type(optimizer).__name__
        self._location = user_location()
        weakref.finalize(optimizer, self._on_end)

    def update(self, round_is_open: bool, comm: Communicator) -> None:
        """Count a local step, or note that parameters are equal on all ranks."""
        self.steps = self.steps + 1 if round_is_open else 0
        is_distributed = getattr(comm, "group", None) is not None  # not so in a simulation
        self._warns = is_distributed and comm.rank == 0 and comm.size > 1

    def _on_end(self) -> None:
        # An error that ends the process has a message of its own.
        if not self.steps or not self._warns or hasattr(sys, "last_value"):
            return
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        warn_at(
            self._location,
            f"{self._name} ended within a round: ranks took {steps} since parameters were last "
            "equal, and each holds a model of its own. Call end_round() on all ranks after the "
            "last step.",
        )
