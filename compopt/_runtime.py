"""Drives the generators of all buckets: read, exchange, agree, commit.

Every bucket's generator runs up to its ``Agree`` without changing anything that outlives the step. Then the runtime
decides for all of them, on numbers every rank holds alike, whether the step is applied; it resumes all or closes all.

A bucket may start in backward, as soon as its gradients are there. The last one never does: it is sent by ``step()``
and its header says whether on any rank an early payload has gone stale (a clip or an unscale touched the gradients
since); if so, all ranks send the early buckets again. No extra collective, no rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._buckets import Bucket
from ._comm import Comm, Pending
from ._control import Control, Words, differ
from ._math import squared_norm
from ._requests import Agree, AllReduceMean, Broadcast, Commit, CommunicationError, Request

Algorithm = Callable[[Bucket], Generator[Request, object, None]]
Waits = Generator[Pending, None, object]  # yields what it is about to wait for: the simulator's scheduling point


class Exchange:
    """One bucket's generator on its way to Agree, and the collective it waits for."""

    def __init__(self, bucket: Bucket, algorithm: Algorithm, comm: Comm):
        self.bucket, self.comm = bucket, comm
        self.generator = algorithm(bucket)
        self.request: Request | None = None
        self.pending: Pending | None = None
        self.agree: Agree | None = None
        self.ready = False  # to commit: what a sharded step gathers after Agree is here
        self.seen: list[tuple[Tensor, int]] | None = None  # gradients and their versions at the end of backward
        self.prints: list[Tensor] | None = None  # sum and norm of each then, where versions have misled before
        self.advance(None)

    def advance(self, answer: object) -> None:
        """Resume the generator up to its next request, and start that."""
        self.request = request = self.generator.send(answer)
        self.ready = isinstance(request, Commit)
        self.agree = request if isinstance(request, Agree) else self.agree
        self.pending = None if isinstance(request, Agree | Commit) else self.comm.start(request)

    def proceed(self) -> None:
        """Wait for the collective on its way; then either its second stage is on its way, or the generator goes on."""
        answer = self.pending.wait()
        if isinstance(answer, Pending):
            self.pending = answer
        else:
            self.advance(answer)

    def note_versions(self, with_prints: bool) -> None:
        self.seen = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.bucket.params]
        self.prints = self._fingerprints() if with_prints else None

    def _fingerprints(self) -> list[Tensor]:
        wide = torch.promote_types(self.bucket.dtype, torch.float32)
        grads = [g for g in self.bucket.grads() if g is not None]
        return [of(g, dtype=wide) for g in grads for of in (torch.sum, torch.linalg.vector_norm)]

    @property
    def stale(self) -> bool:
        """Whether a gradient is not what it was when this bucket's payload was read."""
        if self.seen is None:
            return True
        now = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.bucket.params]
        touched = any(a is not b or v != u for (a, v), (b, u) in zip(self.seen, now, strict=True))
        if not touched or self.prints is None:
            return touched
        prints = self._fingerprints()  # written to, but changed? Trainer multiplies by 1 to learn a norm
        return len(prints) != len(self.prints) or not torch.stack(prints).equal(torch.stack(self.prints))

    def abandon(self) -> None:
        """Close the generator; wait for what is on the wire, whose memory is used again."""
        if self.pending is not None:
            self.pending.drain()
        self.generator.close()


@dataclass
class Verdict:
    """What all ranks decided about one step."""

    applied: bool
    phase_of: dict[int, str] = field(default_factory=dict)  # of each bucket that has compressed tensors
    norm: float = 0.0
    early: int = 0  # buckets whose exchange began in backward and counted
    resent: bool = False  # early payloads were stale and went out again
    changed: bool = False  # and that was no false alarm
    mismatch: bool = False  # a rank has other settings
    agreed: dict[str, list[float]] = field(default_factory=dict)  # the mean over ranks of the last bucket's control
    bad: list[str] = field(default_factory=list)  # tensors with a non-finite gradient on some rank


