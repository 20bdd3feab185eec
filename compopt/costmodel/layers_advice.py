"""Whether to compress activations, and how: every compressor's step predicted, and a decision.

A compressor is advised when its measured accuracy is within the budget and a step at least 5 %
faster; of those the fastest, of as fast ones the most accurate. Everything else is "send
activations as they are", which is the answer nearly always inside a node. The same input always
gives the same answer.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace

from .advice import AS_FAST, WORTH_IT
from .compressors import MEASURED_ON, UNCOMPRESSED
from .data_parallel import Machine
from .devices import DEVICES, LAYER_SHARE, Speed
from .grid import Grid, Layers
from .layers import NONE, Counted, LayerRow, counted, places, rows_of_layers
from .layers_telling import lines_of, table, told
from .model_parallel import LayerCosts
from .telling import rate_in_words, seconds_in_words


@dataclass(frozen=True)
class LayersAdvice:
    """Result of `advise_layers`: a row a compressor, what to do, the lines of Python for it, why.

    `str()` shows all of it.
    """

    grid: Grid
    rows: list[LayerRow]
    compressor: str
    line: str
    why: str

    @property
    def recommendation(self) -> str:
        """What to do and why, in one paragraph."""
        row = next(row for row in self.rows if row.compressor == self.compressor)
        if self.compressor == NONE:
            return f"Send activations as they are: {self.why}"
        of = {"both": "boundaries and layers"}.get(row.where, row.where)
        return f"Use {self.compressor}, of {of}: {self.why}"

    def __str__(self) -> str:
        said = textwrap.fill(self.recommendation, 110)
        line = textwrap.indent(self.line, "    ")
        return "\n\n".join([told(self.grid), table(self.rows), said, line])


def advise_layers(
    work: Layers,
    *,
    tensor: int,
    pipeline: int,
    link_bits_per_s: float | None = None,
    inside_bits_per_s: float | None = None,
    step_s: float | None = None,
    costs: LayerCosts | None = None,
    latency_s: float | None = None,
    inside_latency_s: float | None = None,
    device: str | None = None,
    local: tuple[float, float, float] | None = None,
    loss_budget: float = 0.02,
    sources: dict[str, str] | None = None,
) -> LayersAdvice:
    """Predict a step of tensor- and pipeline-parallel layers with every compressor, and say what to
    use.

    Args:
        work: the layers, and how they are fed.
        tensor: ranks that share a layer.
        pipeline: stages.
        link_bits_per_s: what one rank can send to the next stage, each second; needed where there
            is one.
        inside_bits_per_s: what one rank can send to those that share its layers; needed where there
            are any.
        step_s: seconds that one rank computes in a step, without communication or waiting; None:
            from ``costs``, or at the share of the device's peak that training reaches.
        costs: measured by ``compopt.probe --layers``; its ``alpha`` gives ``step_s``.
        latency_s, inside_latency_s: seconds of one message on either link; None: 50 and 10 us.
        device: a name in `DEVICES`; None: "a100".
        local: bytes a second in memory, and operations a second of products in float32 and in 16
            bits, where they were measured.
        loss_budget: share of the accuracy that may be lost.
        sources: for a number by its name, "given", "measured" or "assumed", where that is not plain
            from the call.

    Raises:
        ValueError: a number is out of range or missing; the sentence names it.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}.")
    if not 0 <= loss_budget < math.inf:
        raise ValueError(f"loss_budget must be a share such as 0.01; got {loss_budget}.")
    _check_link("pipeline", pipeline, "link_bits_per_s", link_bits_per_s)
    _check_link("tensor", tensor, "inside_bits_per_s", inside_bits_per_s)
    chosen, named = DEVICES[device or "a100"], device or "a100, name another with --device"
    computed = "measured" if costs else f"assumed: {named}"
    known = {
        "computation": computed if step_s is None else "given",
        "link": "given",
        "inside": "given",
        "link latency": "assumed" if latency_s is None else "given",
        "inside latency": "assumed" if inside_latency_s is None else "given",
        "micro-batches": "given",
        "own work": "measured" if local else f"assumed: {named}",
    }
    if step_s is None:
        # alpha is of the ranks of a layer together.
        alpha = costs.alpha if costs else 1 / (LAYER_SHARE * chosen.half_flops_per_s * tensor)
        step_s = alpha * work.flops * work.micro_batches / pipeline
    # A link that nothing crosses has any rate.
    grid = Grid(
        work,
        tensor,
        pipeline,
        Machine(
            tensor,
            (inside_bits_per_s or 1e9) / 8,
            10e-6 if inside_latency_s is None else inside_latency_s,
        ),
        Machine(pipeline, (link_bits_per_s or 1e9) / 8, 50e-6 if latency_s is None else latency_s),
        step_s,
        Speed(*local) if local else chosen.speed,
        loss_budget,
        {**known, **(sources or {})},
    )
    found = counted(work, tensor)
    return _decided(grid, rows_of_layers(grid, found), found)


