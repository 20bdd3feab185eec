"""What to use: every method's step and run predicted, and a decision as a user would take it.

A method is advised when it is ours, its measured loss is within the budget, its state fits, and the
whole run, dense start included, is at least 5 % faster. Everything else is "stay dense". The same
input always gives the same answer."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field, replace

import torch

from .data_parallel import Machine, Step, sent_bytes, step_seconds, training_speedup
from .devices import DEVICES
from .methods import MEASURED_ON, METHODS, Cost, Workload
from .telling import rate_in_words, seconds_in_words, table, told

DENSE = "AdamW+DDP"
WORTH_IT = 1.05  # a predicted gain below this says nothing
BACKWARD = (
    2 / 3
)  # of a step: two of its three passes over the layers, during which gradients may already travel
LAST_BUCKET = 0.1  # of the gradient, taken to be ready only when backward ends
ROOM = 0.6  # of a device's memory for parameters, gradients and state; the rest is for activations
MEASURED_WIDTH = 128  # of the model on which losses were measured


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


@dataclass(frozen=True)
class Advice:
    """Result of `advise`: a row a method, what to do, the line of Python for it, and why.

    `str()` shows all of it.
    """

    situation: Situation
    rows: list[Row]
    method: str
    line: str
    why: str

    @property
    def recommendation(self) -> str:
        """What to do and why, in one paragraph."""
        what = "Stay dense" if self.method == DENSE else f"Use {self.method}"
        return f"{what}: {self.why}"

    def __str__(self) -> str:
        said = textwrap.fill(self.recommendation, 110)
        return "\n\n".join([told(self.situation), table(self.rows), said, f"    {self.line}"])


def advise(
    model: torch.nn.Module | Workload | int,
    *,
    ranks: int,
    link_bits_per_s: float,
    step_s: float,
    overlap_s: float | None = None,
    latency_s: float = 50e-6,
    device: str | None = None,
    local: tuple[float, float] | None = None,
    memory_bytes: float | None = None,
    shard: int | None = None,
    loss_budget: float = 0.02,
    sources: dict[str, str] | None = None,
) -> Advice:
    """Predict a training step and run with every method of `METHODS`, and say what to use.

    Args: model: a model, a `Workload`, or a number of parameters (a transformer's shapes are then
        assumed). ranks: processes in all. link_bits_per_s: what one rank can send, each second,
        while it receives as much. step_s: seconds of a dense step of one process, without
        communication. overlap_s: seconds of it during which gradients may already travel; None:
        nine tenths of backward. latency_s: seconds of one message. device: a name in `DEVICES`, for
        the speed of the optimizer's own work and for memory; None: "a100". local: bytes and float32
        operations a second of a rank, where they were measured. memory_bytes: of one rank's device;
        None: the device's. shard: ranks that share one copy of the model (FSDP inside a node);
        None: as few as memory asks for. loss_budget: share by which a method's measured loss may
        exceed AdamW's. sources: for a number by its name, "given", "measured" or "assumed", where
        that is not plain from the call.

    Raises:
        ValueError: a number is out of range; the sentence names it.
    """
    if isinstance(model, torch.nn.Module):
        model = Workload.of(model.named_parameters())
    work = model if isinstance(model, Workload) else Workload.of_size(model)
    if device is not None and device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}.")
    if not 0 <= loss_budget < math.inf:
        raise ValueError(f"loss_budget must be a share such as 0.01; got {loss_budget}.")
    chosen = DEVICES[device or "a100"]
    memory_bytes = chosen.memory_bytes if memory_bytes is None else memory_bytes
    if memory_bytes is not None and not 0 < memory_bytes < math.inf:
        raise ValueError(f"memory_bytes must be positive and finite; got {memory_bytes}.")
    shard = shard or copies_over(work, ranks, memory_bytes)
    if shard < 1 or ranks % shard:
        raise ValueError(f"shard must divide the {ranks} ranks; got {shard}.")
    machine = Machine(ranks // shard, link_bits_per_s / 8, latency_s, *(local or chosen.local))
    known = {
        "computation": "given",
        "overlap": "assumed" if overlap_s is None else "given",
        "link": "given",
        "own work": f"assumed: {device or 'a100, name another with --device'}"
        if local is None
        else "measured",
    }
    situation = Situation(
        _part(work, shard),
        machine,
        step_s,
        (1 - LAST_BUCKET) * BACKWARD * step_s if overlap_s is None else overlap_s,
        shard,
        memory_bytes,
        loss_budget,
        {**known, **(sources or {})},
    )
    rows = rows_of(situation)
    return _decided(situation, rows)


def copies_over(work: Workload, ranks: int, memory_bytes: float | None) -> int:
    """Ranks over which one copy of the model has to be cut so that all methods fit: the fewest that
    divide `ranks`.
    """
    if memory_bytes is None or ranks < 1:
        return 1
    state = max(method(work, ranks).state for method in METHODS.values())
    needed = (8 * work.parameters + state) / (ROOM * memory_bytes)
    return next((n for n in range(1, ranks + 1) if ranks % n == 0 and n >= needed), 1)


def _part(work: Workload, shard: int) -> Workload:
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


def _allowed(situation: Situation, rows: list[Row]) -> list[Row]:
    """What may be advised, the fastest run first."""
    limit = 1 + situation.loss_budget + 1e-9
    ours = [
        row for row in rows if row.ours and row.fits and row.loss is not None and row.loss <= limit
    ]
    return sorted(ours, key=lambda row: -row.run)


def _decided(situation: Situation, rows: list[Row]) -> Advice:
    allowed = _allowed(situation, rows)
    best = allowed[0] if allowed else None
    method = (
        best.method
        if best is not None and situation.machine.ranks > 1 and best.run >= WORTH_IT
        else DENSE
    )
    why = _why_dense(situation, rows, best) if method == DENSE else _why(situation, rows, best)
    return Advice(situation, rows, method, METHODS[method].line, why)


def _why(situation: Situation, rows: list[Row], best: Row) -> str:
    dense = next(row for row in rows if row.method == DENSE)
    start = METHODS[best.method].start
    took, takes = seconds_in_words(dense.step.total), seconds_in_words(best.step.total)
    return (
        f"a step takes {takes} instead of {took}, and the whole run, its first {100 * start:.0f} % "
        f"dense, is {best.run:.1f} times as fast at {100 * best.run_bytes:.0f} % of the bytes. Its "
        f"loss was {_percent(best.loss)} AdamW's on {MEASURED_ON}. "
        f"{_sure(best.run)}{_wide(situation, best)}"
    )


def _wide(situation: Situation, best: Row) -> str:
    """A rank keeps less of a wider matrix than of those on which losses were measured."""
    rank = METHODS[best.method].options.get("rank", 16)
    if "tracked" not in best.method or situation.work.side <= 2 * MEASURED_WIDTH:
        return ""
    share, theirs = 100 * rank / situation.work.side, 100 * rank / MEASURED_WIDTH
    return (
        f" That was rank {rank} at {theirs:.1f} % of the width; in your model it is {share:.1f} %: "
        "expect to raise it."
    )


def _why_dense(situation: Situation, rows: list[Row], best: Row | None) -> str:
    dense = next(row for row in rows if row.method == DENSE)
    if situation.machine.ranks == 1:
        copies = (
            " all ranks together hold one copy of the model, which"
            if situation.shard > 1
            else " one process"
        )
        return f"there is nothing to average over a link:{copies} averages with nobody."
    waiting = 100 * dense.step.exchange / dense.step.total
    because = (
        f"a dense step waits {waiting:.0f} % of its time for the network, and no method within the "
        f"loss budget of {100 * situation.loss_budget:g} % makes the run 5 % faster."
    )
    others = [row for row in rows if row.ours and row.run >= WORTH_IT]
    if others:
        other = max(others, key=lambda row: row.run)
        reason = (
            "does not fit into memory"
            if not other.fits
            else f"had {_percent(other.loss)} AdamW's loss"
        )
        return (
            f"{because} {other.method} would make it {other.run:.1f} times as fast, but {reason}."
        )
    rate = pays_below(situation)
    return because + (f" Below about {rate_in_words(rate)} a rank one would." if rate else "")


def _percent(loss: float) -> str:
    return f"{100 * (loss - 1):.1f} % above"


def _sure(run: float) -> str:
    """How far the prediction is from the point where the answer changes."""
    if run >= 2 * WORTH_IT:
        return "That holds even if these numbers are off by a factor of two."
    if run >= 1.2 * WORTH_IT:
        return (
            'No close call, but try it: when="auto" times dense and compressed steps and decides.'
        )
    return 'That is a close call: let when="auto" time dense and compressed steps and decide.'


def pays_below(situation: Situation) -> float | None:
    """The fastest link, in bit/s, on which some method is advised; None where none is, down to 1
    Mbit/s.
    """
    for exponent in range(130, 59, -1):
        rate = 10 ** (exponent / 10)
        slower = replace(situation, machine=replace(situation.machine, link_bytes_per_s=rate / 8))
        allowed = _allowed(slower, rows_of(slower))
        if allowed and allowed[0].run >= WORTH_IT:
            return rate
    return None
