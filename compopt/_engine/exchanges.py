"""The exchanges of one step: each bucket's generator on its way to ``Agree``, and the order in
which they start.

Ranks must start their collectives in the same order. So the order is a function of the buckets'
numbers alone, whatever the order in which backward finishes gradients, and however much of it runs
in backward: see ``in_order``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._wire.comm import Comm, Pending
from .._wire.control import Control, Words, place_bits
from .._wire.requests import Agree, Commit, CommunicationError, NotSent, Payload, Request

Algorithm = Callable[[Bucket], Generator[Request, object, None]]
Waits = Generator[
    Pending, None, object
]  # yields what it is about to wait for: the simulator's scheduling point


class Exchange:
    """One bucket's generator, and the collective it waits for.

    Where the generator raises before ``Agree``, this rank takes part all the same, as if it had no
    gradients, with a word that says so: the others would wait for it until the group's timeout.
    ``error`` is what was raised."""

    def __init__(
        self,
        bucket: Bucket,
        algorithm: Algorithm,
        comm: Comm,
        early: bool,
        words: dict[str, Words],
        problem: Exception | None = None,
    ):
        self.bucket, self.algorithm, self.comm, self.early = bucket, algorithm, comm, early
        self.words = {"place": place_bits(bucket.index, bucket.group["step"] + 1), **words}
        self.pending: Pending | None = None
        self.agree: Agree | None = None
        self.ready = False  # to commit: what a sharded step gathers after Agree is here
        self.error: Exception | None = None
        self.answers: list[object] = []  # to what the generator has asked for so far
        self.request: Request | None = None
        self.fingerprint: Fingerprint | None = None
        self.generator: Generator[Request, object, None] | None = None
        if problem is None:
            self._read(self._begin)
        else:
            self._take_part(problem)

    @property
    def more(self) -> bool:
        """Whether what is on its way leads to another collective before Agree that need not wait
        for the step.
        """
        return self.pending is not None and self.pending.more

    def proceed(self) -> None:
        """Wait for the collective on its way; then either its second stage is on its way, or the
        generator goes on.
        """
        answer = self.pending.wait()
        if isinstance(answer, Pending):
            self.pending = answer
        else:
            self.answers.append(answer)
            self._read(lambda: self._send(answer))

    def advance(self, answer: object) -> None:
        """Resume the generator up to its next request, and start that."""
        self._start(self._send(answer))

    @property
    def stale(self) -> Tensor:
        """1 where the gradients are not what they were when they were read in backward, 0 where
        they are.
        """
        if self.fingerprint is None:
            return torch.ones(1, dtype=torch.float32, device=self.bucket.device)
        return self.fingerprint.differs()

    def abandon(self) -> None:
        """Close the generator; wait for what is on the wire, whose memory is used again."""
        if self.pending is not None:
            self.pending.drain()
        self._close()
        self.error = None  # whose frames hold this

    def leave(self) -> None:
        """Close the generator and wait for nothing: the memory of what is on the wire is not used
        again.
        """
        if self.pending is not None:
            self.bucket.let_go()
        self._close()
        self.error = None

    def forget(self) -> None:
        """Close the generator; what is on the wire will never come, for its group is gone."""
        if self.pending is not None:
            self.pending.forget()
        self._close()

    def _close(self) -> None:
        if self.generator is not None:
            self.generator.close()

    def _read(self, send: Callable[[], Request]) -> None:
        """``send`` and start what it asks for; take part without gradients where that cannot be
        made.
        """
        try:
            request = send()
        except Exception as error:
            self._take_part(error)
            return
        try:
            self._start(request)
        except NotSent as error:
            self._take_part(error.__cause__)

    def _take_part(self, error: Exception) -> None:
        """Ask again for all that was asked for, without gradients, and send what comes next."""
        if self.error is not None:
            # nothing is known that could be sent: the others hear of it at their timeout
            raise self.error from error
        self.error = error
        answers = [
            answer.clone() if isinstance(answer, Tensor) else answer for answer in self.answers
        ]
        self._read(lambda: self._ask_again(answers))

    def _begin(self) -> Request:
        self.fingerprint = Fingerprint(self.bucket) if self.early else None
        return self._ask_again([])

    def _ask_again(self, answers: list[object]) -> Request:
        """The request of a new generator that has had these answers."""
        self._close()
        self.control = self.bucket.control = Control(
            failed=[float(self.error is not None)], **self.words
        )
        self.generator = self.algorithm(self.bucket)
        request = self._send(None)
        for held in answers:
            request = self._send(request.message if isinstance(held, Payload) else held)
        return request

    def _send(self, answer: object) -> Request:
        self.bucket.withheld = self.error is not None
        try:
            self.request = self.generator.send(answer)
        finally:
            self.bucket.withheld = False
        return self.request

    def _start(self, request: Request) -> None:
        self.ready = isinstance(request, Commit)
        self.agree = request if isinstance(request, Agree) else self.agree
        self.pending = None if isinstance(request, Agree | Commit) else self.comm.start(request)


class Fingerprint:
    """Of a bucket's gradients, taken when they are read: whether they are the same, to the bit,
    when the step begins.

    Version counters would not do: ``p.grad.data`` has one of its own, and Trainer multiplies by 1
    to learn a norm. A tensor's bits are added up as integers, which no change of one element leaves
    alone, and its elements as numbers, which tells what integers miss (of 512 floats twice as large
    the bits add up to the same). Nobody waits for it."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.present, self.sums = self._take()

    def accept_filled(self) -> None:
        """At the end of backward, where DDP gives zeros to a tensor that other ranks use and this
        one does not.
        """
        self.present = [
            now or before for now, before in zip(self._present(), self.present, strict=True)
        ]

    def differs(self) -> Tensor:
        """1 where a gradient has changed, 0 where not, on the bucket's device."""
        present, sums = self._take()
        if present != self.present:
            return torch.ones(1, dtype=torch.float32, device=self.bucket.device)
        return (sums != self.sums).any().view(1).float()

    def _present(self) -> list[bool]:
        return [p.grad is not None for p in self.bucket.params]

    def _take(self) -> tuple[list[bool], Tensor]:
        integers = [torch.zeros((), dtype=torch.int64, device=self.bucket.device)]
        numbers = [torch.zeros((), dtype=torch.float64, device=self.bucket.device)]
        for g in self.bucket.grads():
            flat = (
                integers[0].view(1)
                if g is None or not g.numel()
                else g.detach().contiguous().view(-1)
            )
            integers.append(sum_of_bits(flat))
            numbers.append(flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)).double())
        return self._present(), torch.stack(
            [torch.stack(integers), torch.stack(numbers).view(torch.int64)]
        )


