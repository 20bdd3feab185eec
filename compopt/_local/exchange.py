"""An exchange on its way: the message in front of its payloads, its progress, and how far apart the
pseudo-gradients of ranks are.

The message has 8 KB or less: a rank's counts and settings, the norm of its pseudo-gradient, and
signs of random projections of it, the same projections on all ranks. Two vectors at an angle of a
share h of a half turn differ in this share of the signs: over 16 KB of signs of all ranks a cosine
is known to about .01, whatever payloads hold of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._engine.engine import Engine
from .._engine.handshake import explain_mismatch
from .._engine.stepping import Step
from .._engine.turns import Turns
from .._engine.verdicts import Verdict
from .._state.buckets import local
from .._state.masks import bits_of, flags_of
from .._wire.comm import Comm
from .._wire.pending import Pending
from .._wire.quantise import place_of
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchors

NUMBERS = 4  # in front of the signs, each of 8 bytes
SIGNS = 131072  # of all ranks together
TERMS = 64  # of a projection, at least


@dataclass(frozen=True)
class Outcome:
    """What all ranks decided (None: there was nothing to send), and how far apart they were: the
    mean squared norm of their pseudo-gradients, and the mean inner product of two of these.
    """

    verdict: Verdict | None
    squared: float
    product: float


@dataclass(eq=False)
class Exchange:
    """The exchange of some fragments, applied in step ``apply_at`` (None: at once).

    ``squared``: the squared norm of what this rank moved. Where that is not finite the rank sends
    nothing, and takes the average of the others.
    """

    apply_at: int | None
    mix: float
    squared: float
    step: Step
    turns: Turns[Outcome]
    outcome: Outcome | None = None
    error: Exception | None = None
    waiting: Pending | None = None

    @property
    def is_lost(self) -> bool:
        return not math.isfinite(self.squared)

    def poll(self) -> None:
        """Go on as far as possible without waiting; ``arrive`` raises the error there was."""
        while self.outcome is None and self.error is None:
            if self.waiting is not None and not self.waiting.ready:
                return
            try:
                self._advance()
            except Exception as error:
                self.error = error

    def arrive(self) -> Turns[Outcome]:
        """Wait until all ranks have decided."""
        while self.outcome is None:
            if self.error is not None:
                raise self.error
            if self.waiting is not None:
                yield self.waiting
            self._advance()
        return self.outcome

    def _advance(self) -> None:
        try:
            self.waiting = next(self.turns)
        except StopIteration as stop:
            self.outcome = stop.value


def communicate(
    source: Engine, anchors: Anchors, step: Step, squared: float, is_delayed: bool
) -> Turns[Outcome]:
    """Exchange messages and payloads, up to the decision. ``source`` drives the ranks' own steps.

    Payloads wait until the messages have shown that they fit, but not where they are to travel
    while training goes on.
    """
    comm = step.comm
    pending = comm.start(AllGather(make_message(source, anchors, step, squared)))
    if is_delayed:
        verdict = yield from step.exchange()
    yield pending
    rows = pending.wait()
    assert isinstance(rows, Tensor)
    numbers = rows[:, : 8 * NUMBERS].contiguous().view(torch.float64)
    yield from compare_ranks(source, comm, numbers.tolist())
    if not is_delayed:
        verdict = yield from step.exchange()
    own = numbers[:, 3]
    there = own.isfinite()
    return Outcome(verdict, *inner_products(own[there], rows[there, 8 * NUMBERS :]))


def make_message(source: Engine, anchors: Anchors, step: Step, squared: float) -> Tensor:
    """What a rank tells the others of itself, as bytes."""
    moved = [local(t.anchor.grad) for t in anchors.tensors if t.anchor.grad is not None]
    settings = zlib.crc32(repr(source.face._settings()).encode())
    numbers = [source.steps, anchors.exchanges, settings, squared]
    signs = signs_of(moved, step.comm.size, source.steps, step.engine.device)
    return torch.cat([torch.tensor(numbers, dtype=torch.float64).view(torch.uint8).to(signs.device), signs])


def compare_ranks(source: Engine, comm: Comm, numbers: list[list[float]]) -> Turns[None]:
    """Raise where ranks cannot average what they moved."""
    steps, exchanges, settings, _ = zip(*numbers, strict=True)
    if len(set(steps)) > 1:
        counts = ", ".join(f"{int(n)} on rank {rank}" for rank, n in enumerate(steps))
        raise ValueError(
            f"ranks have taken unequal numbers of steps: {counts}. Nothing was exchanged: call "
            "step() equally often on all ranks."
        )
    if len(set(exchanges)) > 1:
        behind = exchanges.index(min(exchanges))
        raise CommunicationError(
            f"rank {behind} lacks an exchange that other ranks have applied: call rebind() on all "
            "ranks"
        )
    if len(set(settings)) > 1:
        yield from explain_mismatch(source, comm)


# How far apart ranks are


def signs_of(vector: Sequence[Tensor], ranks: int, seed: int, device: torch.device) -> Tensor:
    """Bits: the signs of SIGNS / ranks projections of a vector, which is given in parts.

    Projection i is the sum of every element of which the place is i modulo their number, each times
    1 or -1. Of a short vector elements are in several projections, with other signs.
    """
    count = SIGNS // ranks // 8 * 8
    sums = torch.zeros(count, device=device)
    parts = [part.reshape(-1) for part in vector if part.numel()]
    size = sum(part.numel() for part in parts)
    if 0 < size < TERMS * count:
        parts = [torch.cat(parts).repeat(-(-TERMS * count // size))]
    at = 0
    for part in parts:
        for number, piece in enumerate(part.split(count)):
            place = place_of((seed, at, number))
            signed = piece.float() * random_signs(device)[place : place + len(piece)]
            start = at % count
            fits = min(len(piece), count - start)
            sums[start : start + fits] += signed[:fits]
            sums[: len(piece) - fits] += signed[fits:]
            at += len(piece)
    return bits_of(sums >= 0)


@lru_cache(maxsize=4)
def random_signs(device: torch.device) -> Tensor:
    """1 and -1: 65536 of them, twice, so that as many follow on any place."""
    drawn = torch.randint(2, (65536,), generator=torch.Generator().manual_seed(0))
    return drawn.mul_(2).sub_(1).float().repeat(2).to(device)


def inner_products(squared: Tensor, signs: Tensor) -> tuple[float, float]:
    """The mean squared norm of the vectors of all ranks, and the mean product of two of them, from
    their squared norms and, a row a rank, their signs.
    """
    ranks = len(squared)
    sides = torch.stack([flags_of(row) for row in signs]).double().mul_(2).sub_(1)
    norms = squared.sqrt()
    cosines = torch.sin(math.pi / 2 * (sides @ sides.T) / sides.shape[1])
    products = torch.outer(norms, norms) * cosines
    pairs = products.sum() - products.diagonal().sum()
    return float(squared.mean()), float(pairs) / max(1, ranks * (ranks - 1))


def distances(own: float, product: float, ranks: int) -> tuple[float, float]:
    """Cosine and spread, from what ``inner_products`` returns."""
    mean = max(0.0, (own + (ranks - 1) * product) / ranks)  # the squared norm of their mean
    spread = math.sqrt((own - mean) / mean) if 0 < mean < own else 0.0 if mean else math.inf
    return product / own, spread
