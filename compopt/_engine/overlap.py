"""Exchanges outside ``step()``: those that start in backward, and those that follow the commit.

A bucket's exchange may start in backward, as soon as its gradients are complete. The last bucket's
never does: ``step()`` sends it, and its control fields report whether any rank's payloads from
backward are stale. The next step waits for post-commit exchanges, which send masks.

``Engine`` owns both; ``step`` starts, takes and finishes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .._state.bucket import Bucket
from .._wire.collectives import Communicator
from .._wire.requests import Broadcast, CommunicationError
from .exchange import Algorithm, BucketExchange, ExchangeSchedule, run_batched_requests


class PostCommitExchanges:
    """The exchanges that have committed, with their last request in flight."""

    def __init__(self) -> None:
        self.exchanges: list[BucketExchange] = []
        # an exchange failed on this rank, perhaps not on all: their payloads may differ in length
        self.lost = False
        # ranks still have to tell each other whether an exchange failed
        self.unconfirmed = False

    def add(self, exchange: BucketExchange) -> None:
        """Keep an exchange that has committed. It failed if its request is not in flight: the step
        is applied, only what follows it is lost.
        """
        if exchange.is_in_flight:
            self.exchanges.append(exchange)
        else:
            exchange.close()
            self.lost = True
        request = exchange.request
        self.unconfirmed |= isinstance(request, Broadcast) and request.confirm

    def finish(self) -> None:
        """Wait for all exchanges, and resume their generators to the end.

        A failed one is dropped: the step does not depend on it.
        """
        exchanges, self.exchanges = self.exchanges, []
        for exchange in exchanges:
            try:
                exchange.resume_post_commit(exchange.in_flight.wait())
            except CommunicationError:
                exchange.close()
                self.lost = True
        run_batched_requests(exchanges, BucketExchange.resume_post_commit)

    def forget(self) -> None:
        """Drop all exchanges without waiting: their group is gone."""
        for exchange in self.exchanges:
            exchange.forget()
        self.exchanges, self.unconfirmed = [], False


class BackwardOverlap:
    """The gradients that the running backward has finished, and the schedule it has started."""

    def __init__(self, post_commit: PostCommitExchanges):
        self.schedule: ExchangeSchedule | None = None  # the schedule of the coming step
        # gradients changed after a backward: start nothing in backward any more
        self.is_stopped = False
        self._post_commit = post_commit
        # parameters whose gradients the running backward has finished, by bucket
        self._finished: dict[int, set[Tensor]] = {}
        self._is_same_backward = False  # the running backward has started the schedule
        # the backwards since the last step, and the most that a step had
        self._backwards, self._most_backwards = 0, 1

    @property
    def is_idle(self) -> bool:
        """True if the running backward has finished no gradient so far."""
        return not self._finished

    def is_ready(self, bucket: Bucket) -> bool:
        """Return True if backward has finished all gradients of ``bucket``."""
        return len(self._finished.get(bucket.index, ())) == len(bucket.params)

    def start_ready(
        self,
        finished: Iterable[tuple[Tensor, Bucket]],
        buckets: list[Bucket],
        algorithm: Algorithm,
        comm: Communicator,
        restarts: bool = True,
    ) -> None:
        """Start the exchanges of complete buckets, in the order that all ranks share.

        ``finished``: parameters whose gradients backward has just finished, with their buckets. If
        a later backward of the same step completes the first bucket, all payloads are sent anew.
        Unless a backward ``restarts`` them: other ranks may run fewer. A step then has one start,
        in the last backward of as many as steps have had.
        """
        for p, bucket in finished:
            self._finished.setdefault(bucket.index, set()).add(p)
        post_commit = self._post_commit
        has_error = self.schedule is not None and self.schedule.error is not None
        if self.is_stopped or post_commit.lost or has_error or len(buckets) == 1:
            return
        is_new = not self._is_same_backward and self.is_ready(buckets[0])
        if not restarts:
            is_last = self._backwards + 1 == self._most_backwards
            is_new = is_new and is_last and self.schedule is None
        if self.schedule is None and not is_new:
            return
        try:
            if is_new:
                post_commit.finish()
                if not (post_commit.lost or post_commit.unconfirmed):
                    if self.schedule is not None:
                        # ranks may have started different numbers of exchanges: start all but the
                        # last on every rank, then abandon them
                        self.schedule.run_in_backward(lambda bucket: True)
                        self.schedule.abandon()
                    self.schedule = ExchangeSchedule(buckets, algorithm, comm)
                    self._is_same_backward = True
            if self.schedule is not None:
                self.schedule.run_in_backward(self.is_ready)
        except BaseException:
            post_commit.lost = True  # other ranks may have come further
            raise

    def on_backward_end(self) -> None:
        """Note that backward has ended: another one that completes all gradients replaces the
        payloads.
        """
        self._finished.clear()
        self._is_same_backward = False
        self._backwards += 1
        if self.schedule is None:
            return
        for exchange in self.schedule.exchanges:
            if exchange.staleness is not None:
                exchange.staleness.accept_zeros_of_ddp()

    def on_step_end(self) -> None:
        self._most_backwards = max(self._most_backwards, self._backwards)
        self._backwards = 0

    def take_schedule(self) -> ExchangeSchedule | None:
        """Return the schedule that backward started, if it did: ``step()`` runs the rest of it."""
        schedule, self.schedule = self.schedule, None
        self._is_same_backward = False
        return schedule

    def discard(self) -> None:
        """Abandon the schedule that backward started: its payloads are stale, because state was
        loaded or laid out again, or because ranks have to be verified first.
        """
        if (schedule := self.take_schedule()) is not None:
            schedule.abandon()

    def forget(self) -> None:
        """Drop the schedule without waiting: its group is gone."""
        if (schedule := self.take_schedule()) is not None:
            for exchange in schedule.exchanges:
                exchange.forget()
