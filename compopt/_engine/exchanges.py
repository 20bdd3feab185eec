"""One bucket's generator on its way to ``Agree``, and the collective it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._wire.comm import Comm
from .._wire.control import Control, Words, place_bits
from .._wire.pending import Pending
from .._wire.requests import (
    Agree,
    AllReduceMean,
    Answer,
    Asking,
    Commit,
    NotSent,
    Payload,
    Read,
    Request,
    Together,
)
from .fingerprint import Fingerprint

Algorithm = Callable[[Bucket], Asking[None]]


class Exchange:
    """One bucket's generator, and the collective it waits for.

    Where the generator raises before ``Agree``, this rank takes part all the same, as if it had no
    gradients, with a word that says so: the others would wait for it until the group's timeout.
    ``error`` is what was raised.
    """

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
        self.control = Control()
        self.pending: Pending | None = None
        self.agree: Agree | None = None
        self.ready = False  # to commit: what a sharded step gathers after Agree is here
        self.error: Exception | None = None
        self.answers: list[Answer] = []  # to what the generator has asked for so far
        self.request: Request | None = None
        self.fingerprint: Fingerprint | None = None
        self.generator: Asking[None] | None = None
        if problem is None:
            self._read(self._begin)
        else:
            self._take_part(problem)

    @property
    def waiting(self) -> Pending:
        """What is on its way; only where something is."""
        assert self.pending is not None
        return self.pending

    @property
    def agreement(self) -> Agree:
        """What the generator has come to; only where it has."""
        assert self.agree is not None
        return self.agree

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
        answer = self.waiting.wait()
        if isinstance(answer, Pending):
            self.pending = answer
        else:
            self.answers.append(answer)
            self._read(lambda: self._send(answer))

    @property
    def reading(self) -> Tensor | None:
        """The numbers that the host has to know next, if any."""
        return self.request.tensor if isinstance(self.request, Read) else None

    def told(self, numbers: list[Any]) -> None:
        """Go on with the numbers that were to be read."""
        self.answers.append(numbers)
        self._read(lambda: self._send(numbers))

    def advance(self, answer: Answer) -> None:
        """Resume the generator up to its next request, and start that."""
        self._start(self._send(answer))

    def finish(self, answer: Answer) -> None:
        """Resume the generator with the answer to what was sent behind the commit: to its end, or
        to what is done for all buckets together.
        """
        self.request = None
        try:
            self._send(answer)
        except StopIteration:
            return

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
        self.close()
        self.error = None  # whose frames hold this

    def leave(self) -> None:
        """Close the generator and wait for nothing: the memory of what is on the wire is not used
        again.
        """
        if self.pending is not None:
            self.bucket.let_go()
        self.close()
        self.error = None

    def forget(self) -> None:
        """Close the generator; what is on the wire will never come, for its group is gone."""
        if self.pending is not None:
            self.pending.forget()
        self.close()

    def close(self) -> None:
        """Close the generator."""
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
            self._take_part(_reason(error))

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

    def _ask_again(self, answers: list[Answer]) -> Request:
        """The request of a new generator that has had these answers."""
        self.close()
        failed = [float(self.error is not None)]
        self.control = self.bucket.control = Control(failed=failed, **self.words)
        self.generator = self._make()
        request = self._send(None)
        for held in answers:
            if isinstance(held, Payload):
                assert isinstance(request, AllReduceMean)
                held = request.message
            request = self._send(held)
        return request

    def _make(self) -> Asking[None]:
        """A new generator; a class may look at gradients already where it makes one."""
        self.bucket.withheld = self.error is not None
        try:
            return self.algorithm(self.bucket)
        finally:
            self.bucket.withheld = False

    def _send(self, answer: Answer) -> Request:
        assert self.generator is not None
        self.bucket.withheld = self.error is not None
        try:
            self.request = self.generator.send(answer)
        finally:
            self.bucket.withheld = False
        return self.request

    def _start(self, request: Request) -> None:
        self.ready = isinstance(request, Commit)
        if isinstance(request, Agree):
            self.agree = request
        answered = isinstance(request, Read | Agree | Commit | Together)
        self.pending = None if answered else self.comm.start(request)


def _reason(error: NotSent) -> Exception:
    return error.__cause__ if isinstance(error.__cause__, Exception) else error
