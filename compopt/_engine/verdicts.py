"""What all ranks decide about one step, from numbers that every one of them holds alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from .._ops.norms import squared_norms, stacked_squared_norms
from .._state.buckets import Bucket
from .._wire.comm import Comm
from .._wire.control import Control, differ
from .._wire.requests import AllReduceMean
from .exchanges import Exchange
from .turns import Turns, ask, sum_over


@dataclass(frozen=True, slots=True)
class Said:
    """What the numbers of one bucket's exchange are: some squares, marks and control words."""

    bucket: Bucket
    phase: str
    squares: int
    marks: int
    control: Control


@dataclass
class Verdict:
    """What all ranks decided about one step."""

    applied: bool = True
    exchanges: list[Exchange] = field(default_factory=list)
    # of each bucket that has compressed tensors
    phase_of: dict[int, str] = field(default_factory=dict)
    norm: float = 0.0
    of_all: bool = False  # shards: ranks that hold the others have been asked
    early: int = 0  # buckets whose exchange began in backward and counted
    resent: bool = False  # early payloads were stale and went out again
    mismatch: bool = False  # a rank has other settings
    failed: bool = False  # a rank could not read its gradients
    # buckets whose payload met one of another bucket or step
    misplaced: list[int] = field(default_factory=list)
    # the mean over ranks of the last bucket's control
    agreed: dict[str, list[float]] = field(default_factory=dict)
    # tensors with a non-finite gradient on some rank
    bad: list[str] = field(default_factory=list)

    def take_error(self, known: Exception | None = None) -> Exception | None:
        """Why this rank could not read its gradients, unless that is ``known``.

        Not kept: its frames hold this.
        """
        errors = [exchange.error for exchange in self.exchanges if exchange.error is not None]
        for exchange in self.exchanges:
            exchange.error = None
        return known or (errors[0] if errors else None)


def judge(exchanges: list[Exchange]) -> Verdict:
    """The verdict, from averaged numbers that are the same on every rank."""
    verdict, marks = decide(said_by(exchanges), _read(exchanges))
    verdict.exchanges = exchanges
    for exchange, own in zip(exchanges, marks, strict=True):
        exchange.agreement.payload.marks = own
    return verdict


def judge_shards(exchanges: list[Exchange], comm: Comm) -> Turns[Verdict]:
    """The verdict of all ranks where each has averaged its own shard: on a device, which the host
    waits for once. See ``agree_with`` for what else may be cut.
    """
    said, numbers = said_by(exchanges), numbers_of(exchanges)
    squared = numbers[: sum(one.squares for one in said)].cumsum(0)[-1:]  # in turn, as on the host
    failed = torch.full_like(squared, any(exchange.error is not None for exchange in exchanges))
    mean = yield from ask(comm, AllReduceMean(torch.cat([squared, failed])))
    *own, total, untold = torch.cat([numbers, mean]).tolist()
    verdict, marks = decide(said, own)
    total *= comm.size
    if not math.isfinite(total):
        verdict.bad = verdict.bad or ["a tensor of another shard"]
    verdict.norm = 0.0 if verdict.bad else total**0.5
    verdict.failed |= untold > 0
    verdict.applied &= not (verdict.bad or verdict.failed)
    verdict.of_all, verdict.exchanges = True, exchanges
    for exchange, found in zip(exchanges, marks, strict=True):
        exchange.agreement.payload.marks = found
    return verdict


def decide(said: list[Said], numbers: list[float]) -> tuple[Verdict, list[list[float]]]:
    """The verdict, and the marks of every bucket's tensors, from ``numbers_of`` their exchanges."""
    left: Iterator[float] = iter(numbers)
    squares = [sum(islice(left, one.squares)) for one in said]
    verdict, found, total = Verdict(), [], 0.0
    for one, squared in zip(said, squares, strict=True):
        bucket, marks = one.bucket, list(islice(left, one.marks))
        verdict.agreed = control = one.control.read(list(islice(left, len(one.control))))
        verdict.bad += [
            name for name, mark in zip(bucket.names, marks, strict=True) if mark != mark
        ]
        verdict.failed |= control["failed"][0] > 0
        verdict.misplaced += [bucket.index] if differ(control["place"]) else []
        total += squared / bucket.copies
        if any(bucket.compressed):
            verdict.phase_of[bucket.index] = one.phase
        found.append(marks)
    verdict.mismatch = differ(verdict.agreed["settings"])
    verdict.norm = total**0.5
    if total != total or total == float("inf"):
        verdict.bad = verdict.bad or ["the average over ranks"]
    verdict.applied = not (verdict.bad or verdict.mismatch or verdict.failed or verdict.misplaced)
    return verdict, found


def said_by(exchanges: list[Exchange]) -> list[Said]:
    """What ``numbers_of`` these are."""
    said = []
    for exchange in exchanges:
        agree = exchange.agreement
        squares = 1 if agree.squared_norm is None else agree.squared_norm.numel()
        marks = len(agree.payload.header)
        said.append(Said(exchange.bucket, agree.phase, squares, marks, exchange.control))
    return said


def numbers_of(exchanges: list[Exchange]) -> Tensor:
    """What the verdict is made of, on the device: the squared norms of all buckets' averages, then
    the marks and control words of each.
    """
    device = exchanges[-1].bucket.device
    payloads = [exchange.agreement.payload for exchange in exchanges]
    words = [p.flat[: p.flat.numel() - p.body.numel()].to(device) for p in payloads]
    numbers = torch.cat(words).double()
    return torch.cat([_squares(exchanges), numbers])


def _squares(exchanges: list[Exchange]) -> Tensor:
    """The squared norm of every average; every rank clips by what it finds itself."""
    clips = any(exchange.bucket.group.get("max_grad_norm") is not None for exchange in exchanges)
    agreed, device = [exchange.agreement for exchange in exchanges], exchanges[-1].bucket.device
    bodies = [a.payload.body for a in agreed if a.squared_norm is None]
    if len(bodies) == len(agreed) and all(body.device == device for body in bodies):
        return stacked_squared_norms(bodies, clips)
    found = iter(squared_norms(bodies, clips))
    squares = [next(found) if a.squared_norm is None else a.squared_norm for a in agreed]
    return torch.cat([square.to(device).view(-1) for square in squares])


def _read(exchanges: list[Exchange]) -> list[float]:
    """All numbers at once, on the host: the one wait for the device of every step."""
    numbers: list[float] = numbers_of(exchanges).tolist()
    return numbers


def agree_with(shards: list[Comm], verdict: Verdict, device: torch.device) -> Turns[None]:
    """One norm and one verdict over all shards of a model, summed along one dimension of its mesh
    after another.
    """
    if not shards:
        return
    facts = [verdict.bad, verdict.mismatch, verdict.failed, verdict.misplaced]
    words = [0.0 if verdict.bad else verdict.norm**2, *(float(bool(fact)) for fact in facts)]
    squared, bad, mismatch, failed, misplaced = yield from sum_over(shards, words, device)
    verdict.norm, verdict.mismatch, verdict.failed = squared**0.5, mismatch > 0, failed > 0
    verdict.bad = verdict.bad or (["a tensor of another shard"] if bad else [])
    verdict.misplaced = verdict.misplaced or ([-1] if misplaced else [])
    verdict.applied = not (bad or mismatch or failed or misplaced)
