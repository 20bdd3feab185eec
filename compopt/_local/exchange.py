"""An exchange on its way: the message in front of its payloads, its progress, and how far apart the
pseudo-gradients of ranks are.

The message has 8 KB or less: a rank's counts and settings, the norm of its pseudo-gradient, and
signs of random projections of it, the same projections on all ranks. Two vectors at an angle of a
share h of a half turn differ in this share of the signs: over 16 KB of signs of all ranks a cosine
is known to about .01, whatever payloads hold of it.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._engine.decision import StepDecision
from .._engine.peers import raise_mismatch
from .._engine.session import Session
from .._engine.step import Step
from .._engine.turns import Background, Turns
from .._state.bits import bits_of, flags_of
from .._state.buckets import local
from .._wire.collectives import Communicator
from .._wire.quantization import noise_offset
from .._wire.requests import AllGather, CommunicationError
from .anchors import Anchored, Anchors
from .rounds import is_count

NUMBERS = 4  # in front of the signs, each of 8 bytes
SIGNS = 131072  # of all ranks together
TERMS = 8  # added up in a place, at least


@dataclass(frozen=True)
class Outcome:
    """What all ranks decided (None: there was nothing to send), and how far apart they were: the
    mean squared norm of their pseudo-gradients and the mean inner product of two of these, over
    the ``ranks`` whose parameters are finite.
    """

    decision: StepDecision | None
    squared: float
    product: float
    ranks: int


@dataclass(eq=False)
class Exchange:
    """The exchange of some fragments: a ``step`` of the outer optimizer, applied after step
    ``apply_at`` of the inner ones (None: at once).

    ``squared``: the squared norm of what this rank moved. Where that is not finite the rank sends
    nothing, and takes the average of the others.
    """

    anchors: Anchors
    fragments: frozenset[int]
    apply_at: int | None
    mix: float
    squared: float
    step: Step
    turns: Background[Outcome]

    @property
    def is_lost(self) -> bool:
        return not math.isfinite(self.squared)

    @property
    def tensors(self) -> list[Anchored]:
        """Those that take the new anchors."""
        anchors = self.anchors
        return (anchors.within if self.is_lost else anchors.sent)(self.fragments)

    def drain(self) -> None:
        """Wait until nothing of it is on the wire: the next exchange uses the same group."""
        with contextlib.suppress(Exception):
            for pending in self.turns.finish():
                if pending.in_turns:  # of ranks in one process, none of which may wait for another
                    return

    def give_up(self) -> None:
        self.turns.close()
        self.step.session.forget_in_flight()
        self.anchors.cancel(self.fragments)

    def state_dict(self) -> dict[str, Any]:
        names = "apply_at", "mix", "squared"
        saved = {name: getattr(self, name) for name in names}
        return {**saved, "fragments": sorted(self.fragments)}


PER_PARAMETER = "fragments", "anchors", "pseudo_gradients", "moved", "sent"


def check_saved(saved: dict[str, Any], params: int) -> None:
    """Raise where what was saved of anchors and their exchange is not of so many parameters, or
    damaged.
    """
    if {len(saved[name]) for name in PER_PARAMETER} != {params}:
        raise ValueError(
            f"loaded state dict has anchors of {len(saved['anchors'])} parameters, the optimizer "
            f"has {params} parameters."
        )
    exchange = saved["exchange"] or {"apply_at": None, "mix": 0, "squared": 0, "fragments": []}
    numbers = [*saved["fragments"], *saved["due"], *exchange["fragments"]]
    apply_at = exchange["apply_at"]
    if not all(is_count(n, 0) for n in [*numbers, 0 if apply_at is None else apply_at]):
        raise TypeError(f"fragments {numbers}, to be applied after step {apply_at}")
    float(exchange["mix"]), float(exchange["squared"])


def communicate(
    source: Session, anchors: Anchors, step: Step, squared: float, is_delayed: bool
) -> Turns[Outcome]:
    """Exchange messages and payloads, up to the decision. ``source`` drives the ranks' own steps.

    Payloads wait until the messages have shown that they fit, but not where they are to travel
    while training goes on.
    """
    comm = step.comm
    pending = comm.start(AllGather(make_message(source, anchors, step, squared)))
    if is_delayed:
        decision = yield from step.exchange()
    yield pending
    rows = pending.wait()
    assert isinstance(rows, Tensor)
    numbers = rows[:, : 8 * NUMBERS].contiguous().view(torch.float64)
    values = numbers.tolist()
    yield from compare_ranks(source, comm, values)
    if not is_delayed:
        decision = yield from step.exchange()
    finite = [rank for rank, row in enumerate(values) if math.isfinite(row[3])]
    own, product = inner_products(numbers[finite, 3], rows[finite, 8 * NUMBERS :])
    return Outcome(decision, own, product, len(finite))


def make_message(source: Session, anchors: Anchors, step: Step, squared: float) -> Tensor:
    """What a rank tells the others of itself, as bytes."""
    moved = [local(t.anchor.grad) for t in anchors.tensors if t.anchor.grad is not None]
    settings = zlib.crc32(repr(source.face._settings()).encode())
    counts = source.steps, anchors.exchanges, settings
    numbers = torch.tensor([*counts, squared], dtype=torch.float64)
    signs = signs_of(moved, step.comm.size, source.steps, step.session.device)
    return torch.cat([numbers.view(torch.uint8).to(signs.device), signs])


def compare_ranks(source: Session, comm: Communicator, numbers: list[list[float]]) -> Turns[None]:
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
        yield from raise_mismatch(source, comm)


# How far apart ranks are


def signs_per_rank(ranks: int) -> int:
    """How many signs a rank sends, a power of 2; none where there is nobody to compare with."""
    return 0 if ranks == 1 else 2 ** int(math.log2(SIGNS / ranks))


def message_bytes(ranks: int) -> int:
    """Bytes of the message in front of a rank's payloads."""
    return 8 * NUMBERS + signs_per_rank(ranks) // 8


def signs_of(vector: Sequence[Tensor], ranks: int, seed: int, device: torch.device) -> Tensor:
    """Bits: the signs of at most SIGNS / ranks projections of a vector, which is given in parts.

    Its elements, each times 1 or -1, are added up in as many places, one after the other; these
    are mixed by a Walsh-Hadamard transform, so that every projection has a part of all elements.
    """
    count = signs_per_rank(ranks)
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    sums = torch.zeros(count, dtype=torch.float32, device=device)
    parts = [part.reshape(-1).float() for part in vector if part.numel()]
    size = sum(part.numel() for part in parts)
    if 0 < size < count:
        parts = [torch.cat(parts).repeat(-(-count // size))]
        size = len(parts[0])
    at = 0
    for part in parts * max(1, -(-TERMS * count // max(1, size))):
        for piece in part.split(count):
            place, start = noise_offset((seed, at)), at % count
            factors = random_factors(device)[place : place + len(piece)]
            fits = min(len(piece), count - start)
            sums[start : start + fits].addcmul_(piece[:fits], factors[:fits])
            sums[: len(piece) - fits].addcmul_(piece[fits:], factors[fits:])
            at += len(piece)
    for width in (2**i for i in range(count.bit_length() - 1)):
        a, b = sums.view(-1, 2, width).unbind(1)
        sums = torch.stack([a + b, a - b], 1)
    return bits_of(sums.view(-1) >= 0)


@lru_cache(maxsize=4)
def random_factors(device: torch.device) -> Tensor:
    """1 and -1: 65536 of them, twice, so that as many follow on any place."""
    drawn = torch.randint(
        2, (65536,), dtype=torch.int64, generator=torch.Generator().manual_seed(0)
    )
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