def _check_link(said: str, ranks: int, name: str, rate: float | None) -> None:
    """Raise ValueError where ``ranks`` are none, or meet over a link of which nothing is known."""
    if ranks < 1:
        raise ValueError(f"{said} must be at least 1; got {ranks}.")
    if ranks > 1 and rate is None:
        raise ValueError(f"{name} is missing: activations cross that link.")


def _allowed(grid: Grid, rows: list[LayerRow]) -> list[LayerRow]:
    """What may be advised, the fastest first, and of as fast ones the most accurate."""
    least = (1 - grid.loss_budget) * UNCOMPRESSED - 1e-9
    near = [row for row in rows if row.accuracy is not None and row.accuracy >= least]
    fastest = max((row.speedup for row in near), default=0.0)
    return sorted(
        near, key=lambda row: (row.speedup < fastest / AS_FAST, -(row.accuracy or 0), -row.speedup)
    )


def _decided(grid: Grid, rows: list[LayerRow], found: dict[str, Counted]) -> LayersAdvice:
    allowed = _allowed(grid, rows)
    if allowed and allowed[0].speedup >= WORTH_IT:
        best = allowed[0]
        line = lines_of(grid, best.compressor, best.where)
        return LayersAdvice(grid, rows, best.compressor, line, _why(rows[0], best))
    return LayersAdvice(grid, rows, NONE, lines_of(grid, NONE, ""), _why_none(grid, rows, found))


def _why(none: LayerRow, best: LayerRow) -> str:
    took, takes = seconds_in_words(none.step.total), seconds_in_words(best.step.total)
    sure = (
        "That holds even if these numbers are off by a factor of two."
        if best.speedup >= 2 * WORTH_IT
        else "That is a close call: time both."
        if best.speedup < 1.2 * WORTH_IT
        else "No close call, but time both."
    )
    return (
        f"a step takes {takes} instead of {took}, {best.speedup:.2f} times as fast. Accuracy was "
        f"{best.accuracy:.1f} % instead of {UNCOMPRESSED} % on {MEASURED_ON}; harder tasks lose "
        f"more. {sure}"
    )


def _why_none(grid: Grid, rows: list[LayerRow], found: dict[str, Counted]) -> str:
    if not places(grid):
        return "one rank computes all layers, so that no activation crosses a link."
    waiting = 100 * rows[0].step.exchange / rows[0].step.total
    because = (
        f"a step waits {waiting:.0f} % of its time for them, and no compressor that loses at most "
        f"{100 * grid.loss_budget:g} % of the accuracy makes it 5 % faster."
    )
    faster = [row for row in rows if row.speedup >= WORTH_IT]
    if faster:
        other = max(faster, key=lambda row: row.speedup)
        run = f"{other.compressor} would make it {other.speedup:.2f} times as fast"
        return f"{because} {run}, {_against(other)}."
    rate = pays_below(grid, found)
    where = "between stages" if grid.pipeline > 1 else "inside"
    return because + (
        f" Below about {rate_in_words(rate)} a rank {where} one would." if rate else ""
    )


def _against(row: LayerRow) -> str:
    if row.accuracy is None:
        return "but its accuracy was not measured"
    return f"but had {row.accuracy:.1f} % instead of {UNCOMPRESSED} % on {MEASURED_ON}"


def pays_below(grid: Grid, found: dict[str, Counted]) -> float | None:
    """About the fastest link between stages, or inside where there is one stage, on which some
    compressor is advised, in bit/s; None where none is at 1 Mbit/s.
    """

    def pays(exponent: int) -> bool:
        rate = 10 ** (exponent / 10) / 8
        name = "between" if grid.pipeline > 1 else "inside"
        link = replace(getattr(grid, name), link_bytes_per_s=rate)
        slower = Grid(**{**grid.__dict__, name: link})
        allowed = _allowed(slower, rows_of_layers(slower, found))
        return bool(allowed) and allowed[0].speedup >= WORTH_IT

    low, high = 60, 131
    if not pays(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return 10 ** (low / 10)
