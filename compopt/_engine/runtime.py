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
from .._wire.comm import Comm
from .._wire.control import Words
from .decision import StepDecision, combine_decisions, read_decision
from .early import Early
from .exchanges import Algorithm, Exchange
from .schedule import Schedule
from .tails import Tails, in_turn
from .turns import Turns


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
    ) -> Turns[StepDecision]:
        """All of a step up to the decision. Raises CommunicationError with nothing applied when a
        collective failed.

        ``words``: what else is to be agreed, by name (see ``control``); "settings" are bits that
        must not differ. ``shards``: the ranks that hold the other parts of this rank's model, if
        any: they step together or not at all. ``problem``: why this rank cannot send its gradients.
        """
        schedule = self.early.take(buckets, self.algorithm, comm)
        again = Schedule(buckets[:-1], self.algorithm, comm) if len(buckets) > 1 else None
        schedule.terms.problem = problem
        try:
            decision = yield from self._agree(schedule, again, words)
            sharded = any(exchange.agreement.sharded for exchange in decision.exchanges)
            self._note_late_error(decision, sharded)
            others = [comm, *shards] if sharded else shards
            yield from combine_decisions(decision, others, buckets[-1].device)
            self.early.stopped |= decision.resent
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
        schedule: Schedule, again: Schedule | None, words: dict[str, Words]
    ) -> Turns[StepDecision]:
        """Exchange everything, once more where on any rank it is stale, and decide."""
        stale = schedule.stale()
        word: Words = [0.0]
        if stale:
            device = schedule.buckets[-1].device
            word = torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True)
        schedule.terms.words = {"stale": word, **words}
        yield from schedule.run()
        exchanges = schedule.exchanges
        decision = read_decision(exchanges)
        if decision.agreed["stale"][0] == 0 or again is None:
            decision.early = len(stale)
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
            self.tails.commit(exchange, decision.norm)
        self.committing = None
        in_turn(decision.exchanges, self.tails.commit)


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
