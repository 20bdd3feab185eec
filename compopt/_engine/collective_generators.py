"""Generators that yield each collective before they wait for it.

At each yield the simulator resumes another rank, and a real step looks for missing ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .._wire.collectives import Communicator, PendingCollective
from .._wire.requests import AllGather, AllReduceMean, Broadcast

Result = TypeVar("Result")
CollectiveGenerator = Generator[PendingCollective, None, Result]


def exchange_one(
    comm: Communicator, request: AllGather | AllReduceMean | Broadcast
) -> CollectiveGenerator[Tensor]:
    """Start one request, and return its answer."""
    pending = comm.start(request)
    yield pending
    answer = pending.wait()
    assert isinstance(answer, Tensor)
    return answer


class Background(Generic[Result]):
    """A generator of collectives that runs while the caller does other work."""

    def __init__(self, collectives: CollectiveGenerator[Result]):
        self._collectives = collectives
        self._waiting: PendingCollective | None = None
        self._results: list[Result] = []
        self._error: Exception | None = None

    def poll(self) -> None:
        """Run as far as possible without waiting; ``finish`` raises an error."""
        while not self._results and self._error is None:
            if self._waiting is not None and not self._waiting.is_ready:
                return
            try:
                self._advance()
            except Exception as error:
                self._error = error

    def finish(self) -> CollectiveGenerator[Result]:
        """Run to the end, and return the result; later calls return it again."""
        while not self._results:
            if self._error is not None:
                raise self._error
            if self._waiting is not None:
                yield self._waiting
            self._advance()
        return self._results[0]

    def _advance(self) -> None:
        try:
            self._waiting = next(self._collectives)
        except StopIteration as stop:
            self._results.append(stop.value)

    def close(self) -> None:
        self._collectives.close()


def sum_over_groups(
    comms: Sequence[Communicator], numbers: Sequence[float], device: torch.device
) -> CollectiveGenerator[list[float]]:
    """Return the sums over the ranks of all communicators, which are dimensions of a mesh."""
    if not comms:
        return [*numbers]
    message = torch.tensor(numbers, dtype=torch.float64, device=device)
    for comm in comms:
        mean = yield from exchange_one(comm, AllReduceMean(message))
        message = mean * comm.size
    summed: list[float] = message.tolist()
    return summed
