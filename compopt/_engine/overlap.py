"""Exchanges outside ``step()``: those that start in backward, and those that follow the commit.

A bucket's exchange may start in backward, as soon as its gradients are complete. The last bucket's
never does: ``step()`` sends it, and its control fields report whether any rank's payloads from
backward are stale. The next step waits for post-commit exchanges, which send masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from .._state.buckets import Bucket
from .._wire.collectives import Communicator
from .._wire.requests import Answer, Broadcast, CommunicationError, RunBatched
from .exchange import Algorithm, BucketExchange, ExchangeSchedule


class PostCommitExchanges:
    """The exchanges that have committed, with their last request in flight."""

    def __init__(self) -> None:
        self.exchanges: list[BucketExchange] = []
        # an exchange failed on this rank, perhaps not on all: their payloads may differ in length
        self.lost = False
        # ranks still have to tell each other whether an exchange failed
        self.unconfirmed = False

    def commit_bucket(self, exchange: BucketExchange, answer: Answer) -> None:
        """Resume the generator of one bucket, which applies the step. It stops at a ``RunBatched``,
        which the caller runs for all buckets, or at a post-commit exchange, which is kept here.
        """
        try:
            # Unsharded: resumed at Agree with the norm. Sharded: at ReadyToCommit, which has
            # no answer.
            exchange.resume_and_start_next(answer)
        except StopIteration:
            return
        except CommunicationError:  # the step is applied; only the exchange after it is lost
            exchange.close()
            self.lost = True
        else:
            if not isinstance(exchange.request, RunBatched):
                self.exchanges.append(exchange)
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


def run_batched_requests(
    exchanges: Sequence[BucketExchange], resume: Callable[[BucketExchange, Answer], None]
) -> None:
    """Run what buckets have requested, all of one function in one launch, until none requests more;
    ``resume`` passes answers on.
    """
    while pairs := [(e, e.request) for e in exchanges if isinstance(e.request, RunBatched)]:
        first = pairs[0][1]
        waiting = [(e, request) for e, request in pairs if request.reference is first.reference]
        fused = first.ops.find_batched(first.reference, first.bucket)
        assert fused is not None
        calls = [(request.bucket, *request.args) for _, request in waiting]
        answers = fused.run(first.ops, calls)
        for (exchange, _), answer in zip(waiting, answers, strict=True):
            exchange.request = None
            resume(exchange, answer)


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
    ) -> None:
        """Start the exchanges of complete buckets, in the order that all ranks share.

        ``finished``: parameters whose gradients backward has just finished, with their buckets. If
        a later backward of the same step completes the first bucket, all payloads are sent anew.
        """
        for p, bucket in finished:
            self._finished.setdefault(bucket.index, set()).add(p)
        post_commit = self._post_commit
        has_error = self.schedule is not None and self.schedule.error is not None
        if self.is_stopped or post_commit.lost or has_error or len(buckets) == 1:
            return
        is_new = not self._is_same_backward and self.is_ready(buckets[0])
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
        if self.schedule is None:
            return
        for exchange in self.schedule.exchanges:
            if exchange.staleness is not None:
                exchange.staleness.accept_zeros_of_ddp()

    def take_schedule(
        self, buckets: list[Bucket], algorithm: Algorithm, comm: Communicator
    ) -> ExchangeSchedule:
        """Return the schedule for ``step()``: the one that backward started, or a new one."""
        schedule, self.schedule = self.schedule, None
        self._is_same_backward = False
        return schedule or ExchangeSchedule(buckets, algorithm, comm)

    def discard(self) -> None:
        """Abandon the schedule that backward started."""
        schedule, self.schedule = self.schedule, None
        self._is_same_backward = False
        if schedule is not None:
            schedule.abandon()

    def forget(self) -> None:
        """Drop the schedule without waiting: its group is gone."""
        schedule, self.schedule = self.schedule, None
        if schedule is not None:
            for exchange in schedule.exchanges:
                exchange.forget()
