"""Every method's step and run in one situation: what it sends and keeps, how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .data_parallel import Machine, Step, sent_bytes, step_seconds, training_speedup
from .methods import METHODS
from .workload import Cost, Workload

DENSE = "AdamW+DDP"
# Of a device's memory for parameters, gradients and state; the rest is for activations.
ROOM = 0.6


@dataclass(frozen=True)
class Row:
    """One method: what it sends and keeps, its step by what the time goes to, and the run it gives.

    Args:
        sent: bytes that leave a rank in a compressed step, of ring collectives; of local steps the
            mean over a round.
        step: seconds of such a step: computation, own work, exposed communication.
        speedup: of such a step over a dense one.
        run: of the whole run, with its dense start, or with its rounds while they grow.
        run_bytes: share of a dense run's bytes that the whole run sends.
        state: bytes of optimizer state a rank.
        loss: final loss over AdamW's where it was measured, else None.
        ours: whether it is a class of this package.
        fits: whether parameters, gradients and state fit into the memory that is left for them.
    """

    method: str
    sent: float
    step: Step
    speedup: float
    run: float
    run_bytes: float
    state: float
    loss: float | None
    ours: bool
    fits: bool


@dataclass(frozen=True)
class Situation:
    """What the advice is about.

    ``sources`` says of each number whether it was given, measured or assumed.
    """

    work: Workload
    machine: Machine
    compute_s: float
    overlap_s: float
    shard: int
    memory_bytes: float | None
    loss_budget: float
    sources: dict[str, str] = field(default_factory=dict)


def copies_over(work: Workload, ranks: int, memory_bytes: float | None) -> int:
    """Ranks over which one copy of the model has to be cut so that all methods fit that average
    each step: the fewest that divide `ranks`. Local steps keep twice as much: where they do not
    fit, no copy is cut for them.
    """
    if memory_bytes is None or ranks < 1:
        return 1
    costs = [method(work, ranks) for method in METHODS.values()]
    state = max(cost.state for cost in costs if cost.every is None)
    needed = (8 * work.parameters + state) / (ROOM * memory_bytes)
    return next((n for n in range(1, ranks + 1) if ranks % n == 0 and n >= needed), 1)


def part_of(work: Workload, shard: int) -> Workload:
    """What one rank averages where a copy is cut over `shard` ranks."""
    return replace(
        work, parameters=max(1, work.parameters // shard), perimeter=work.perimeter / shard
    )


def rows_of(situation: Situation) -> list[Row]:
    """Every method in this situation."""
    work, machine = situation.work, situation.machine
    dense = METHODS[DENSE](work, machine.ranks)
    dense_seconds, dense_bytes = _seconds(situation, dense).total, sent_bytes(machine, dense)
    rows = []
    for name, method in METHODS.items():
        cost = method(work, machine.ranks)
        step, parts = _seconds(situation, cost), method.after_start(work, machine.ranks)
        seconds = sum(share * _seconds(situation, part).total for share, part in parts)
        sent = sum(share * sent_bytes(machine, part) for share, part in parts)
        rows.append(
            Row(
                name,
                sent_bytes(machine, cost),
                step,
                dense_seconds / step.total,
                training_speedup(dense_seconds, seconds, method.start),
                method.start + (1 - method.start) * (sent / dense_bytes if dense_bytes else 1.0),
                cost.state,
                method.loss,
                method.ours,
                _fits(cost, work, situation.memory_bytes),
            )
        )
    return rows


def _seconds(situation: Situation, cost: Cost) -> Step:
    return step_seconds(situation.machine, cost, situation.compute_s, situation.overlap_s)


def _fits(cost: Cost, work: Workload, memory_bytes: float | None) -> bool:
    return memory_bytes is None or 8 * work.parameters + cost.state <= ROOM * memory_bytes
