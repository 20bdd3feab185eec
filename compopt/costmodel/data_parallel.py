"""Data parallelism: what averaging gradients adds to a step, and what it gives back over a whole
training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .workload import Cost

# Of the gradient, taken to be ready only when backward ends: what it costs is not hidden.
LAST_BUCKET = 0.1


@dataclass(frozen=True)
class Machine:
    """Where the training runs.

    Args:
        ranks: processes that average gradients.
        link_bytes_per_s: what one rank can send, each second, while it receives as much.
        latency_s: seconds of one message, whatever its size.
        memory_bytes_per_s: bytes a rank can move in memory.
        flops_per_s: floating-point operations a rank does in matrix products.
        wait_share: of a step, that a rank waits for the slowest one where all meet.
        lost_s_per_byte: seconds that computation loses for each byte that a rank sends beside it.
    """

    ranks: int
    link_bytes_per_s: float
    latency_s: float = 50e-6
    memory_bytes_per_s: float = 10e9
    flops_per_s: float = 50e9
    wait_share: float = 0.0
    lost_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1; got {self.ranks}.")
        for name in ("link_bytes_per_s", "memory_bytes_per_s", "flops_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite; got {getattr(self, name)}.")
        for name in ("latency_s", "wait_share", "lost_s_per_byte"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must not be negative, and finite; got {getattr(self, name)}."
                )


@dataclass(frozen=True)
class Step:
    """Seconds of one step, by what they go to: computation, the method's own work, communication it
    waits for.
    """

    compute: float
    local: float
    exchange: float

    @property
    def total(self) -> float:
        return self.compute + self.local + self.exchange


def all_reduce_seconds(machine: Machine, size: float) -> float:
    """Ring all-reduce of `size` bytes: 2 (N-1) messages, 2 (N-1)/N of the bytes (Radius, equation
    3).
    """
    hops = machine.ranks - 1
    return (
        2 * hops * (machine.latency_s + size / machine.ranks / machine.link_bytes_per_s)
        if size
        else 0.0
    )


def all_gather_seconds(machine: Machine, size: float) -> float:
    """Ring all-gather to, or reduce-scatter of, `size` bytes: half an all-reduce (Radius, equation
    4).
    """
    return all_reduce_seconds(machine, size) / 2


def sent_bytes(machine: Machine, cost: Cost) -> float:
    """Bytes that leave a rank in a step: 2 (N-1)/N of what is all-reduced, (N-1)/N of what is
    gathered.
    """
    return (machine.ranks - 1) / machine.ranks * (2 * cost.reduced + cost.gathered + cost.hidden)


def step_seconds(machine: Machine, cost: Cost, compute_s: float, overlap_s: float = 0.0) -> Step:
    """Predict one step.

    Args:
        machine: see `Machine`.
        cost: a row of `METHODS`.
        compute_s: seconds of a dense step with no communication (forward, backward and AdamW). No
            prediction is below: a method with fewer passes over memory than AdamW is not credited
            for them.
        overlap_s: seconds of the backward pass during which gradients may already travel, but for
            the last bucket; what goes out at the end of a round does not.

    Raises:
        ValueError: `compute_s` is not positive, or `overlap_s` is not within it.
    """
    if not 0 < compute_s < math.inf or not 0 <= overlap_s <= compute_s:
        raise ValueError(
            "compute_s must be positive and finite, and overlap_s between 0 and compute_s; "
            f"got {compute_s} and {overlap_s}."
        )
    local = max(0.0, cost.traffic) / machine.memory_bytes_per_s + cost.flops / machine.flops_per_s
    met = _beside(machine, cost, compute_s)
    if cost.every is not None:
        return Step(compute_s, local, met + _waited_at_rounds(machine, cost, cost.every, compute_s))
    waited = all_reduce_seconds(machine, cost.reduced) + all_gather_seconds(machine, cost.gathered)
    # Masks travel behind the next forward and backward; what does not fit there is waited for.
    late = max(0.0, all_gather_seconds(machine, cost.hidden) - compute_s)
    return Step(compute_s, local, met + max(LAST_BUCKET * waited, waited - overlap_s) + late)


def _beside(machine: Machine, cost: Cost, compute_s: float) -> float:
    """Seconds that an exchange costs a step however well it is hidden: the slowest rank is waited
    for, and what copies and adds the bytes is taken from computation.
    """
    if machine.ranks == 1:
        return 0.0
    waited = machine.wait_share * compute_s / (cost.every or 1)
    return waited + machine.lost_s_per_byte * sent_bytes(machine, cost)


def _waited_at_rounds(machine: Machine, cost: Cost, every: int, compute_s: float) -> float:
    """Seconds a step, as a mean over a round: of its exchange what does not fit behind the steps
    that its application is delayed by.
    """
    whole = all_reduce_seconds(machine, every * cost.reduced)
    return max(0.0, whole - cost.delay * compute_s) / every


def training_speedup(dense: float, compressed: float, warmup_share: float = 0.0) -> float:
    """Speed-up of a whole training whose first `warmup_share` of steps stay dense."""
    if not 0 <= warmup_share <= 1:
        raise ValueError(f"warmup_share must be between 0 and 1; got {warmup_share}.")
    return dense / (warmup_share * dense + (1 - warmup_share) * compressed)