class Runtime:
    """The exchanges of one optimizer: started early, running in a step, or with a tail behind its commit."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm
        self.early: dict[int, Exchange] = {}
        self.tails: list[Exchange] = []
        self.touched = False  # gradients were written to after a backward: from then on, look whether they changed
        self.changes = False  # they did: nothing is sent in backward any more
        self.lost = False  # a tail failed here, perhaps not on all ranks: payloads may differ in length
        self.unconfirmed = False  # a tail was sent of which all ranks ask each other whether it failed anywhere

    def begin(self, bucket: Bucket, comm: Comm) -> None:
        """Start a bucket in backward. An earlier start of it is given up: a later backward replaces the payload."""
        if self.changes:
            return
        self.settle()
        if self.lost or self.unconfirmed:
            return
        if bucket.index in self.early:
            self.early.pop(bucket.index).abandon()
        self.early[bucket.index] = Exchange(bucket, self.algorithm, comm)

    def proceed(self, buckets: Iterable[int]) -> None:
        """In backward: let exchanges begun before that take several collectives start their next.

        It waits for the one under way, so that all ranks start them in the same order; a failure shows in the step.
        """
        for index in buckets:
            exchange = self.early.get(index)
            if exchange is not None and exchange.pending is not None and exchange.pending.more:
                with contextlib.suppress(CommunicationError):
                    exchange.proceed()

    def note_versions(self) -> None:
        for exchange in self.early.values():
            exchange.note_versions(self.touched)

    def settle(self) -> None:
        """Finish the generators whose last request was sent behind the commit (masks on the wire).

        When that request failed the tail is dropped: it is not part of the step, and the algorithm does without.
        """
        tails, self.tails = self.tails, []
        for exchange in tails:
            try:
                exchange.generator.send(exchange.pending.wait())
            except StopIteration:
                continue
            except CommunicationError:  # or what arrived is not what was agreed
                exchange.generator.close()
                self.lost = True

    def settle_in_turns(self) -> Generator[Pending, None, None]:
        for exchange in self.tails:
            yield exchange.pending
        self.settle()

    def confirm(self, comm: Comm, device: torch.device) -> Waits:
        """Let all ranks know where any has lost a tail of which they rely on each other."""
        if not self.unconfirmed:
            return
        pending = comm.start(AllReduceMean(torch.tensor([float(self.lost)], device=device)))
        yield pending
        self.lost = float(pending.wait()) > 0
        self.unconfirmed = False

    def forget(self) -> None:
        """Give up everything that is on its way, without waiting: its group is gone."""
        for exchange in [*self.tails, *self.early.values()]:
            exchange.generator.close()
            exchange.pending.forget()
        self.tails, self.early, self.unconfirmed = [], {}, False

    def drop_early(self) -> None:
        early, self.early = self.early, {}
        for exchange in early.values():
            exchange.abandon()

    def step(
        self, buckets: list[Bucket], comm: Comm, words: dict[str, Words], shards: list[Comm]
    ) -> Generator[Pending, None, Verdict]:
        """One step of all buckets. Raises CommunicationError with nothing applied when a collective failed.

        ``words``: what else is to be agreed, by name (see ``_control``); "settings" are bits that must not differ.
        ``shards``: the ranks that hold the other parts of this rank's model, if any: they step together or not at all.
        """
        early, self.early = self.early, {}
        stale = any(exchange.stale for exchange in early.values())
        exchanges: list[Exchange] = list(early.values())
        try:
            buckets[-1].control = Control(stale=[float(stale)], **words)
            for bucket in buckets:
                if bucket.index not in early:
                    exchanges.append(Exchange(bucket, self.algorithm, comm))
            exchanges.sort(key=lambda exchange: exchange.bucket.index)
            yield from self._exchange(exchanges)
            norms, agreed = self._read(exchanges)
            resend = agreed["stale"][0] > 0
            if resend:
                for i, exchange in enumerate(exchanges):
                    if exchange.bucket.index in early:
                        exchange.abandon()
                        exchanges[i] = Exchange(exchange.bucket, self.algorithm, comm)
                yield from self._exchange(exchanges)
                norms, agreed = self._read(exchanges)
            verdict = self._judge(exchanges, norms, agreed)
            sharded = any(exchange.agree.sharded for exchange in exchanges)
            yield from self._agree_with([comm, *shards] if sharded else shards, verdict, buckets[-1].device)
            verdict.early, verdict.resent = 0 if resend else len(early), resend
            verdict.changed = self.changes = (resend and self.touched) or self.changes
            self.touched |= resend
            if verdict.applied and sharded:
                yield from self._gather(exchanges, verdict.norm)
        except Exception:
            for exchange in exchanges:
                exchange.abandon()
            raise
        if verdict.applied:
            self._commit(exchanges, verdict.norm)  # a sharded generator has had the norm: it takes no notice of this
        else:
            for exchange in exchanges:
                exchange.generator.close()
        return verdict

    @staticmethod
    def _exchange(exchanges: list[Exchange]) -> Waits:
        """Advance all generators in turn, in the same order on all ranks, until each has come to its Agree."""
        while waiting := [exchange for exchange in exchanges if exchange.agree is None]:
            for exchange in waiting:
                yield exchange.pending
                exchange.proceed()

    @staticmethod
    def _gather(exchanges: list[Exchange], norm: float) -> Waits:
        """Resume sharded generators with the norm, and wait until each has gathered its updated parameters."""
        for exchange in exchanges:
            exchange.advance(norm)
        while waiting := [exchange for exchange in exchanges if not exchange.ready]:
            for exchange in waiting:
                yield exchange.pending
                exchange.advance(exchange.pending.wait())

    @staticmethod
    def _read(exchanges: list[Exchange]) -> tuple[list[float], dict[str, list[float]]]:
        """The squared norm of every bucket's average, and the control words; the payloads' ``marks`` are set.

        All at once, on the host: on a GPU this is where a step waits for the device, and the only place.
        """
        words = []
        for agree in (exchange.agree for exchange in exchanges):
            squared = squared_norm(agree.payload.body) if agree.squared_norm is None else agree.squared_norm
            words += [squared.double().view(1), agree.payload.header.double()]
        words.append(exchanges[-1].agree.payload.control.double())
        numbers = torch.cat([word.to(words[-1].device) for word in words]).tolist()
        norms, at = [], 0
        for payload in (exchange.agree.payload for exchange in exchanges):
            end = at + 1 + len(payload.header)
            norms.append(numbers[at])
            payload.marks, at = numbers[at + 1 : end], end
        return norms, exchanges[-1].bucket.control.read(numbers[at:])

    @staticmethod
    def _judge(exchanges: list[Exchange], norms: list[float], agreed: dict[str, list[float]]) -> Verdict:
        """The verdict, from averaged numbers that are the same on every rank."""
        verdict = Verdict(applied=True, agreed=agreed)
        total = 0.0
        for exchange, squared in zip(exchanges, norms, strict=True):
            marks = exchange.agree.payload.marks
            verdict.bad += [name for name, mark in zip(exchange.bucket.names, marks, strict=True) if mark != mark]
            total += squared / exchange.bucket.copies
            if any(exchange.bucket.compressed):
                verdict.phase_of[exchange.bucket.index] = exchange.agree.phase
        verdict.mismatch = differ(agreed["settings"])
        verdict.norm = total**0.5
        if total != total or total == float("inf"):
            verdict.bad = verdict.bad or ["the average over ranks"]
        verdict.applied = not verdict.bad and not verdict.mismatch
        return verdict

    @staticmethod
    def _agree_with(shards: list[Comm], verdict: Verdict, device: torch.device) -> Waits:
        """One norm and one verdict over all shards of a model, summed along one dimension of its mesh after another."""
        if not shards:
            return
        words = [0.0 if verdict.bad else verdict.norm**2, float(bool(verdict.bad)), float(verdict.mismatch)]
        message = torch.tensor(words, dtype=torch.float64, device=device)
        for comm in shards:
            pending = comm.start(AllReduceMean(message))
            yield pending
            message = pending.wait() * comm.size
        squared, bad, mismatch = message.tolist()
        verdict.norm, verdict.mismatch = squared**0.5, mismatch > 0
        verdict.bad = verdict.bad or (["a tensor of another shard"] if bad else [])
        verdict.applied = not verdict.bad and not verdict.mismatch

    def _commit(self, exchanges: list[Exchange], norm: float) -> None:
        for exchange in exchanges:
            try:
                exchange.advance(norm)
            except StopIteration:
                continue
            except CommunicationError:  # the step is applied; only what was to follow it is lost
                exchange.generator.close()
                self.lost = True
            else:
                self.tails.append(exchange)
            self.unconfirmed |= isinstance(exchange.request, Broadcast) and exchange.request.confirm
