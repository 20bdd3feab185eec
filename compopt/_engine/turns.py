"""Waiting for other ranks, in turns: a generator yields each collective that it is about to wait
for, which is where the simulator lets another rank go on.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor

from .._wire.comm import Comm
from .._wire.pending import Pending
from .._wire.requests import AllGather, AllReduceMean, Broadcast

Result = TypeVar("Result")
Turns = Generator[Pending, None, Result]


def ask(comm: Comm, request: AllGather | AllReduceMean | Broadcast) -> Turns[Tensor]:
    """The answer to one request of a tensor."""
    pending = comm.start(request)
    yield pending
    answer = pending.wait()
    assert isinstance(answer, Tensor)
    return answer
