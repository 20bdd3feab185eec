"""Waiting for other ranks, in turns: a generator yields each collective that it is about to wait
for, which is where the simulator lets another rank go on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .._wire.collectives import Communicator, PendingCollective
from .._wire.requests import AllGather, AllReduceMean, Broadcast

Result = TypeVar("Result")
Turns = Generator[PendingCollective, None, Result]


def ask(comm: Communicator, request: AllGather | AllReduceMean | Broadcast) -> Turns[Tensor]:
    """The answer to one request of a tensor."""
    pending = comm.start(request)
    yield pending
    answer = pending.wait()
    assert isinstance(answer, Tensor)
    return answer


class Background(Generic[Result]):
    """Turns that are taken while something else goes on."""

    def __init__(self, turns: Turns[Result]):
        self._turns = turns
        self._waiting: PendingCollective | None = None
        self._results: list[Result] = []
        self._error: Exception | None = None

    def poll(self) -> None:
        """Go on as far as possible without waiting; ``finish`` raises the error there was."""
        while not self._results and self._error is None:
            if self._waiting is not None and not self._waiting.is_ready:
                return
            try:
                self._advance()
            except Exception as error:
                self._error = error

    def finish(self) -> Turns[Result]:
        """Go on to the end. May be called again, for the same result."""
        while not self._results:
            if self._error is not None:
                raise self._error
            if self._waiting is not None:
                yield self._waiting
            self._advance()
        return self._results[0]

    def _advance(self) -> None:
        try:
            self._waiting = next(self._turns)
        except StopIteration as stop:
            self._results.append(stop.value)

    def close(self) -> None:
        self._turns.close()


def sum_over(
    comms: Sequence[Communicator], numbers: Sequence[float], device: torch.device
) -> Turns[list[float]]:
    """The sums over the ranks of one communicator after another, as of a mesh's dimensions."""
    if not comms:
        return [*numbers]
    message = torch.tensor(numbers, dtype=torch.float64, device=device)
    for comm in comms:
        message = (yield from ask(comm, AllReduceMean(message))) * comm.size
    summed: list[float] = message.tolist()
    return summed
