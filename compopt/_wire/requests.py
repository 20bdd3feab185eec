"""Requests that an algorithm makes of the other ranks.

An algorithm is a generator over one bucket. It yields requests and is resumed with the answers, so
it never touches ``torch.distributed`` and runs unchanged over real process groups and in the
lockstep simulator of the tests.

Methods and reducers yield them; ``exchange`` gives collectives to ``Communicator.start``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from .payload import Payload

# What a step sends of compressed tensors: everything; everything, rounded with error feedback; the
# elements on a mask; everything, to select a new mask; or a projection. ``stats.phase`` shows it.
Phase: TypeAlias = Literal["dense", "rounded", "sparse", "resample", "projected"]


@dataclass(slots=True)
class AllReduceMean:
    """Mean over ranks, in place; answered with the same payload or tensor. A payload is quantized
    if its codec does that.

    ``has_next``: another exchange follows before Agree. In backward the exchange schedule
    starts that one, too.
    """

    message: Payload | Tensor
    has_next: bool = False

    @property
    def tensor(self) -> Tensor:
        return self.message.flat if isinstance(self.message, Payload) else self.message


@dataclass(slots=True)
class AllGather:
    """Answered with a tensor of shape ``(ranks, *tensor.shape)``, row r from rank r.

    ``into``: memory for the answer, if any.
    """

    tensor: Tensor
    into: Tensor | None = None


@dataclass(slots=True)
class Broadcast:
    """Rank ``source``'s tensor to all ranks, in place; answered with the same tensor.

    ``confirm``: the broadcast is a post-commit exchange whose result all ranks must have before
    they use it. At the beginning of the next step ranks agree whether all received it; if one did
    not, all continue without it.
    """

    tensor: Tensor
    source: int = 0
    confirm: bool = False


@dataclass(slots=True)
class ReduceScatterMean:
    """Mean over ranks of consecutive rows, row r for rank r; answered with this rank's row.

    ``sizes[r]`` is the number of elements of row r, the same on all ranks.
    """

    tensor: Tensor
    sizes: list[int]


@dataclass(slots=True)
class BitOr:
    """Bitwise or over ranks of a uint8 tensor, in place; answered with it.

    The next exchange of the generator always sends the values at the set bits.
    """

    tensor: Tensor


@dataclass(slots=True)
class ReadToHost:
    """Device values that the host needs; answered with a list. No communication.

    The host waits once, for all buckets together. CPU tensors are read directly: there this request
    would only make every bucket wait for the others.
    """

    tensor: Tensor


@dataclass(slots=True)
class Agree:
    """Wait until all buckets have come this far and all ranks have decided the step.

    Before ``Agree`` the generator writes nothing that outlives the step. If the step is applied,
    the answer is the L2 norm of the averaged gradient over all buckets, and state may change. If
    not, the generator is closed.

    ``squared_norm``: of this bucket's average, by default of the payload's body. A vector is summed
    on the host. ``covers_shard_only``: the payload, and so its squared norm, covers only this
    rank's shard. The generator may then gather updated parameters, and must yield
    ``ReadyToCommit`` before state changes. ``drop_absent`` is called if no rank has a gradient of
    some tensors, with a flag for each tensor, False for those: it sets what the average has of
    their residuals to zero, since nothing of them is applied, and returns ``squared_norm`` anew. By
    default, without a ``squared_norm``, their parts of the payload become zero.
    """

    payload: Payload
    phase: Phase
    squared_norm: Tensor | None = None
    covers_shard_only: bool = False
    drop_absent: Callable[[list[bool]], Tensor | None] | None = None


@dataclass(slots=True)
class ReadyToCommit:
    """Wait until the exchanges of all buckets since ``Agree`` have completed. It follows an
    ``Agree`` that covers shards only.
    """


@dataclass(slots=True)
class RunBatched:
    """Call ``fused``, a backend's function that serves all buckets in one launch, with the
    arguments ``call`` of this one (``Ops.run_batched``). Answered with the result.

    It may follow ``Agree`` or a post-commit exchange.
    """

    fused: Any
    ops: Any
    call: tuple[Any, ...]


# After a collective: its Payload or Tensor. After ReadToHost: a list of numbers. After Agree: the
# norm. After ReadyToCommit: None. After RunBatched: the result of its function. No type can express
# which answer follows which request.
Answer: TypeAlias = Any

Collective = AllReduceMean | AllGather | Broadcast | ReduceScatterMean | BitOr
Request = Collective | ReadToHost | Agree | ReadyToCommit | RunBatched

Result = TypeVar("Result")
RequestGenerator: TypeAlias = Generator[Request, Answer, Result]


class CommunicationError(RuntimeError):
    """A collective failed.

    The step, or the exchange of LocalSteps, to which it belonged was not applied on this rank. A
    rank that had received everything may have applied it; ``rebind()`` then copies its state.
    """


class CallsDiffer(CommunicationError):
    """Ranks have met in different calls. What one has started beside it never completes."""


class RankSilent(CommunicationError):
    """A collective failed on its way: another rank is gone, or does not answer."""


class EncodeError(Exception):
    """A message could not be encoded on this rank; the cause of this exception says why."""


def average_rows(rows: Tensor) -> Tensor:
    """Return the mean of ``rows``, in float32 if their precision is lower."""
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).div_(len(rows))