def sum_of_bits(flat: Tensor) -> Tensor:
    """The bits of a vector, added up as integers of its elements' width, at least 32."""
    if flat.itemsize < 4 and (
        len(flat) * flat.itemsize % 4 or flat.storage_offset() * flat.itemsize % 4
    ):
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % (4 // flat.itemsize))).clone()
    dtype = torch.int64 if flat.itemsize == 8 else torch.int32
    return flat.view(dtype).sum(dtype=dtype).long()


@dataclass
class Terms:
    """How exchanges begin now."""

    algorithm: Algorithm
    comm: Comm
    early: bool = False  # in backward
    words: dict[str, Words] = field(default_factory=dict)  # for the last bucket's payload
    problem: Exception | None = None  # why this rank can send nothing

    def begin(self, bucket: Bucket, last: bool) -> Exchange:
        words = self.words if last else {}
        return Exchange(bucket, self.algorithm, self.comm, self.early, words, self.problem)


def in_order(
    buckets: list[Bucket], exchanges: list[Exchange], terms: Terms
) -> Generator[Bucket | Pending, None, None]:
    """The collectives of a step in the order in which all ranks start them: a function of the
    buckets' numbers only.

    Bucket after bucket begins; after each, those before it whose exchange has another stage take
    one, in order. When all have begun the rest follows, in turns. Yields what is about to begin, or
    to be waited for."""
    for bucket in buckets:
        yield bucket
        exchanges.append(terms.begin(bucket, bucket is buckets[-1]))
        for exchange in exchanges[:-1]:
            if exchange.more:
                yield exchange.pending
                exchange.proceed()
    while waiting := [exchange for exchange in exchanges if exchange.agree is None]:
        for exchange in waiting:
            yield exchange.pending
            exchange.proceed()


class Schedule:
    """One step's exchanges, and how far they have come in their order.

    Backward runs as much of it as its gradients allow, but never begins the last bucket; ``step()``
    runs the rest. So ranks of which one has come further in backward still agree."""

    def __init__(self, buckets: list[Bucket], algorithm: Algorithm, comm: Comm):
        self.buckets = buckets
        self.exchanges: list[Exchange] = []
        self.terms = Terms(algorithm, comm)
        self.error: CommunicationError | None = None  # in backward: the step tells it
        self._order = in_order(buckets, self.exchanges, self.terms)
        self._next: Bucket | Pending | None = next(self._order)

    def run_early(self, ready: Callable[[Bucket], bool]) -> None:
        """In backward: as far as gradients are ready. Waits for collectives begun before; a failure
        shows in the step.

        In the simulator ranks take turns, and none may wait for another here.
        """
        self.terms.early = True
        while self.error is None and self._may_go_on(ready):
            try:
                self._next = next(self._order, None)
            except CommunicationError as error:
                self.error = error
        self.terms.early = False

    def _may_go_on(self, ready: Callable[[Bucket], bool]) -> bool:
        if isinstance(self._next, Bucket):
            return self._next is not self.buckets[-1] and ready(self._next)
        return not self._next.in_turns

    def run(self) -> Waits:
        """The rest, until every exchange has come to its Agree."""
        if self.error is not None:
            raise self._take_error()
        while self._next is not None:
            if not isinstance(self._next, Bucket):
                yield self._next
            self._next = next(self._order, None)

    def _take_error(self) -> CommunicationError:
        """Not kept, for its frames hold this object."""
        error, self.error = self.error, None
        return error

    def complete_early(self) -> None:
        """Run all that may run in backward, and give it up: another backward replaces what was
        sent.

        To the end, so that it ends at the same place on ranks of which one had come further.
        """
        self.run_early(lambda bucket: True)
        self.abandon()

    def stale(self) -> list[Tensor]:
        """For each exchange begun in backward, 1 where its gradients are not what they were."""
        return [exchange.stale for exchange in self.exchanges if exchange.early]

    def abandon(self) -> None:
        """Give up what has begun, when it has ended on the wire."""
        self.error = None
        for exchange in self.exchanges:
            exchange.abandon()

    def leave(self) -> None:
        """Give up what has begun, at once."""
        self.error = None
        for exchange in self.exchanges:
            exchange.leave()
