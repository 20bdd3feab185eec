"""Verdicts that the host does not wait for: ``capturable=True``.

The numbers that make a verdict stay on the device. Whether the step is applied and its norm are
computed there from them; the commit is enqueued at once, and every write of it is gated by that
flag (see ``Bucket.gates``). The numbers also start on their way to pinned memory. They are looked
at when a later step begins and they have arrived, or when ``stats`` are asked for, which waits.

So what a step finds wrong is raised by a later one, on each rank when it hears of it. No collective
follows from it: ranks may hear at different steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._state.buckets import upload
from .._state.devices import Passed, later
from .._state.gates import Gates
from .._wire.comm import Comm
from .._wire.scratch import Scratch
from .exchanges import Exchange
from .refusals import read_late, watch_skips
from .reporting import report
from .verdicts import Said, Unread, Verdict, decide, numbers_of, said_by

if TYPE_CHECKING:
    from .engine import Engine

# control words of which any rank's is enough, and those that must not differ
FACTS, ALIKE = ("failed", "unfrozen"), ("place", "settings")


@dataclass
class Coming:
    """Numbers on their way to the host, and what is said of the step when they are there."""

    number: int  # of the step
    sent: int  # bytes, in this step
    said: list[Said]
    numbers: Tensor
    arrived: Passed


class Late:
    """The verdicts of one optimizer that the host has not read yet, in the order of their steps."""

    def __init__(self) -> None:
        self.coming: deque[Coming] = deque()
        self.errors: list[Exception] = []  # what was read, and has not been raised
        self._places: dict[object, tuple[Tensor, Tensor]] = {}
        self._scratch = Scratch()
        # what the norm of the last step's average follows from, where its commit found it
        self.squares: list[Tensor] | None = None

    def judge(self, exchanges: list[Exchange]) -> Verdict:
        """The verdict as the device finds it: from the same numbers, by the same rules as
        ``verdicts.decide``.
        """
        follows = all(exchange.agreement.follows for exchange in exchanges)
        said, numbers = said_by(exchanges), numbers_of(exchanges, follows)
        squares, words = numbers.tensor_split([sum(one.squares for one in said)])
        first, second = self._facts(said, numbers.device)
        wrong = torch.minimum(words.index_select(0, first), words.index_select(0, second)).amax()
        total = squares.sum()
        sound = (words.sum() + total).isfinite()  # a mark that is NaN makes it so
        applied = sound & (wrong <= 0)
        memory = self._scratch("gates", words.numel(), torch.float32, words.device)
        gates = Gates((words > 0).logical_and_(applied), applied, memory)  # of control words, too
        ends = [*accumulate(one.marks + len(one.control) for one in said)]
        starts = zip([0, *ends], said, strict=False)
        behind = [gates.cut(start, start + one.marks) for start, one in starts]
        unread = Unread(said, numbers, total.sqrt(), behind)
        phases = {one.bucket.index: one.phase for one in said if any(one.bucket.compressed)}
        of_commit: list[Tensor] | None = [] if follows else None
        return Verdict(exchanges=exchanges, phase_of=phases, unread=unread, squares=of_commit)

    def _facts(self, said: list[Said], device: torch.device) -> tuple[Tensor, Tensor]:
        """Pairs of words: where both of any are above 0 the step is not applied."""
        key = device, *((one.marks, tuple(one.control.lengths)) for one in said)
        if key not in self._places:
            first: list[float] = []
            second: list[float] = []
            at = 0
            for one in said:
                at += one.marks
                for name, own in one.control.places:
                    place = range(own.start + at, own.stop + at)
                    half = len(place) // 2
                    first += place if name in FACTS else place[:half] if name in ALIKE else []
                    second += place if name in FACTS else place[half:] if name in ALIKE else []
                at += len(one.control)
            self._places = {
                key: (upload(first, torch.int64, device), upload(second, torch.int64, device))
            }
        return self._places[key]

    def keep(self, engine: Engine, verdict: Verdict, comm: Comm, number: int) -> None:
        """Read the numbers of this step, which is enqueued, when they have come."""
        unread, self.squares = verdict.unread, None
        assert unread is not None
        if verdict.squares:  # in the place of the first bucket's, which is 0
            unread.numbers[:1].add_(torch.stack(verdict.squares).sum())
        sent, engine.counted = comm.bytes_sent - engine.counted, comm.bytes_sent
        self.coming.append(Coming(number, sent, unread.said, *later(unread.numbers)))

    def read(self, engine: Engine, wait: bool = False) -> None:
        """Renew ``stats`` by what has come; ``wait``: by all there is."""
        if wait and self.squares:
            engine.stats.grad_norm = float(torch.stack(self.squares).sum().sqrt())
            self.squares = None
        while self.coming and (wait or self.coming[0].arrived.query()):
            one = self.coming.popleft()
            if wait:
                one.arrived.synchronize()
            verdict, _ = decide(one.said, one.numbers.tolist())
            report(engine, verdict, one.sent, one.number)
            wrong = read_late(engine, verdict, one.number)
            wrong = watch_skips(engine, verdict.applied) or wrong
            self.errors += [] if wrong is None else [wrong]

    def tell(self, engine: Engine) -> None:
        """Raise what earlier steps have found wrong."""
        self.read(engine)
        if self.errors:
            raise self.errors.pop(0)


def check_capturable(engine: Engine) -> None:
    """Raise ValueError where a step cannot do without the host."""
    face, devices = engine.face, {bucket.device for bucket in engine.buckets}
    rates = [group.get("lr") for group in engine.option_groups]
    on_device = any(isinstance(lr, Tensor) and lr.device.type != "cpu" for lr in rates)
    gated = all(engine.ops.gates(device) for device in devices)
    for fine, why in (
        (
            gated,
            f"parameters are on {', '.join(sorted(d.type for d in devices))}, and no accelerator",
        ),
        (not engine.shards, "parameters are DTensors, whose shards agree on a step by waiting"),
        (face.offload is None, "offload= copies state to the host and back within a step"),
        (engine.trial is None, "when='auto' times steps, on the host"),
        (not on_device, "lr is a tensor of the device: make it a number, or a tensor of the host"),
    ):
        if not fine:
            raise refusal(why)
    if why := face.not_capturable():
        raise refusal(why)


def refusal(why: str) -> ValueError:
    return ValueError(f"capturable=True cannot be followed here: {why}. Pass capturable=False.")
