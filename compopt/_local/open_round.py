"""The round that is running: how many local steps ranks took since their parameters were equal."""

from __future__ import annotations

import sys
import warnings
import weakref

import torch

from .._wire.comm import Comm
from .._wire.warning import user_location
from .stats import LocalStats


class OpenRound:
    """Counts local steps, and warns on rank 0 where the optimizer goes, or the process ends, before
    the round does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.steps = 0
        self._rounds_ended = 0
        self._warns = False
        self._name = type(optimizer).__name__
        self._location = user_location()
        weakref.finalize(optimizer, self._on_end)

    def count_step(self, stats: LocalStats, comm: Comm, equal_at_end: bool) -> None:
        """Count a local step. ``equal_at_end``: parameters are equal when a round ends."""
        ended = stats.round > self._rounds_ended and not stats.steps_into_round
        self.steps = 0 if ended and equal_at_end else self.steps + 1
        self._rounds_ended = stats.round
        self._warns = comm.rank == 0 and comm.size > 1

    def end(self) -> None:
        """Parameters are equal on all ranks."""
        self.steps = 0

    def _on_end(self) -> None:
        # An error that ends the process has a message of its own.
        if not self.steps or not self._warns or hasattr(sys, "last_value"):
            return
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        file, line = self._location
        warnings.warn_explicit(
            f"{self._name} ended within a round: ranks took {steps} since parameters were last "
            "equal, and each holds a model of its own. Call end_round() on all ranks after the "
            "last step.",
            UserWarning,
            file,
            line,
        )
