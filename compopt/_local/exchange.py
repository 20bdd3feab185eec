"""The exchange of fragments: lines 2 to 5 of the module ``local_steps``, as a step of the outer
optimizer, and the message before its payloads.

In the message every rank sends what must be equal on all ranks, its weight in the average, the norm
of its pseudo-gradient, and a sketch of it.

Ranks of unequal weights send their pseudo-gradients times ``ranks * weight / sum of weights``. The
plain mean of these is the weighted mean, so codecs need no weights.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._engine.collective_generators import (
    Background,
    CollectiveGenerator,
    exchange_one,
    sum_over_groups,
)
from .._engine.decision import StepDecision
from .._engine.handshake import raise_mismatch
from .._engine.join import copy_options_from_ranks_with_data
from .._engine.optimizer_base import OptimizerBase
from .._engine.session import Session
from .._engine.signals import defer_signals
from .._engine.step import Step
from .._ops.norms import scale_all_
from .._state.tensors import to_local
from .._wire.collectives import get_replicate_size
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchored, Anchors, squared_norm_of_part
from .rounds import RoundCounts, outer_share
from .sketches import make_sketch, sketch_size, sum_of_products

# The number of float64 fields of a message: the number of exchanges, the checksum of the settings,
# the fields of Contribution, the squared norm. The sketch follows.
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
    """The result of an exchange.

    ``is_non_finite``: this rank's parameters are not finite. ``own``: this rank's contribution.
    ``mean``: of all contributions; its ``is_last`` is 1 if every rank waits in ``end_round()``.
    ``share``: this rank's weight over the sum of all weights. ``weights``, ``squares``,
    ``sketches``: of all ranks, the weights, and the squared norms and sketches of pseudo-gradients.
    ``decision``: None where there was nothing to send. ``received``: the parameters that have new
    anchors; None if the exchange was not applied.
    """

    is_non_finite: bool
    own: Contribution
    mean: Contribution
    share: float
    weights: Tensor
    squares: Tensor
    sketches: Tensor
    decision: StepDecision | None = None
    received: list[Anchored] | None = None

    @property
    def is_applied(self) -> bool:
        return self.received is not None

    @property
    def is_empty(self) -> bool:
        """True if no rank has stepped, and all wait in ``end_round()``."""
        return self.mean.is_last == 1 and not self.mean.steps

    def measure_distances(self) -> dict[str, float]:
        """Return ``cosine`` and ``spread`` of ``stats``, of the ranks whose parameters are
        finite; nothing if fewer than two have moved.

        With shares p_k of all weights, and m = sum of p_k d_k::

            |m|^2 = sum of p_k |d_k|^2 - sum of p_k |d_k - m|^2
                  = sum of p_k^2 |d_k|^2 + sum over pairs of p_k p_l <d_k, d_l>

        ``cosine``: the last sum, relative to what it is where all have one direction.
        """
        is_finite = self.squares.isfinite()
        weights, squares = self.weights[is_finite], self.squares[is_finite]
        shares = weights / weights.sum()
        lengths = shares * squares.sqrt()
        apart, most = float(lengths.square().sum()), float(lengths.sum().square())
        if not most > apart:
            return {}
        mean = sum_of_products(lengths, self.sketches[is_finite])
        spread = math.sqrt(max(0.0, float(shares @ squares) / mean - 1)) if mean else math.inf
        return {"cosine": (mean - apart) / (most - apart), "spread": spread}


@dataclass
class InFlight:
    """An exchange in flight, which is applied after step ``apply_at`` (0: at once).

    ``squared``: the squared norm of this rank's pseudo-gradient, of all shards. Where it is not
    finite, the rank sends zeros and takes the average. ``contribution``: of this rank. ``step``: of
    the outer optimizer. ``communication``: all of it up to the decision.
    """

    fragments: frozenset[int]
    apply_at: int
    squared: Tensor
    contribution: Contribution
    step: Step
    communication: Background[Outcome]


class FragmentSync:
    """Anchors, and the exchange of their fragments, one at a time.

    ``LocalSteps`` adds fragments to those that are ``due``. ``prepare_sync`` begins their exchange,
    ``poll`` advances it in backward where there is a delay, and ``perform_sync`` ends it: it is
    applied on all ranks, or on none. If it fails, or ``cancel`` gives it up (in a rebind), its
    fragments are due again.

    ``session``: that of the inner steps.
    """

    def __init__(self, optimizer: OptimizerBase, anchors: Anchors):
        self._optimizer, self._session = weakref.proxy(optimizer), optimizer._session
        self.anchors = anchors
        self.due: frozenset[int] = frozenset()
        self.in_flight: InFlight | None = None

    @torch.no_grad()
    def prepare_sync(
        self, counts: RoundCounts, steps: int, apply_at: int = 0, is_last: bool = False
    ) -> CollectiveGenerator[None]:
        """Begin the exchange of the fragments that are due, after a round of ``steps`` steps."""
        session, anchors, fragments = self._session, self.anchors, self.due
        yield from copy_options_from_ranks_with_data(self._optimizer)
        shards = session.shard_communicators
        try:
            moved = anchors.set_pseudo_gradients(fragments)  # line 2
            squared = squared_norm_of_part(moved, shards, anchors.outer._session.device)
            if shards:  # one shard that is not finite makes the whole replica so
                sums = yield from sum_over_groups(shards, [float(squared)], session.device)
                squared = squared.new_tensor(sums[0])
        except BaseException:
            anchors.restore_moved(fragments)
            raise
        self.due = frozenset()
        weight = counts.weight if session.option_groups[0]["weighted"] else 1.0
        contribution = Contribution(weight, steps, counts.seconds, is_last)
        self.start(fragments, apply_at, squared, contribution)
        if apply_at:
            self.poll()

    def start(
        self, fragments: frozenset[int], apply_at: int, squared: Tensor, contribution: Contribution
    ) -> None:
        """Put an exchange in flight, whose pseudo-gradients are set."""
        anchors, outer = self.anchors, self.anchors.outer
        number, groups = anchors.applied_exchanges + 1, anchors.groups_of(fragments)
        step = Step(outer, outer._session.connect_ranks(outer), number, groups)
        communication = Background(  # line 3
            _communicate(self._optimizer, anchors, step, squared, contribution, apply_at > 0)
        )
        self.in_flight = InFlight(fragments, apply_at, squared, contribution, step, communication)

    def poll(self) -> None:
        """Advance what is in flight as far as possible without waiting."""
        if self.in_flight is not None:
            self.in_flight.communication.poll()

    @torch.no_grad()
    def perform_sync(self, counts: RoundCounts) -> CollectiveGenerator[Outcome]:
        """Wait for the exchange in flight, and apply it, unless the average is not finite.

        If it fails, on all ranks, nothing is applied.
        """
        exchange = self.in_flight
        assert exchange is not None
        try:
            outcome = yield from exchange.communication.finish()
            with defer_signals():
                outcome.received = self._apply(exchange, outcome, counts)
        except BaseException:
            exchange.step.undo()
            self.cancel()
            raise
        self.in_flight = None
        return outcome

    def _apply(
        self, exchange: InFlight, outcome: Outcome, counts: RoundCounts
    ) -> list[Anchored] | None:
        """Do lines 4 and 5, if all ranks have decided to. Returns the parameters that received new
        anchors: those that were sent, or all if this rank's are not finite.
        """
        anchors, session, decision = self.anchors, self._session, outcome.decision
        if outcome.is_empty:
            anchors.clear_gradients()
            return None
        if decision is not None and not decision.applied:
            exchange.step.commit(decision)  # which counts and reports what is skipped
            anchors.restore_moved(exchange.fragments)
            return None
        is_lost = outcome.is_non_finite
        received = (anchors.list_members if is_lost else anchors.list_sent)(exchange.fragments)
        is_late = exchange.apply_at > 0 and not is_lost
        since = [t.moved_since() if is_late else None for t in received]
        session.corrupt = f"the exchange before step {session.steps + 1} was interrupted"
        if decision is not None:
            exchange.step.commit(decision)  # line 4
        for t, moved in zip(received, since, strict=True):
            t.write_param(moved)  # line 5
        session.corrupt = ""
        anchors.outer._session.consolidated_at = session.consolidated_at = None
        anchors.clear_gradients()
        counts.weight = 0.0
        if session.option_groups[0]["round_seconds"] is not None:
            mean_step = counts.mean_step + outcome.mean.steps
            counts.begin_round(counts.round + 1, session.steps, mean_step)
        return received

    def cancel(self) -> None:
        """Give up what is in flight; its fragments are due again."""
        exchange, self.in_flight = self.in_flight, None
        if exchange is not None:
            exchange.communication.close()
            self.anchors.outer._session.forget_in_flight()
            self.anchors.restore_moved(exchange.fragments)
            self.due |= exchange.fragments

    def drain(self) -> None:
        """Wait for collectives in flight, because the next exchange uses the same group."""
        if self.in_flight is not None:
            with contextlib.suppress(Exception):
                for pending in self.in_flight.communication.finish():
                    if pending.is_lockstep:  # in the simulator no rank may wait for another here
                        return


def _communicate(
    optimizer: OptimizerBase,
    anchors: Anchors,
    step: Step,
    squared: Tensor,
    contribution: Contribution,
    is_delayed: bool,
) -> CollectiveGenerator[Outcome]:
    """Exchange messages and payloads, up to the decision.

    Payloads start when messages have arrived: ranks then know that they fit, and all weights. With
    a delay payloads start at once, to travel while training goes on; weights are then equal.
    """
    source, comm, device = optimizer._session, step.comm, step.session.device
    grads = [to_local(t.anchor.grad) for t in anchors.tensors if t.anchor.grad is not None]
    source.options.refresh(optimizer._compared_groups)
    numbers = [anchors.applied_exchanges, optimizer.checksum_settings(), *contribution]
    sent = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device)
    sketch = yield from _sketch_pseudo_gradient(source, anchors, step)
    message = torch.cat([sent, squared.to(device).view(1), sketch.view(torch.float64)])
    gathering = Background(exchange_one(comm, AllGather(message)))
    if is_delayed:
        gathering.poll()
        decision = yield from _send_pseudo_gradients(
            source, anchors, step, float(squared), contribution
        )
    rows = (yield from gathering.finish()).cpu()  # the host waits for the device once
    exchanges, settings, *contributions, squares = rows[:, :FIELDS].unbind(1)
    sketches = rows[:, FIELDS:].contiguous().view(torch.float32)
    if (settings != settings[comm.rank]).any():
        yield from raise_mismatch(optimizer, comm)
    if (exchanges != exchanges[0]).any():
        raise CommunicationError(
            f"rank {int(exchanges.argmin())} lacks an exchange that others have applied: call "
            "rebind() on all ranks"
        )
    mean = Contribution(*(float(values.mean()) for values in contributions))
    # where no rank has any weight, all have the same
    scale = contribution.weight / mean.weight if mean.weight else 1.0
    weights = contributions[0] if mean.weight else torch.ones_like(contributions[0])
    is_non_finite = not bool(squares[comm.rank].isfinite())
    share = scale / comm.size
    outcome = Outcome(is_non_finite, contribution, mean, share, weights, squares, sketches)
    if is_delayed:
        outcome.decision = decision
    elif not outcome.is_empty:
        scale_all_(grads, scale)
        own = float(squares[comm.rank])
        outcome.decision = yield from _send_pseudo_gradients(source, anchors, step, own, mean)
    return outcome


def _sketch_pseudo_gradient(
    source: Session, anchors: Anchors, step: Step
) -> CollectiveGenerator[Tensor]:
    """Return the sketch of this rank's pseudo-gradient, of all its shards."""
    shards, device = step.session.shard_communicators, step.session.device
    meshes = source.shard_communicators  # ``step`` may have process groups of its own
    parts = (
        (to_local(t.anchor.grad), get_replicate_size(t.param, meshes) ** -0.5)
        for t in anchors.tensors
        if t.anchor.grad is not None
    )
    seed = (anchors.applied_exchanges, *(comm.rank for comm in shards))
    sketch = make_sketch(parts, step.comm.size, seed, device)
    if not shards:
        return sketch
    return sketch.new_tensor((yield from sum_over_groups(shards, sketch.tolist(), device)))


def message_bytes(ranks: int) -> int:
    """Return the bytes of a rank's message."""
    return 8 * FIELDS + 4 * sketch_size(ranks)


def _send_pseudo_gradients(
    source: Session, anchors: Anchors, step: Step, squared: float, mean: Contribution
) -> CollectiveGenerator[StepDecision | None]:
    """Exchange payloads, up to the decision; ``mean``: of the ranks' contributions, which
    with a delay are all equal.
    """
    share = outer_share(source.option_groups[0], mean.steps, mean.seconds)
    anchors.set_outer_share(share)
    if not math.isfinite(squared):
        anchors.clear_gradients()  # this rank counts as zero in the average, and takes it
    return (yield from step.exchange())
