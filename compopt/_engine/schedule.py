"""The order in which the exchanges of a step start.

Ranks must start their collectives in the same order. So the order is a function of the buckets'
numbers alone, whatever the order in which backward finishes gradients, and however much of it runs
in backward: see ``in_order``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._wire.comm import Comm
from .._wire.control import Words
from .._wire.pending import Pending
from .._wire.requests import CommunicationError
from .exchanges import Algorithm, Exchange
from .turns import Turns


@dataclass
class Terms:
    """How exchanges begin now."""

    algorithm: Algorithm
    comm: Comm
    early: bool = False  # in backward
    words: dict[str, Words] = field(default_factory=dict)  # for the last bucket's payload
    problem: Exception | None = None  # why this rank can send nothing

    def begin(self, bucket: Bucket, last: bool) -> Exchange:
        words = self.words if last else {}
        return Exchange(bucket, self.algorithm, self.comm, self.early, words, self.problem)


def in_order(
    buckets: list[Bucket], exchanges: list[Exchange], terms: Terms
) -> Generator[Bucket | Pending, None, None]:
    """The collectives of a step in the order in which all ranks start them: a function of the
    buckets' numbers only.

    Bucket after bucket begins; after each, those before it whose exchange has another stage take
    one, in order. When all have begun the rest follows, in turns; but what the host has to read of
    the device is read when every bucket has come to that. Yields what is about to begin, or to be
    waited for.
    """
    for bucket in buckets:
        yield bucket
        exchanges.append(terms.begin(bucket, bucket is buckets[-1]))
        for exchange in exchanges[:-1]:
            if exchange.more:
                yield exchange.waiting
                exchange.proceed()
    while waiting := [exchange for exchange in exchanges if exchange.agree is None]:
        if not any(exchange.more for exchange in waiting):
            read_together(waiting)
        for exchange in waiting:
            if exchange.reading is None and exchange.agree is None:
                yield exchange.waiting
                exchange.proceed()


def read_together(exchanges: list[Exchange]) -> None:
    """Tell those that want to know numbers of the device what these are: one wait for all."""
    asking = [(one, one.reading) for one in exchanges if one.reading is not None]
    by_device: dict[torch.device, list[tuple[Exchange, Tensor]]] = {}
    for one, numbers in asking:
        by_device.setdefault(numbers.device, []).append((one, numbers))
    for pairs in by_device.values():
        told = iter(torch.cat([numbers for _, numbers in pairs]).tolist())
        for one, numbers in pairs:
            one.told(list(islice(told, len(numbers))))


class Schedule:
    """One step's exchanges, and how far they have come in their order.

    Backward runs as much of it as its gradients allow, but never begins the last bucket; ``step()``
    runs the rest. So ranks of which one has come further in backward still agree.
    """

    def __init__(self, buckets: list[Bucket], algorithm: Algorithm, comm: Comm):
        self.buckets = buckets
        self.exchanges: list[Exchange] = []
        self.terms = Terms(algorithm, comm)
        self.error: CommunicationError | None = None  # in backward: the step tells it
        self._order = in_order(buckets, self.exchanges, self.terms)
        self._next: Bucket | Pending | None = next(self._order)

    def run_early(self, ready: Callable[[Bucket], bool]) -> None:
        """In backward: as far as gradients are ready. Waits for collectives begun before; a failure
        shows in the step.

        In the simulator ranks take turns, and none may wait for another here.
        """
        self.terms.early = True
        while self.error is None and self._may_go_on(ready):
            try:
                self._next = next(self._order, None)
            except CommunicationError as error:
                self.error = error
        self.terms.early = False

    def _may_go_on(self, ready: Callable[[Bucket], bool]) -> bool:
        if isinstance(self._next, Bucket):
            return self._next is not self.buckets[-1] and ready(self._next)
        return self._next is not None and not self._next.in_turns

    def run(self) -> Turns[None]:
        """The rest, until every exchange has come to its Agree."""
        if self.error is not None:
            raise self._take_error()
        while self._next is not None:
            if not isinstance(self._next, Bucket):
                yield self._next
            self._next = next(self._order, None)

    def _take_error(self) -> CommunicationError:
        """Not kept, for its frames hold this object."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def complete_early(self) -> None:
        """Run all that may run in backward, and give it up: another backward replaces what was
        sent.

        To the end, so that it ends at the same place on ranks of which one had come further.
        """
        self.run_early(lambda bucket: True)
        self.abandon()

    def stale(self) -> list[Tensor]:
        """For each exchange begun in backward, 1 where its gradients are not what they were."""
        return [exchange.stale for exchange in self.exchanges if exchange.early]

    def abandon(self) -> None:
        """Give up what has begun, when it has ended on the wire."""
        self.error = None
        for exchange in self.exchanges:
            exchange.abandon()

    def leave(self) -> None:
        """Give up what has begun, at once."""
        self.error = None
        for exchange in self.exchanges:
            exchange.leave()
