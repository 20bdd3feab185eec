"""Drives the generators of all buckets: read, exchange, agree, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step.
Then the runtime decides for all of them, on numbers every rank holds alike, whether the step is
applied; it resumes all or closes all.

What started in backward (see ``early``) may have gone stale: a clip or an unscale touched the
gradients since. The last bucket's control words say whether that is so on any rank; if so, all
ranks send all others again. No extra collective, no rank alone.
"""

from __future__ import annotations

import torch

from .._state.buckets import Bucket
from .._state.devices import is_accelerator
from .._wire.comm import Comm
from .._wire.control import Words
from .early import Early
from .exchanges import Algorithm, Exchange
from .schedule import Schedule
from .tails import Tails, in_turn
from .turns import Turns
from .verdicts import Verdict, agree_with, judge, judge_shards


class Runtime:
    """The exchanges of one optimizer: started early, running in a step, or with a tail behind its
    commit.
    """

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.tails = Tails()
        self.early = Early(self.tails)
        self.committing: Bucket | None = None

    def begin(self, buckets: list[Bucket], comm: Comm) -> None:
        """In backward: start what can be."""
        self.early.begin(buckets, self.algorithm, comm)

    def forget(self) -> None:
        """Give up everything that is on its way, without waiting: its group is gone."""
        self.tails.forget()
        self.early.forget()

    def agree(
        self,
        buckets: list[Bucket],
        comm: Comm,
        words: dict[str, Words],
        shards: list[Comm],
        problem: Exception | None = None,
    ) -> Turns[Verdict]:
        """All of a step up to the verdict. Raises CommunicationError with nothing applied when a
        collective failed.

        ``words``: what else is to be agreed, by name (see ``control``); "settings" are bits that
        must not differ. ``shards``: the ranks that hold the other parts of this rank's model, if
        any: they step together or not at all. ``problem``: why this rank cannot send its gradients.
        """
        schedule = self.early.take(buckets, self.algorithm, comm)
        again = Schedule(buckets[:-1], self.algorithm, comm) if len(buckets) > 1 else None
        schedule.terms.problem = problem
        try:
            verdict = yield from self._agree(schedule, again, words, not shards)
            sharded = any(exchange.agreement.sharded for exchange in verdict.exchanges)
            if not verdict.of_all:
                self._note_untold(verdict, sharded)
                others = [comm, *shards] if sharded else shards
                yield from agree_with(others, verdict, buckets[-1].device)
            self.early.stopped |= verdict.resent
            if verdict.applied and sharded:
                yield from _gather(verdict.exchanges, verdict.norm)
        except GeneratorExit:
            raise
        except Exception:
            for one in filter(None, (schedule, again)):
                one.abandon()
            raise
        except BaseException:  # whoever interrupts does not want to wait for the wire
            for one in filter(None, (schedule, again)):
                one.leave()
            raise
        if not verdict.applied:
            self.close(verdict)
        return verdict

    @staticmethod
    def close(verdict: Verdict) -> None:
        """Give up every bucket's generator: the step is not applied."""
        for exchange in verdict.exchanges:
            exchange.close()

    @staticmethod
    def _note_untold(verdict: Verdict, sharded: bool) -> None:
        """Where this rank failed after it had sent everything, and so could not say so.

        With sharded state there is one more message before anything is written. Without, the others
        apply the step: it is not applied here, as where the wire fails on one rank only.
        """
        if verdict.failed or all(exchange.error is None for exchange in verdict.exchanges):
            return
        error = None if sharded else verdict.take_error()
        if error is not None:
            raise error
        verdict.failed, verdict.applied = True, False

    @staticmethod
    def _agree(
        schedule: Schedule,
        again: Schedule | None,
        words: dict[str, Words],
        whole: bool,
    ) -> Turns[Verdict]:
        """``whole``: no other ranks hold parts of this rank's model."""
        stale = schedule.stale()
        word: Words = [0.0]
        if stale:
            device = schedule.buckets[-1].device
            word = torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True)
        schedule.terms.words = {"stale": word, **words}
        yield from schedule.run()
        exchanges = schedule.exchanges
        verdict = yield from _judged(exchanges, schedule.terms.comm, whole)
        if verdict.agreed["stale"][0] == 0 or again is None:
            verdict.early = len(stale)
            return verdict
        for exchange in exchanges[:-1]:
            exchange.abandon()
        yield from again.run()
        exchanges = [*again.exchanges, exchanges[-1]]
        verdict = yield from _judged(exchanges, schedule.terms.comm, whole)
        verdict.resent = True
        return verdict

    def commit(self, verdict: Verdict) -> None:
        """Let every bucket apply the step.

        Where it raises, ``committing`` is the bucket that could not.
        """
        for exchange in verdict.exchanges:
            self.committing = exchange.bucket
            self.tails.commit(exchange, verdict.norm)
        self.committing = None
        in_turn(verdict.exchanges, self.tails.commit)


def _judged(exchanges: list[Exchange], comm: Comm, whole: bool) -> Turns[Verdict]:
    """The verdict; of sharded state on a device that of all ranks at once."""
    sharded = any(exchange.agreement.sharded for exchange in exchanges)
    if whole and sharded and is_accelerator(exchanges[-1].bucket.device):
        verdict = yield from judge_shards(exchanges, comm)
        return verdict
    return judge(exchanges)


def _gather(exchanges: list[Exchange], norm: float) -> Turns[None]:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    for exchange in exchanges:
        exchange.advance(norm)
    while waiting := [exchange for exchange in exchanges if not exchange.ready]:
        for exchange in waiting:
            yield exchange.waiting
            exchange.advance(exchange.waiting.wait())
