"""Drives the generators of all buckets: read, exchange, agree, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step.
Then the runtime decides for all of them, on numbers every rank holds alike, whether the step is
applied; it resumes all or closes all.

A bucket may start in backward, as soon as its gradients are there. The last one never does: it is
sent by ``step()`` and its control words say whether on any rank an early payload has gone stale (a
clip or an unscale touched the gradients since); if so, all ranks send all others again. No extra
collective, no rank alone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from .._ops.math import squared_norm, squared_norm_alike
from .._state.buckets import Bucket
from .._wire.comm import Comm, Pending
from .._wire.control import Words, differ
from .._wire.requests import AllReduceMean, Broadcast, CommunicationError
from .exchanges import Algorithm, Exchange, Schedule, Waits


@dataclass
class Verdict:
    """What all ranks decided about one step."""

    applied: bool = True
    exchanges: list[Exchange] = field(default_factory=list)
    phase_of: dict[int, str] = field(
        default_factory=dict
    )  # of each bucket that has compressed tensors
    norm: float = 0.0
    early: int = 0  # buckets whose exchange began in backward and counted
    resent: bool = False  # early payloads were stale and went out again
    mismatch: bool = False  # a rank has other settings
    failed: bool = False  # a rank could not read its gradients
    misplaced: list[int] = field(
        default_factory=list
    )  # buckets whose payload met one of another bucket or step
    agreed: dict[str, list[float]] = field(
        default_factory=dict
    )  # the mean over ranks of the last bucket's control
    bad: list[str] = field(default_factory=list)  # tensors with a non-finite gradient on some rank

    def take_error(self, known: Exception | None = None) -> Exception | None:
        """Why this rank could not read its gradients, unless that is ``known``.

        Not kept: its frames hold this.
        """
        errors = [exchange.error for exchange in self.exchanges if exchange.error is not None]
        for exchange in self.exchanges:
            exchange.error = None
        return known or (errors[0] if errors else None)


class Runtime:
    """The exchanges of one optimizer: started early, running in a step, or with a tail behind its
    commit.
    """

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.schedule: Schedule | None = None  # of the step that comes, begun in backward
        self.tails: list[Exchange] = []
        self.committing: Bucket | None = None
        self.changes = (
            False  # gradients changed after a backward: nothing is sent in backward any more
        )
        self.lost = (
            False  # something failed here, perhaps not on all ranks: payloads may differ in length
        )
        self.unconfirmed = (
            False  # a tail was sent of which all ranks ask each other whether it failed anywhere
        )
        self._same_backward = False  # the schedule began in the backward that is running

    # In backward

    def begin(self, buckets: list[Bucket], comm: Comm, ready: Callable[[Bucket], bool]) -> None:
        """Start what can be.

        Where the first bucket is complete again, a later backward replaces all payloads.
        """
        failed = self.lost or (self.schedule is not None and self.schedule.error is not None)
        if self.changes or failed or len(buckets) == 1:
            return
        fresh = not self._same_backward and ready(buckets[0])
        if self.schedule is None and not fresh:
            return
        try:
            if fresh:
                self._begin_anew(buckets, comm)
            if self.schedule is not None:
                self.schedule.run_early(ready)
        except BaseException:
            self.lost = True  # other ranks may have come further
            raise

    def _begin_anew(self, buckets: list[Bucket], comm: Comm) -> None:
        self.settle()
        if self.lost or self.unconfirmed:
            return
        if self.schedule is not None:
            self.schedule.complete_early()
        self.schedule = Schedule(buckets, self.algorithm, comm)
        self._same_backward = True

    def backward_done(self) -> None:
        self._same_backward = False
        for exchange in self.schedule.exchanges if self.schedule else ():
            if exchange.fingerprint is not None:
                exchange.fingerprint.accept_filled()

    # Between steps

    def settle(self) -> None:
        """Finish the generators whose last request was sent behind the commit (masks on the wire).

        When that request failed the tail is dropped: it is not part of the step, and the algorithm
        does without."""
        tails, self.tails = self.tails, []
        for exchange in tails:
            try:
                exchange.generator.send(exchange.pending.wait())
            except StopIteration:
                continue
            except CommunicationError:  # or what arrived is not what was agreed
                exchange.generator.close()
                self.lost = True

    def settle_in_turns(self) -> Waits:
        for exchange in self.tails:
            yield exchange.pending
        self.settle()

    def confirm(self, comm: Comm, device: torch.device) -> Waits:
        """Let all ranks know where any has lost a tail of which they rely on each other."""
        if not self.unconfirmed or comm.size == 1:
            self.unconfirmed = False
            return
        pending = comm.start(
            AllReduceMean(torch.tensor([float(self.lost)], dtype=torch.float32, device=device))
        )
        yield pending
        self.lost = float(pending.wait()) > 0
        self.unconfirmed = False

    def forget(self) -> None:
        """Give up everything that is on its way, without waiting: its group is gone."""
        schedule, self.schedule = self.schedule, None
        for exchange in [*self.tails, *(schedule.exchanges if schedule else ())]:
            exchange.forget()
        self.tails, self.unconfirmed = [], False

    def drop_early(self) -> None:
        schedule, self.schedule = self.schedule, None
        self._same_backward = False
        if schedule is not None:
            schedule.abandon()

    # In a step

    def agree(
        self,
        buckets: list[Bucket],
        comm: Comm,
        words: dict[str, Words],
        shards: list[Comm],
        problem: Exception | None = None,
    ) -> Generator[Pending, None, Verdict]:
        """All of a step up to the verdict. Raises CommunicationError with nothing applied when a
        collective failed.

        ``words``: what else is to be agreed, by name (see ``control``); "settings" are bits that
        must not differ. ``shards``: the ranks that hold the other parts of this rank's model, if
        any: they step together or not at all. ``problem``: why this rank cannot send its gradients.
        """
        schedule, self.schedule = self.schedule or Schedule(buckets, self.algorithm, comm), None
        self._same_backward = False
        again = Schedule(buckets[:-1], self.algorithm, comm) if len(buckets) > 1 else None
        schedule.terms.problem = problem
        try:
            verdict = yield from self._agree(schedule, again, words)
            sharded = any(exchange.agree.sharded for exchange in verdict.exchanges)
            self._note_untold(verdict, sharded)
            yield from _agree_with(
                [comm, *shards] if sharded else shards, verdict, buckets[-1].device
            )
            self.changes |= verdict.resent
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
            for exchange in verdict.exchanges:
                exchange.generator.close()
        return verdict

    @staticmethod
    def _note_untold(verdict: Verdict, sharded: bool) -> None:
        """Where this rank failed after it had sent everything, and so could not say so.

        With sharded state there is one more message before anything is written. Without, the others
        apply the step: it is not applied here, as where the wire fails on one rank only."""
        if verdict.failed or all(exchange.error is None for exchange in verdict.exchanges):
            return
        if not sharded:
            raise verdict.take_error()
        verdict.failed, verdict.applied = True, False

    @staticmethod
    def _agree(
        schedule: Schedule, again: Schedule | None, words: dict[str, Words]
    ) -> Generator[Pending, None, Verdict]:
        stale = schedule.stale()
        device = schedule.buckets[-1].device
        word = (
            torch.cat([one.to(device) for one in stale]).amax(0, keepdim=True) if stale else [0.0]
        )
        schedule.terms.words = {"stale": word, **words}
        yield from schedule.run()
        exchanges = schedule.exchanges
        verdict = _judge(exchanges, *_read(exchanges))
        if verdict.agreed["stale"][0] == 0:
            verdict.early = len(stale)
            return verdict
        for exchange in exchanges[:-1]:
            exchange.abandon()
        yield from again.run()
        exchanges = [*again.exchanges, exchanges[-1]]
        verdict = _judge(exchanges, *_read(exchanges))
        verdict.resent = True
        return verdict

    def commit(self, verdict: Verdict) -> None:
        """Let every bucket apply the step.

        Where it raises, ``committing`` is the bucket that could not.
        """
        for exchange in verdict.exchanges:
            self.committing = exchange.bucket
            try:
                exchange.advance(
                    verdict.norm
                )  # a sharded generator has had the norm: it takes no notice of this
            except StopIteration:
                continue
            except CommunicationError:  # the step is applied; only what was to follow it is lost
                exchange.generator.close()
                self.lost = True
            else:
                self.tails.append(exchange)
            self.unconfirmed |= isinstance(exchange.request, Broadcast) and exchange.request.confirm
        self.committing = None


Numbers = tuple[list[float], list[dict[str, list[float]]]]


def _read(exchanges: list[Exchange]) -> Numbers:
    """The squared norm of every bucket's average, and its control words; the payloads' ``marks``
    are set.

    All at once, on the host: on a GPU this is where a step waits for the device, and the only
    place."""
    parts = []
    clips = any(exchange.bucket.group.get("max_grad_norm") is not None for exchange in exchanges)
    norm_of = (
        squared_norm_alike if clips else squared_norm
    )  # every rank clips by the norm it finds itself
    for agree in (exchange.agree for exchange in exchanges):
        squared = norm_of(agree.payload.body) if agree.squared_norm is None else agree.squared_norm
        parts += [
            squared.double().view(1),
            agree.payload.header.double(),
            agree.payload.control.double(),
        ]
    numbers = torch.cat([part.to(parts[-1].device) for part in parts]).tolist()
    norms, controls, at = [], [], 0
    for exchange in exchanges:
        payload = exchange.agree.payload
        norms.append(numbers[at])
        middle = at + 1 + len(payload.header)
        end = middle + len(payload.control)
        payload.marks = numbers[at + 1 : middle]
        controls.append(exchange.control.read(numbers[middle:end]))
        at = end
    return norms, controls


def _judge(
    exchanges: list[Exchange], norms: list[float], controls: list[dict[str, list[float]]]
) -> Verdict:
    """The verdict, from averaged numbers that are the same on every rank."""
    verdict = Verdict(exchanges=exchanges, agreed=controls[-1])
    total = 0.0
    for exchange, squared, control in zip(exchanges, norms, controls, strict=True):
        marks = exchange.agree.payload.marks
        verdict.bad += [
            name for name, mark in zip(exchange.bucket.names, marks, strict=True) if mark != mark
        ]
        verdict.failed |= control["failed"][0] > 0
        verdict.misplaced += [exchange.bucket.index] if differ(control["place"]) else []
        total += squared / exchange.bucket.copies
        if any(exchange.bucket.compressed):
            verdict.phase_of[exchange.bucket.index] = exchange.agree.phase
    verdict.mismatch = differ(verdict.agreed["settings"])
    verdict.norm = total**0.5
    if total != total or total == float("inf"):
        verdict.bad = verdict.bad or ["the average over ranks"]
    verdict.applied = not (verdict.bad or verdict.mismatch or verdict.failed or verdict.misplaced)
    return verdict


def _agree_with(shards: list[Comm], verdict: Verdict, device: torch.device) -> Waits:
    """One norm and one verdict over all shards of a model, summed along one dimension of its mesh
    after another.
    """
    if not shards:
        return
    facts = [verdict.bad, verdict.mismatch, verdict.failed, verdict.misplaced]
    words = [0.0 if verdict.bad else verdict.norm**2, *(float(bool(fact)) for fact in facts)]
    message = torch.tensor(words, dtype=torch.float64, device=device)
    for comm in shards:
        pending = comm.start(AllReduceMean(message))
        yield pending
        message = pending.wait() * comm.size
    squared, bad, mismatch, failed, misplaced = message.tolist()
    verdict.norm, verdict.mismatch, verdict.failed = squared**0.5, mismatch > 0, failed > 0
    verdict.bad = verdict.bad or (["a tensor of another shard"] if bad else [])
    verdict.misplaced = verdict.misplaced or ([-1] if misplaced else [])
    verdict.applied = not (bad or mismatch or failed or misplaced)


def _gather(exchanges: list[Exchange], norm: float) -> Waits:
    """Resume sharded generators with the norm, and wait until each has gathered its updated
    parameters.
    """
    for exchange in exchanges:
        exchange.advance(norm)
    while waiting := [exchange for exchange in exchanges if not exchange.ready]:
        for exchange in waiting:
            yield exchange.pending
            exchange.advance(exchange.pending.wait())
