"""What to use: every method's step and run predicted, and a decision as a user would take it.

A method is advised when it is ours, its measured loss is within the budget, its state fits, and the
whole run, dense start included, is at least 5 % faster. Of those the fastest is taken; among runs
as fast as that one that loses least, and where seeds could change that, the first of the table.
Everything else is "stay dense". The same input always gives the same answer.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace

import torch

from .data_parallel import LAST_BUCKET, Machine
from .devices import DEVICES
from .methods import LOCAL_RANKS, METHODS, RUN, WIDE_LOCAL, Method
from .predicting import DENSE, Row, Situation, copies_over, part_of, rows_of
from .telling import rate_in_words, seconds_in_words, table, told
from .workload import Workload

# A predicted gain below this says nothing.
WORTH_IT = 1.05
# Runs whose speed-ups differ by less are as fast as each other.
AS_FAST = 1.0005
# A loss of one seed is known no better.
SAME_LOSS = 0.015
# Of a step: two of its three passes over the layers, during which gradients may already travel.
BACKWARD = 2 / 3
# Of the model on which losses were measured.
MEASURED_WIDTH = 128


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
    interference: tuple[float, float] = (0.0, 0.0),
    memory_bytes: float | None = None,
    shard: int | None = None,
    loss_budget: float = 0.02,
    sources: dict[str, str] | None = None,
) -> Advice:
    """Predict a training step and run with every method of `METHODS`, and say what to use.

    Args:
        model: a model, a `Workload`, or a number of parameters (a transformer's shapes are then
            assumed).
        ranks: processes in all.
        link_bits_per_s: what one rank can send, each second, while it receives as much.
        step_s: seconds of a dense step of one process, without communication.
        overlap_s: seconds of it during which gradients may already travel; None: nine tenths of
            backward.
        latency_s: seconds of one message.
        device: a name in `DEVICES`, for the speed of the optimizer's own work and for memory; None:
            "a100".
        local: bytes and float32 operations a second of a rank, where they were measured.
        interference: share of a step that a rank waits for the slowest, and seconds that
            computation loses for each byte sent beside it, where they were measured.
        memory_bytes: of one rank's device; None: the device's.
        shard: ranks that share one copy of the model (FSDP inside a node); None: as few as memory
            asks for.
        loss_budget: share by which a method's measured loss may exceed AdamW's.
        sources: for a number by its name, "given", "measured" or "assumed", where that is not plain
            from the call.

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
    machine = Machine(
        ranks // shard, link_bits_per_s / 8, latency_s, *(local or chosen.local), *interference
    )
    named = device or "a100, name another with --device"
    known = {
        "computation": "given",
        "overlap": "assumed" if overlap_s is None else "given",
        "link": "given",
        "own work": f"assumed: {named}" if local is None else "measured",
    }
    situation = Situation(
        part_of(work, shard),
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


def _allowed(situation: Situation, rows: list[Row]) -> list[Row]:
    """What may be advised, the fastest run first."""
    limit = 1 + situation.loss_budget + 1e-9
    ours = [
        row for row in rows if row.ours and row.fits and row.loss is not None and row.loss <= limit
    ]
    return sorted(ours, key=lambda row: -row.run)


def _decided(situation: Situation, rows: list[Row]) -> Advice:
    allowed = _allowed(situation, rows)
    worth_it = [row for row in allowed if row.run >= max(WORTH_IT, allowed[0].run / AS_FAST)]
    if situation.machine.ranks > 1 and worth_it:
        least = min(row.loss or math.inf for row in worth_it)
        alike = {row.method for row in worth_it if (row.loss or math.inf) <= least + SAME_LOSS}
        best = next(row for row in rows if row.method in alike)
        method, why = best.method, _why(situation, rows, best)
    else:
        method, why = DENSE, _why_dense(situation, rows)
    return Advice(situation, rows, method, METHODS[method].line, why)


def _why(situation: Situation, rows: list[Row], best: Row) -> str:
    dense = next(row for row in rows if row.method == DENSE)
    method = METHODS[best.method]
    took, takes = seconds_in_words(dense.step.total), seconds_in_words(best.step.total)
    return (
        f"a step takes {takes} instead of {took}, and the whole run, {_beginning(method)}, is "
        f"{best.run:.1f} times as fast at {_share(best.run_bytes)} % of the bytes. Its loss was "
        f"{_percent(best.loss)} AdamW's on {method.measured_on}. "
        f"{_sure(best)}{_wide(situation, best)}"
    )


def _beginning(method: Method) -> str:
    if method.growing:
        return f"its rounds growing over {method.growing} of {RUN} steps"
    return f"its first {100 * method.start:.0f} % dense"


def _share(of_one: float) -> str:
    return f"{100 * of_one:.0f}" if of_one >= 0.1 else f"{100 * of_one:.2g}"


def _wide(situation: Situation, best: Row) -> str:
    """What losses were not measured on: wider matrices, of which a rank keeps less; more ranks."""
    wide = situation.work.side > 2 * MEASURED_WIDTH
    if METHODS[best.method].growing:
        more = situation.machine.ranks > LOCAL_RANKS
        ranks = f" More than {LOCAL_RANKS} ranks were not measured." if more else ""
        return (f" {WIDE_LOCAL}" if wide else "") + ranks
    rank = METHODS[best.method].options.get("rank", 16)
    if "tracked" not in best.method or not wide:
        return ""
    share, theirs = 100 * rank / situation.work.side, 100 * rank / MEASURED_WIDTH
    return (
        f" That was rank {rank} at {theirs:.1f} % of the width; in your model it is {share:.1f} %: "
        "expect to raise it."
    )


def _why_dense(situation: Situation, rows: list[Row]) -> str:
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
    others = [row for row in rows if row.ours and row.loss and row.run >= WORTH_IT]
    if others:
        other = max(others, key=lambda row: row.run)
        run = f"{other.method} would make it {other.run:.1f} times as fast"
        return f"{because} {run}, but {_against(other)}."
    rate = pays_below(situation)
    return because + (f" Below about {rate_in_words(rate)} a rank one would." if rate else "")


def _against(row: Row) -> str:
    """Why a method that is fast enough is not advised."""
    if not row.fits:
        return "does not fit into memory"
    return f"had {_percent(row.loss)} AdamW's loss"


def _percent(loss: float | None) -> str:
    if loss is None:
        return "an unknown share of"
    return f"{abs(100 * (loss - 1)):.1f} % {'above' if loss >= 1 else 'below'}"


def _sure(row: Row) -> str:
    """How far the prediction is from the point where the answer changes."""
    if row.run >= 2 * WORTH_IT:
        return "That holds even if these numbers are off by a factor of two."
    close = row.run < 1.2 * WORTH_IT
    if METHODS[row.method].growing:  # its class has no `when`
        return "That is a close call: time both." if close else "No close call, but time both."
    if close:
        return 'That is a close call: let when="auto" time dense and compressed steps and decide.'
    return 'No close call, but try it: when="auto" times dense and compressed steps and decides.'


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
