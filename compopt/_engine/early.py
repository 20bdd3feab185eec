"""What of a step is on its way before ``step()`` is called: begun in backward.

A bucket may start in backward, as soon as its gradients are there. The last one never does: it is
sent by ``step()``, and says whether on any rank what went out early has gone stale.
"""

from __future__ import annotations

from torch import Tensor

from .._state.buckets import Bucket
from .._wire.comm import Comm
from .exchanges import Algorithm
from .schedule import Schedule
from .tails import Tails


class Early:
    """Which gradients the running backward has finished, and the exchanges it has begun."""

    def __init__(self, tails: Tails):
        self.schedule: Schedule | None = None  # of the step that comes
        # gradients changed after a backward: nothing is sent in backward any more
        self.stopped = False
        self._tails = tails
        self._finished: dict[int, set[Tensor]] = {}  # by the running backward, a bucket
        self._same_backward = False  # the schedule began in the backward that is running

    @property
    def silent(self) -> bool:
        """Whether the running backward has finished nothing so far."""
        return not self._finished

    def finished(self, p: Tensor, bucket: Bucket) -> None:
        """Backward has finished the gradient of ``p``."""
        self._finished.setdefault(bucket.index, set()).add(p)

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether backward has finished all gradients of ``bucket``."""
        return len(self._finished.get(bucket.index, ())) == len(bucket.params)

    def begin(self, buckets: list[Bucket], algorithm: Algorithm, comm: Comm) -> None:
        """Start what can be.

        Where the first bucket is complete again, a later backward replaces all payloads.
        """
        if self.stopped or self._failed() or len(buckets) == 1:
            return
        fresh = not self._same_backward and self.is_ready(buckets[0])
        if self.schedule is None and not fresh:
            return
        try:
            if fresh:
                self._begin_anew(buckets, algorithm, comm)
            if self.schedule is not None:
                self.schedule.run_early(self.is_ready)
        except BaseException:
            self._tails.lost = True  # other ranks may have come further
            raise

    def _failed(self) -> bool:
        failed = self.schedule is not None and self.schedule.error is not None
        return self._tails.lost or failed

    def _begin_anew(self, buckets: list[Bucket], algorithm: Algorithm, comm: Comm) -> None:
        self._tails.settle()
        if self._tails.lost or self._tails.unconfirmed:
            return
        if self.schedule is not None:
            self.schedule.complete_early()
        self.schedule = Schedule(buckets, algorithm, comm)
        self._same_backward = True

    def backward_done(self) -> None:
        """The backward that started buckets has ended: another one that completes them all replaces
        what they sent.
        """
        self._finished.clear()
        self._same_backward = False
        for exchange in self.schedule.exchanges if self.schedule else ():
            if exchange.fingerprint is not None:
                exchange.fingerprint.accept_filled()

    def take(self, buckets: list[Bucket], algorithm: Algorithm, comm: Comm) -> Schedule:
        """What was begun, for the step to go on with; where nothing was, one that begins."""
        schedule, self.schedule = self.schedule, None
        self._same_backward = False
        return schedule or Schedule(buckets, algorithm, comm)

    def drop(self) -> None:
        """Give up what was begun."""
        schedule, self.schedule = self.schedule, None
        self._same_backward = False
        if schedule is not None:
            schedule.abandon()

    def forget(self) -> None:
        """Give up what was begun without waiting: its group is gone."""
        schedule, self.schedule = self.schedule, None
        for exchange in schedule.exchanges if schedule else ():
            exchange.forget()
