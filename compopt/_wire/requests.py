"""What an algorithm may ask of the other ranks.

An algorithm is a generator over one bucket. It yields one of these and is resumed with the answer,
so it never touches ``torch.distributed`` and runs unchanged over real process groups and in the
lockstep simulator of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from .quantise import wire_bytes
from .scratch import Scratch, at_a_time

# Values rounded at a time: they stay in a core's cache.
BLOCK = 131072


class Payload:
    """One flat message: a header, then a part for every tensor of the bucket.

    The header carries, for each tensor, 1 if this rank has a gradient for it, 0 if not, NaN if the
    gradient is not finite; averaging makes it a decision that all ranks share. ``control`` carries
    what the runtime wants agreed (see ``control``): the bucket and step it belongs to; in the last
    bucket of a step stale payloads, and settings.

    ``dropped``, as long as the body: what rounding took off this rank's share, where what is sent
    of compressed tensors is rounded. With a ``seed`` the body travels as codes of ``bits`` bits
    (see ``quantised_mean``), rounded as the seed says; ``dropped`` is known when the payload has
    been averaged. In a dtype that is too narrow for what is sent, values are written to ``exact``,
    and ``round`` makes the message of them.
    """

    def __init__(
        self,
        flat: Tensor,
        tensors: int,
        control: int,
        lengths: list[int],
        seed: tuple[int, ...] | None = None,
        dropped: Tensor | None = None,
        scratch: Scratch | None = None,
        bits: int = 8,
        job: Callable[[Payload, int, int], Any] | None = None,
    ):
        self.flat, self.seed, self.dropped, self.bits = flat, seed, dropped, bits
        # The back end's own ``QuantisedMean``, where it has one.
        self.job = job
        self.scratch = scratch or Scratch()
        self.header = flat[:tensors]
        self.control = flat[tensors : tensors + control]
        self.body = flat[tensors + control :]
        self.lengths = lengths
        # The averaged header, once it has been read.
        self.marks: list[float] | None = None

    # Views, made when somebody asks: kernels take the body as it is.

    @cached_property
    def parts(self) -> list[Tensor]:
        """The body, a tensor at a time."""
        return list(self.body.split(self.lengths))

    @cached_property
    def dropped_parts(self) -> list[Tensor]:
        """``dropped``, likewise; none where nothing is."""
        return [] if self.dropped is None else list(self.dropped.split(self.lengths))

    @property
    def exact(self) -> list[Tensor]:
        """Where what is sent is written to."""
        return self.dropped_parts if self.rounded_later else self.parts

    @property
    def rounded_later(self) -> bool:
        """Whether ``round`` makes the message of ``exact``, which is then ``dropped_parts``."""
        return self.dropped is not None and self.seed is None

    def round(self) -> Payload:
        """Make the message of what ``exact`` holds; there is then what rounding took off."""
        if self.rounded_later and self.dropped is not None:
            block = at_a_time(BLOCK, self.body)
            for sent, rest in zip(self.body.split(block), self.dropped.split(block), strict=True):
                sent.copy_(rest)
                rest.sub_(sent)
        return self

    def over(self, flat: Tensor) -> Payload:
        """Another message laid out as this one."""
        return Payload(flat, len(self.header), len(self.control), self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of it on the wire."""
        if self.seed is None:
            return self.flat.numel() * self.flat.element_size()
        words = len(self.flat) - len(self.body)
        return wire_bytes(self.lengths, words, self.bits)


@dataclass(slots=True)
class AllReduceMean:
    """Mean over ranks, in place. Resumed with the same payload or tensor. A payload with a seed
    travels as codes.

    ``more``: another exchange follows before Agree; in backward the runtime does not wait for the
    step to go on.
    """

    message: Payload | Tensor
    more: bool = False

    @property
    def tensor(self) -> Tensor:
        return self.message.flat if isinstance(self.message, Payload) else self.message


@dataclass(slots=True)
class AllGather:
    """Resumed with a tensor of shape ``(ranks, *tensor.shape)``, row r from rank r.

    ``into``: memory for it, if any.
    """

    tensor: Tensor
    into: Tensor | None = None


@dataclass(slots=True)
class Broadcast:
    """Rank ``source``'s tensor on every rank, in place. Resumed with the same tensor.

    ``confirm``: it is sent behind the commit, and ranks that have it may not meet one that has not.
    So the next step begins with a word of every rank, and where it was lost on any, all go on
    without.
    """

    tensor: Tensor
    source: int = 0
    confirm: bool = False


@dataclass(slots=True)
class ReduceScatterMean:
    """Mean over ranks of consecutive rows, row r for rank r: resumed with this rank's row, in
    memory of its own.

    ``sizes[r]`` is the number of elements of row r, the same on all ranks.
    """

    tensor: Tensor
    sizes: list[int]


@dataclass(slots=True)
class BitOr:
    """Bitwise or over ranks of a tensor of uint8.

    Resumed with it. What is at these bits is exchanged next.
    """

    tensor: Tensor


@dataclass(slots=True)
class Read:
    """Numbers of the device, which the host has to know. No rank is asked.

    Resumed with them as a list. All buckets come to theirs, and then the host waits once. So on a
    CPU, where nothing is waited for, it is not for use: buckets would wait for each other.
    """

    tensor: Tensor


@dataclass(slots=True)
class Agree:
    """The end of reading and exchanging: wait for every bucket and for one decision of all ranks.

    Resumed with the L2 norm, over all buckets, of the averaged gradient; from then on state may
    change. Closed instead of resumed when the step is not to be applied. ``squared_norm`` defaults
    to that of the payload's body.

    A vector is summed up on the host.

    ``sharded``: the payload, and so the norm, is of this rank's shard only, and state may change
    when ``Commit`` is resumed: until then updated parameters are gathered.
    """

    payload: Payload
    phase: str
    squared_norm: Tensor | None = None
    sharded: bool = False


@dataclass(slots=True)
class Commit:
    """After a sharded ``Agree``: wait until all that was asked for since has arrived, for every
    bucket.
    """


@dataclass(slots=True)
class Together:
    """After ``Agree``: ``run`` is called with the requests of all buckets of this ``name``, and
    returns an answer for each. So what is done to all of them is one launch.

    Where what was sent behind the commit has arrived, it may be asked for once more.
    """

    name: str
    run: Callable[[list[Together]], list[Any]]
    bucket: Any
    args: tuple[Any, ...]


# What a generator is resumed with: a Payload or a Tensor after a collective, the norm after Agree.
# No type can say which of them follows which request.
Answer: TypeAlias = Any

Request = (
    AllReduceMean
    | AllGather
    | Broadcast
    | ReduceScatterMean
    | BitOr
    | Read
    | Agree
    | Commit
    | Together
)

# A generator that asks other ranks, and what it returns in the end.
Result = TypeVar("Result")
Asking: TypeAlias = Generator[Request, Answer, Result]


def mean_of_rows(rows: Tensor) -> Tensor:
    """The mean of ``rows``, in float32 where they are of lower precision."""
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).div_(len(rows))


class CommunicationError(RuntimeError):
    """A collective failed. The step it belonged to was not applied on this rank."""


class NotSent(Exception):
    """What was to be sent could not be made on this rank, for the reason that is this exception's
    cause.
    """


def bytes_of(request: Request) -> int:
    """Bytes this rank hands to the collective for ``request``."""
    if isinstance(request, Read | Agree | Commit | Together):
        return 0
    if isinstance(request, AllReduceMean) and isinstance(request.message, Payload):
        return request.message.nbytes
    tensor: Tensor = request.tensor
    return tensor.numel() * tensor.element_size()
