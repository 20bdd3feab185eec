"""An exchange of fragments on its way: a step of the outer optimizer, and the message in front of
its payloads.

In the message every rank sends what must be equal on all, its weight in the average, the norm of
its pseudo-gradient, and random projections of it.

Ranks of unequal weights send their pseudo-gradients times ``ranks * weight / sum of weights``: the
mean of these is the weighted mean, whatever the codec, and a residual is a part of such a mean.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._engine.collective_generators import Background, CollectiveGenerator, exchange_one
from .._engine.decision import StepDecision
from .._engine.handshake import raise_mismatch
from .._engine.session import Session
from .._engine.step import Step
from .._ops.norms import scale_all_
from .._state.tensors import to_local
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchored, Anchors
from .distances import count_signs, estimate_products, project_signs
from .rounds import outer_share

# The number of float64 fields of a message: the number of exchanges, the checksum of the settings,
# the fields of Contribution, the squared norm.
FIELDS = 7


class Contribution(NamedTuple):
    """A rank's contribution to an exchange: its weight in the average, and the steps and seconds
    since the last exchange that was applied. ``is_last``: the rank waits in ``end_round()``.
    """

    weight: float = 1.0
    steps: float = 0
    seconds: float = 0.0
    is_last: float = False


@dataclass
class Outcome:
    """The result of an exchange, which all ranks know.

    ``decision``: None where there was nothing to send. ``is_lost``: this rank's parameters are not
    finite. ``squared``, ``product``: of the pseudo-gradients of the ``ranks`` that are not lost,
    the mean squared norm, and the mean inner product of two. ``mean``: of the contributions; its
    ``is_last`` is 1 where no rank goes on. ``share``: of this rank's weight in all.
    """

    is_lost: bool
    squared: float
    product: float
    ranks: int
    mean: Contribution
    share: float
    decision: StepDecision | None = None

    @property
    def is_empty(self) -> bool:
        """True if no rank has stepped, and none goes on."""
        return self.mean.is_last == 1 and not self.mean.steps


@dataclass(eq=False)
class FragmentSync:
    """The exchange of some fragments by a ``step`` of the outer optimizer, applied after step
    ``apply_at`` of the inner one (0: at once).

    ``squared``: the squared norm of this rank's pseudo-gradient. Where it is not finite, the rank
    sends nothing and takes the average of the others. ``contribution``: of this rank.
    """

    anchors: Anchors
    fragments: frozenset[int]
    apply_at: int
    squared: Tensor
    contribution: Contribution
    step: Step
    communication: Background[Outcome]

    def list_received(self, is_lost: bool) -> list[Anchored]:
        """Return the parameters that get new anchors: those sent, on a lost rank all."""
        anchors = self.anchors
        return (anchors.list_members if is_lost else anchors.list_sent)(self.fragments)

    def drain(self) -> None:
        """Wait until nothing of it is on the wire: the next exchange uses the same group."""
        with contextlib.suppress(Exception):
            for pending in self.communication.finish():
                if pending.is_lockstep:  # in the simulator no rank may wait for another here
                    return


def begin_sync(
    source: Session,
    anchors: Anchors,
    fragments: frozenset[int],
    apply_at: int,
    squared: Tensor,
    contribution: Contribution,
) -> FragmentSync:
    """Return the exchange of pseudo-gradients that are set. ``source``: of the inner steps."""
    outer, is_delayed = anchors.outer._session, apply_at > 0
    groups = anchors.groups_of(fragments)
    step = Step(outer, outer.connect_ranks(), anchors.applied_exchanges + 1, groups)
    communication = Background(
        _communicate(source, anchors, step, squared, contribution, is_delayed)
    )
    if is_delayed:
        outer.comm.unfinished.add("delayed exchange")
    return FragmentSync(anchors, fragments, apply_at, squared, contribution, step, communication)


def _communicate(
    source: Session,
    anchors: Anchors,
    step: Step,
    squared: Tensor,
    contribution: Contribution,
    is_delayed: bool,
) -> CollectiveGenerator[Outcome]:
    """Exchange messages and payloads, up to the decision.

    Payloads follow when messages have shown that they fit, and ranks know each other's weights.
    Where they are to travel while training goes on, they start at once, and weights are equal.
    """
    comm, device = step.comm, step.session.device
    grads = [to_local(t.anchor.grad) for t in anchors.tensors if t.anchor.grad is not None]
    checksum = zlib.crc32(repr(source.settings).encode())
    numbers = [anchors.applied_exchanges, checksum, *contribution]
    sent = torch.tensor(numbers, dtype=torch.float64).to(device)
    signs = project_signs(grads, comm.size, anchors.applied_exchanges, device)
    message = torch.cat([torch.cat([sent, squared.to(device).view(1)]).view(torch.uint8), signs])
    if is_delayed:
        pending = comm.start(AllGather(message))
        decision = yield from _send_pseudo_gradients(
            source, anchors, step, float(squared), contribution
        )
        yield pending
        gathered = pending.wait()
        assert isinstance(gathered, Tensor)
    else:
        gathered = yield from exchange_one(comm, AllGather(message))
    rows = gathered.cpu()  # the host waits for the device once
    fields = rows[:, : 8 * FIELDS].contiguous().view(torch.float64)
    exchanges, settings, *contributions, squares = fields.unbind(1)
    if (settings != settings[comm.rank]).any():
        yield from raise_mismatch(source, comm)
    if (exchanges != exchanges[0]).any():
        raise CommunicationError(
            f"rank {int(exchanges.argmin())} lacks an exchange that others have applied: call "
            "rebind() on all ranks"
        )
    mean = Contribution(*(float(values.mean()) for values in contributions))
    # where no rank has any weight, all have the same
    scale = contribution.weight / mean.weight if mean.weight else 1.0
    finite = squares.isfinite()
    mean_square, product = estimate_products(squares[finite], rows[finite, 8 * FIELDS :])
    outcome = Outcome(
        is_lost=not bool(finite[comm.rank]),
        squared=mean_square,
        product=product,
        ranks=int(finite.sum()),
        mean=mean,
        share=scale / comm.size,
    )
    if is_delayed:
        outcome.decision = decision
    elif not outcome.is_empty:
        scale_all_(grads, scale)
        own = float(squares[comm.rank])
        outcome.decision = yield from _send_pseudo_gradients(source, anchors, step, own, mean)
    return outcome


def message_bytes(ranks: int) -> int:
    """Return the bytes of a rank's message."""
    return 8 * FIELDS + count_signs(ranks) // 8


def _send_pseudo_gradients(
    source: Session, anchors: Anchors, step: Step, squared: float, mean: Contribution
) -> CollectiveGenerator[StepDecision | None]:
    """Exchange payloads, up to the decision; ``mean``: of the ranks' contributions, which
    with a delay are all equal.
    """
    share = outer_share(source.option_groups[0], mean.steps, mean.seconds)
    anchors.set_outer_share(share)
    if not math.isfinite(squared):
        anchors.clear_gradients()  # this rank takes the average of the others
    return (yield from step.exchange())
