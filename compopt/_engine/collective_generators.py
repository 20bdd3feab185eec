"""Generators that yield each collective before they wait for it.

At each yield the simulator resumes another rank, and a real step looks for missing ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

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
