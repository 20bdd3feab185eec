"""What is sent behind a commit: the last request of a generator (masks on the wire), which the next
step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from .._wire.comm import Comm
from .._wire.requests import AllReduceMean, Answer, Broadcast, CommunicationError, Together
from .exchanges import Exchange
from .turns import Turns, ask


class Tails:
    """The exchanges that have committed and are not over."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        # something failed here, perhaps not on all ranks: payloads may differ in length
        self.lost = False
        # a tail was sent of which all ranks ask each other whether it failed anywhere
        self.unconfirmed = False

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self.exchanges)

    def __len__(self) -> int:
        return len(self.exchanges)

    def commit(self, exchange: Exchange, answer: Answer) -> None:
        """Let one bucket apply the step, up to what is done for all together, and keep what it
        sends behind that.
        """
        try:
            # a sharded generator has had the norm: it takes no notice of this
            exchange.advance(answer)
        except StopIteration:
            return
        except CommunicationError:  # the step is applied; only what was to follow it is lost
            exchange.close()
            self.lost = True
        else:
            if not isinstance(exchange.request, Together):
                self.exchanges.append(exchange)
        request = exchange.request
        self.unconfirmed |= isinstance(request, Broadcast) and request.confirm

    def settle(self) -> None:
        """Finish the generators whose last request was sent behind the commit.

        When that request failed the tail is dropped: it is not part of the step, and the algorithm
        does without.
        """
        tails, self.exchanges = self.exchanges, []
        for exchange in tails:
            try:
                exchange.finish(exchange.waiting.wait())
            except CommunicationError:  # or what arrived is not what was agreed
                exchange.close()
                self.lost = True
        in_turn(tails, Exchange.finish)

    def settle_in_turns(self) -> Turns[None]:
        for exchange in self.exchanges:
            yield exchange.waiting
        self.settle()

    def confirm(self, comm: Comm, device: torch.device) -> Turns[None]:
        """Let all ranks know where any has lost a tail of which they rely on each other."""
        if self.unconfirmed and comm.size > 1:
            word = torch.tensor([float(self.lost)], dtype=torch.float32, device=device)
            mean = yield from ask(comm, AllReduceMean(word))
            self.lost = float(mean) > 0
        self.unconfirmed = False

    def forget(self) -> None:
        """Give all of it up without waiting: its group is gone."""
        for exchange in self.exchanges:
            exchange.forget()
        self.exchanges, self.unconfirmed = [], False


def in_turn(exchanges: Sequence[Exchange], resume: Callable[[Exchange, Answer], None]) -> None:
    """Do what buckets ask to be done together, until none asks for more; ``resume`` takes each
    answer to its exchange.
    """
    while pairs := [(e, e.request) for e in exchanges if isinstance(e.request, Together)]:
        name = pairs[0][1].name
        waiting = [(exchange, request) for exchange, request in pairs if request.name == name]
        answers = waiting[0][1].run([request for _, request in waiting])
        for (exchange, _), answer in zip(waiting, answers, strict=True):
            exchange.request = None
            resume(exchange, answer)
