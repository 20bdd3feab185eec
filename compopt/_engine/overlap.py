"""Exchanges that run outside ``step()``: those that start in backward, and those that follow the
commit.

A bucket's exchange may start in backward, as soon as its gradients are complete. The last bucket's
never does: ``step()`` sends it, and its control fields say whether on any rank what was sent in
backward is stale. What a generator sends after the commit (masks) is awaited by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._wire.collectives import Communicator
from .._wire.requests import AllReduceMean, Answer, Broadcast, CommunicationError, RunBatched
from .exchange import Algorithm, Exchange, ExchangeSchedule
from .turns import Turns, ask


class PostCommitExchanges:
    """The exchanges that have committed, and whose last request is in flight."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        # something failed here, perhaps not on all ranks: payloads may differ in length
        self.lost = False
        # ranks ask each other whether what was sent has failed anywhere
        self.unconfirmed = False

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self.exchanges)

    def __len__(self) -> int:
        return len(self.exchanges)

    def commit_bucket(self, exchange: Exchange, answer: Answer) -> None:
        """Let one bucket apply the step, up to what is done for all buckets together, and keep the
        exchange that follows.
        """
        try:
            # a sharded generator has had the norm, and ignores this
            exchange.resume(answer)
        except StopIteration:
            return
        except CommunicationError:  # the step is applied; only what follows it is lost
            exchange.close()
            self.lost = True
        else:
            if not isinstance(exchange.request, RunBatched):
                self.exchanges.append(exchange)
        request = exchange.request
        self.unconfirmed |= isinstance(request, Broadcast) and request.confirm

    def finish(self) -> None:
        """Wait for all of them, and resume their generators to the end.

        One that fails is dropped: it is not part of the step, and the algorithm does without.
        """
        exchanges, self.exchanges = self.exchanges, []
        for exchange in exchanges:
            try:
                exchange.resume_after_commit(exchange.in_flight.wait())
            except CommunicationError:  # or what arrived is not what was agreed
                exchange.close()
                self.lost = True
        resume_together(exchanges, Exchange.resume_after_commit)

    def finish_in_turns(self) -> Turns[None]:
        for exchange in self.exchanges:
            yield exchange.in_flight
        self.finish()

    def confirm(self, comm: Communicator, device: torch.device) -> Turns[None]:
        """Let all ranks know whether any has lost what they rely on each other to have."""
        if self.unconfirmed and comm.size > 1:
            lost = torch.tensor([float(self.lost)], dtype=torch.float32, device=device)
            mean = yield from ask(comm, AllReduceMean(lost))
            self.lost = float(mean) > 0
        self.unconfirmed = False

    def forget(self) -> None:
        """Give all of them up without waiting: their group is gone."""
        for exchange in self.exchanges:
            exchange.forget()
        self.exchanges, self.unconfirmed = [], False


def resume_together(
    exchanges: Sequence[Exchange], resume: Callable[[Exchange, Answer], None]
) -> None:
    """Run what buckets want done together, until none wants more; ``resume`` hands an answer to its
    exchange.
    """
    while pairs := [(e, e.request) for e in exchanges if isinstance(e.request, RunBatched)]:
        name = pairs[0][1].name
        waiting = [(exchange, request) for exchange, request in pairs if request.name == name]
        answers = waiting[0][1].run([request for _, request in waiting])
        for (exchange, _), answer in zip(waiting, answers, strict=True):
            exchange.request = None
            resume(exchange, answer)


class BackwardOverlap:
    """Which gradients the running backward has finished, and the schedule it has started."""

    def __init__(self, post_commit: PostCommitExchanges):
        self.schedule: ExchangeSchedule | None = None  # of the coming step
        # gradients changed after a backward: nothing starts in backward any more
        self.is_stopped = False
        self._post_commit = post_commit
        self._finished: dict[int, set[Tensor]] = {}  # by the running backward, a bucket
        self._is_same_backward = False  # the schedule started in the running backward

    @property
    def is_idle(self) -> bool:
        """Whether the running backward has finished nothing so far."""
        return not self._finished

    def note_finished(self, p: Tensor, bucket: Bucket) -> None:
        """Backward has finished the gradient of ``p``."""
        self._finished.setdefault(bucket.index, set()).add(p)

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether backward has finished all gradients of ``bucket``."""
        return len(self._finished.get(bucket.index, ())) == len(bucket.params)

    def start_ready(self, buckets: list[Bucket], algorithm: Algorithm, comm: Communicator) -> None:
        """Start the exchanges that can start, in the order that all ranks share.

        Where the first bucket is complete again, a later backward replaces all payloads.
        """
        if self.is_stopped or self._has_failed() or len(buckets) == 1:
            return
        is_new = not self._is_same_backward and self.is_ready(buckets[0])
        if self.schedule is None and not is_new:
            return
        try:
            if is_new:
                self._start_anew(buckets, algorithm, comm)
            if self.schedule is not None:
                self.schedule.run_in_backward(self.is_ready)
        except BaseException:
            self._post_commit.lost = True  # other ranks may have come further
            raise

    def _has_failed(self) -> bool:
        failed = self.schedule is not None and self.schedule.error is not None
        return self._post_commit.lost or failed

    def _start_anew(self, buckets: list[Bucket], algorithm: Algorithm, comm: Communicator) -> None:
        self._post_commit.finish()
        if self._post_commit.lost or self._post_commit.unconfirmed:
            return
        if self.schedule is not None:
            self.schedule.complete_backward()
        self.schedule = ExchangeSchedule(buckets, algorithm, comm)
        self._is_same_backward = True

    def on_backward_end(self) -> None:
        """The backward that started exchanges has ended: another one that completes all gradients
        replaces what they sent.
        """
        self._finished.clear()
        self._is_same_backward = False
        for exchange in self.schedule.exchanges if self.schedule else ():
            if exchange.staleness is not None:
                exchange.staleness.accept_filled()

    def take_schedule(
        self, buckets: list[Bucket], algorithm: Algorithm, comm: Communicator
    ) -> ExchangeSchedule:
        """The schedule for ``step()`` to run: the started one, else a new one."""
        schedule, self.schedule = self.schedule, None
        self._is_same_backward = False
        return schedule or ExchangeSchedule(buckets, algorithm, comm)

    def discard(self) -> None:
        """Give up what was started."""
        schedule, self.schedule = self.schedule, None
        self._is_same_backward = False
        if schedule is not None:
            schedule.abandon()

    def forget(self) -> None:
        """Give up what was started without waiting: its group is gone."""
        schedule, self.schedule = self.schedule, None
        for exchange in schedule.exchanges if schedule else ():
            exchange.forget()
