"""An exchange on its way: a step of the outer optimizer, and the message in front of its payloads.

In the message every rank sends what must be equal on all, the norm of its pseudo-gradient, and
random projections of it.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._engine.decision import StepDecision
from .._engine.peers import raise_mismatch
from .._engine.session import Session
from .._engine.step import Step
from .._engine.turns import Background, Turns, ask
from .._state.tensors import to_local
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchored, Anchors
from .distances import count_signs, estimate_products, project_signs

FIELDS = 3  # of a message, in float64: exchanges, checksum of the settings, squared norm


@dataclass(frozen=True)
class Outcome:
    """The result of an exchange, which all ranks know.

    ``decision``: None where there was nothing to send. ``is_lost``: this rank's parameters are not
    finite. ``squared``, ``product``: of the pseudo-gradients of the ``ranks`` that are not lost,
    the mean squared norm, and the mean inner product of two.
    """

    decision: StepDecision | None
    is_lost: bool
    squared: float
    product: float
    ranks: int


@dataclass(eq=False)
class Exchange:
    """The exchange of some fragments by a ``step`` of the outer optimizer, applied after step
    ``apply_at`` of the inner one (None: at once).

    ``squared``: the squared norm of this rank's pseudo-gradient. Where it is not finite, the rank
    sends nothing and takes the average of the others.
    """

    anchors: Anchors
    fragments: frozenset[int]
    apply_at: int | None
    mix: float
    squared: Tensor
    step: Step
    turns: Background[Outcome]

    def list_received(self, is_lost: bool) -> list[Anchored]:
        """Return the parameters that get new anchors: those sent, on a lost rank all."""
        return (self.anchors.within if is_lost else self.anchors.sent)(self.fragments)

    def drain(self) -> None:
        """Wait until nothing of it is on the wire: the next exchange uses the same group."""
        with contextlib.suppress(Exception):
            for pending in self.turns.finish():
                if pending.in_turns:  # in the simulator no rank may wait for another here
                    return

    def give_up(self) -> None:
        self.turns.close()
        self.step.session.forget_in_flight()
        self.anchors.cancel(self.fragments)

    def state_dict(self) -> dict[str, Any]:
        return {
            "apply_at": self.apply_at,
            "mix": self.mix,
            "squared": float(self.squared),
        }


def communicate(
    source: Session, anchors: Anchors, step: Step, squared: Tensor, is_delayed: bool
) -> Turns[Outcome]:
    """Exchange messages and payloads, up to the decision. ``source``: of the inner steps.

    Payloads follow when messages have shown that they fit. Where they are to travel while training
    goes on, they start at once.
    """
    comm = step.comm
    message = _make_message(source, anchors, step, squared)
    if is_delayed:
        pending = comm.start(AllGather(message))
        decision = yield from _send_pseudo_gradients(anchors, step, float(squared))
        yield pending
        gathered = pending.wait()
        assert isinstance(gathered, Tensor)
    else:
        gathered = yield from ask(comm, AllGather(message))
    rows = gathered.cpu()  # the host waits for the device once
    fields = rows[:, : 8 * FIELDS].contiguous().view(torch.float64)
    exchanges, settings, squares = fields.unbind(1)
    if (settings != settings[comm.rank]).any():
        yield from raise_mismatch(source, comm)
    if (exchanges != exchanges[0]).any():
        raise CommunicationError(
            f"rank {int(exchanges.argmin())} lacks an exchange that others have applied: call "
            "rebind() on all ranks"
        )
    if not is_delayed:
        decision = yield from _send_pseudo_gradients(anchors, step, float(squares[comm.rank]))
    finite = squares.isfinite()
    mean_square, product = estimate_products(squares[finite], rows[finite, 8 * FIELDS :])
    is_lost = not bool(finite[comm.rank])
    return Outcome(decision, is_lost, mean_square, product, int(finite.sum()))


def _make_message(source: Session, anchors: Anchors, step: Step, squared: Tensor) -> Tensor:
    """Return the bytes that a rank sends of itself."""
    device = step.session.device
    counts = [anchors.exchanges, zlib.crc32(repr(source.settings).encode())]
    fields = torch.tensor(counts, dtype=torch.float64).to(device)
    vector = [to_local(t.anchor.grad) for t in anchors.tensors if t.anchor.grad is not None]
    signs = project_signs(vector, step.comm.size, source.steps, device)
    return torch.cat([torch.cat([fields, squared.view(1)]).view(torch.uint8), signs])


def message_bytes(ranks: int) -> int:
    """Return the bytes of a rank's message."""
    return 8 * FIELDS + count_signs(ranks) // 8


def _send_pseudo_gradients(
    anchors: Anchors, step: Step, squared: float
) -> Turns[StepDecision | None]:
    if not math.isfinite(squared):
        anchors.clear_gradients()  # this rank takes the average of the others
    return (yield from step.exchange())
