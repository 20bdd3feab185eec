"""Every method's step and run in one situation: what it sends and keeps, how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .data_parallel import Machine, Step, sent_bytes, step_seconds, training_speedup
from .methods import METHODS, Cost, Workload

DENSE = "AdamW+DDP"
# Of a device's memory for parameters, gradients and state; the rest is for activations.
ROOM = 0.6


@dataclass(frozen=True)
class Row:
    """One method: what it sends and keeps, its step by what the time goes to, and the run it gives.

    Args:
        sent: bytes that leave a rank in a compressed step, of ring collectives.
        step: seconds of a compressed step: computation, own work, exposed communication.
        speedup: of such a step over a dense one.
        run: of the whole run, the dense start included.
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
    """Ranks over which one copy of the model has to be cut so that all methods fit: the fewest that
    divide `ranks`.
    """
    if memory_bytes is None or ranks < 1:
        return 1
    state = max(method(work, ranks).state for method in METHODS.values())
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
    costs = {name: method(work, machine.ranks) for name, method in METHODS.items()}
    steps = {
        name: step_seconds(machine, c, situation.compute_s, situation.overlap_s)
        for name, c in costs.items()
    }
    dense, dense_bytes = steps[DENSE].total, sent_bytes(machine, costs[DENSE])
    rows = []
    for name, method in METHODS.items():
        cost, seconds, sent = costs[name], steps[name].total, sent_bytes(machine, costs[name])
        rows.append(
            Row(
                name,
                sent,
                steps[name],
                dense / seconds,
                training_speedup(dense, seconds, method.start),
                method.start + (1 - method.start) * (sent / dense_bytes if dense_bytes else 1.0),
                cost.state,
                method.loss,
                method.ours,
                _fits(cost, work, situation.memory_bytes),
            )
        )
    return rows


def _fits(cost: Cost, work: Workload, memory_bytes: float | None) -> bool:
    return memory_bytes is None or 8 * work.parameters + cost.state <= ROOM * memory_bytes
