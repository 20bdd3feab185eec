"""An exchange of fragments in flight: a step of the outer optimizer, and the message before its
payloads.

In the message every rank sends what must be equal on all ranks, its weight in the average, the norm
of its pseudo-gradient, and a sketch of it.

Ranks of unequal weights send their pseudo-gradients times ``ranks * weight / sum of weights``. The
plain mean of these is the weighted mean, so codecs need no weights.
"""

from __future__ import annotations

import contextlib
import math
import zlib
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
from .._engine.session import Session
from .._engine.step import Step
from .._ops.norms import scale_all_
from .._state.tensors import to_local
from .._wire.collectives import get_replicate_size
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchored, Anchors
from .rounds import outer_share
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
    """The result of an exchange, which all ranks know.

    ``decision``: None where there was nothing to send. ``is_non_finite``: this rank's parameters
    are not finite. ``mean``: of all contributions; its ``is_last`` is 1 if every rank waits in
    ``end_round()``. ``share``: this rank's weight over the sum of all weights. ``weights``,
    ``squares``, ``sketches``: of all ranks, the weights, and the squared norms and sketches of
    pseudo-gradients.
    """

    is_non_finite: bool
    mean: Contribution
    share: float
    weights: Tensor
    squares: Tensor
    sketches: Tensor
    decision: StepDecision | None = None

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


class FragmentSync:
    """The exchange of some fragments by a ``step`` of the outer optimizer, applied after step
    ``apply_at`` of the inner one (0: at once). Pseudo-gradients are set before.

    ``source``: the session of the inner steps. ``squared``: the squared norm of this rank's
    pseudo-gradient, of all shards. Where it is not finite, the rank sends nothing and takes the
    average of the others. ``contribution``: of this rank.
    """

    def __init__(
        self,
        source: Session,
        anchors: Anchors,
        fragments: frozenset[int],
        apply_at: int,
        squared: Tensor,
        contribution: Contribution,
    ):
        self.anchors, self.fragments, self.apply_at = anchors, fragments, apply_at
        self.squared, self.contribution = squared, contribution
        outer, groups = anchors.outer._session, anchors.groups_of(fragments)
        self.step = Step(outer, outer.connect_ranks(), anchors.applied_exchanges + 1, groups)
        self.communication = Background(
            _communicate(source, anchors, self.step, squared, contribution, apply_at > 0)
        )
        if apply_at:
            outer.comm.unfinished.add("delayed exchange")

    def list_received(self, is_non_finite: bool) -> list[Anchored]:
        """Return the parameters that get new anchors: those that were sent, or all if this rank's
        parameters are not finite.
        """
        anchors = self.anchors
        return (anchors.list_members if is_non_finite else anchors.list_sent)(self.fragments)

    def drain(self) -> None:
        """Wait for its collectives, because the next exchange uses the same group."""
        with contextlib.suppress(Exception):
            for pending in self.communication.finish():
                if pending.is_lockstep:  # in the simulator no rank may wait for another here
                    return


def _communicate(
    source: Session,
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
    comm, device = step.comm, step.session.device
    grads = [to_local(t.anchor.grad) for t in anchors.tensors if t.anchor.grad is not None]
    checksum = zlib.crc32(repr(source.settings).encode())
    numbers = [anchors.applied_exchanges, checksum, *contribution]
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
        yield from raise_mismatch(source, comm)
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
    outcome = Outcome(is_non_finite, mean, scale / comm.size, weights, squares, sketches)
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
        anchors.clear_gradients()  # this rank takes the average of the others
    return (yield from step.exchange())
