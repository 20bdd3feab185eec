"""Drives the generators of all buckets: read, exchange, agree, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step.
Then the runtime decides for all of them, on numbers every rank holds alike, whether the step is
applied; it resumes all or closes all.

What started in backward (see ``overlap``) may have gone stale: a clip or an unscale touched the
gradients since. The last bucket's control words say whether that is so on any rank; if so, all
ranks send all others again. No extra collective, no rank alone.
"""

from __future__ import annotations

import torch

from .._state.buckets import Bucket
from .._wire.comm import Comm
from .._wire.control import Words
from .decision import StepDecision, combine_decisions, read_decision
from .exchange import Algorithm, Exchange, ExchangeSchedule
from .overlap import BackwardOverlap, PostCommitExchanges, resume_together
from .turns import Turns


class Runtime:
    """The exchanges of one optimizer: started early, running in a step, or with a tail behind its
    commit.
    """

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.post_commit = PostCommitExchanges()
        self.overlap = BackwardOverlap(self.post_commit)
        self.committing: Bucket | None = None

    def begin(self, buckets: list[Bucket], comm: Comm) -> None:
        """In backward: start what can be."""
        self.overlap.start_ready(buckets, self.algorithm, comm)

    def forget(self) -> None:
        """Give up everything that is on its way, without waiting: its group is gone."""
        self.post_commit.forget()
        self.overlap.forget()

    def agree(
        self,
        buckets: list[Bucket],
        comm: Comm,
        words: dict[str, Words],
        shards: list[Comm],
        problem: Exception | None = None,
    ) -> Turns[StepDecision]:
        """All of a step up to the decision. Raises CommunicationError with nothing applied when a
        collective failed.

        ``words``: what else is to be agreed, by name (see ``control``); "settings" are bits that
        must not differ. ``shards``: the ranks that hold the other parts of this rank's model, if
        any: they step together or not at all. ``problem``: why this rank cannot send its gradients.
        """
        schedule = self.overlap.take_schedule(buckets, self.algorithm, comm)
        again = ExchangeSchedule(buckets[:-1], self.algorithm, comm) if len(buckets) > 1 else None
        schedule.terms.problem = problem
        try:
            decision = yield from self._agree(schedule, again, words)
            sharded = any(exchange.agreement.sharded for exchange in decision.exchanges)
            self._note_late_error(decision, sharded)
            others = [comm, *shards] if sharded else shards
            yield from combine_decisions(decision, others, buckets[-1].device)
            self.overlap.is_stopped |= decision.resent
            if decision.applied and sharded:
                yield from _gather(decision.exchanges, decision.norm)
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
        if not decision.applied:
            self.close(decision)
        return decision

    @staticmethod
    def close(decision: StepDecision) -> None:
        """Give up every bucket's generator: the step is not applied."""
        for exchange in decision.exchanges:
            exchange.close()

    @staticmethod
    def _note_late_error(decision: StepDecision, sharded: bool) -> None:
        """Note that this rank failed after it had sent everything, and so could not say so.

        With sharded state one more message follows before anything is written. Without it the other
        ranks apply the step, and it is not applied here, as where a collective fails on one rank
        only.
        """
        if decision.unsent or all(exchange.error is None for exchange in decision.exchanges):
            return
        error = None if sharded else decision.take_error()
        if error is not None:
            raise error
        decision.unsent = True

    @staticmethod
    def _agree(
        schedule: ExchangeSchedule, again: ExchangeSchedule | None, words: dict[str, Words]
    ) -> Turns[StepDecision]:
        """Exchange everything, once more where on any rank it is stale, and decide."""
        stale = schedule.measure_staleness()
        word: Words = [0.0]
        if stale:
            device = schedule.buckets[-1].device
            word = torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True)
        schedule.terms.fields = {"stale": word, **words}
        yield from schedule.run()
        exchanges = schedule.exchanges
        decision = read_decision(exchanges)
        if decision.agreed["stale"][0] == 0 or again is None:
            decision.early_buckets = len(stale)
            return decision
        for exchange in exchanges[:-1]:
            exchange.abandon()
        yield from again.run()
        decision = read_decision([*again.exchanges, exchanges[-1]])
        decision.resent = True
        return decision

    def commit(self, decision: StepDecision) -> None:
        """Let every bucket apply the step.

        Where it raises, ``committing`` is the bucket that could not.
        """
        for exchange in decision.exchanges:
            self.committing = exchange.bucket
            self.post_commit.commit_bucket(exchange, decision.norm)
        self.committing = None
        resume_together(decision.exchanges, self.post_commit.commit_bucket)


def _gather(exchanges: list[Exchange], norm: float) -> Turns[None]:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    for exchange in exchanges:
        exchange.resume(norm)
    while waiting := [exchange for exchange in exchanges if not exchange.is_ready_to_commit]:
        for exchange in waiting:
            yield exchange.in_flight
            exchange.resume(exchange.in_flight.wait())
