"""Every compressor's step in one situation of tensor and pipeline parallelism.

A layer adds up activations over its tensor-parallel ranks twice in forward, through the compressor,
and twice in backward, where gradients are never compressed; a stage hands on activations, and gets
gradients back. As in MCBench, and as accuracies were measured, the last half of the layers is
compressed, and the boundaries that lead into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..activations import Identity
from ..activations.codecs import Compressor
from .compressors import COMPRESSORS
from .counting import Crossing, Exchange, crossing_of, exchange_of
from .data_parallel import Machine, Step, all_gather_seconds, all_reduce_seconds
from .grid import Grid, Layers
from .model_parallel import dtype_of
from .schedule import pipeline_seconds

# All-reduces of a layer and a micro-batch, forward and as many backward.
EXCHANGES = 2
# Of a layer's seconds: one of its three passes.
FORWARD = 1 / 3
# What no compressor is called.
NONE = "none"

Where = Literal["", "boundaries", "layers", "both"]


@dataclass(frozen=True)
class LayerRow:
    """One compressor, where it gains most.

    Args:
        compressor: its name in `COMPRESSORS`.
        where: what is compressed: "boundaries" between stages, "layers", the all-reduces inside
            them, or "both".
        step: seconds of a step: computation, the compressor's own work, exposed communication.
        speedup: over a step that sends everything.
        inside, between: bytes that a rank of the last stages sends in a step, to those it shares
            layers with; that cross the last boundary, both ways.
        accuracy: measured, percent; None: not measured.
    """

    compressor: str
    where: Where
    step: Step
    speedup: float
    inside: float
    between: float
    accuracy: float | None


@dataclass(frozen=True)
class Counted:
    """A compressor's exchange and crossing in one model."""

    exchange: Exchange
    crossing: Crossing


def counted(work: Layers, tensor: int) -> dict[str, Counted]:
    """All compressors, and none, by name."""
    tokens = work.micro_batch * work.sequence
    codecs: dict[str, Compressor] = {NONE: Identity()}
    codecs |= {name: kind.make(tokens, work.hidden) for name, kind in COMPRESSORS.items()}
    dtype = dtype_of(work.activation_bytes)
    return {
        name: Counted(
            exchange_of(codec, work.shape, dtype, tensor), crossing_of(codec, work.shape, dtype)
        )
        for name, codec in codecs.items()
    }


@dataclass
class _Stages:
    """Seconds of a micro-batch of every stage, and of its messages."""

    forward: list[float]
    backward: list[float]
    forth: list[float]
    back: list[float]

    def seconds(self, micro_batches: int) -> float:
        return pipeline_seconds(self.forward, self.backward, self.forth, self.back, micro_batches)


def step_of(grid: Grid, found: dict[str, Counted], name: str, where: Where) -> Step:
    """Predict one step: the schedule with computation alone, with the compressor's work, and with
    all.
    """
    m = grid.work.micro_batches
    compute, own, whole = (
        _stages(grid, found, name, where, *what).seconds(m)
        for what in ((False, False), (True, False), (True, True))
    )
    # The same sums in another order differ by rounding.
    return Step(compute, max(0.0, own - compute), max(0.0, whole - max(own, compute)))


def _stages(
    grid: Grid, found: dict[str, Counted], name: str, where: Where, own: bool, sent: bool
) -> _Stages:
    work, n = grid.work, grid.pipeline
    layer = grid.compute_s / work.micro_batches / (work.layers / n)
    dense, one = found[NONE], found[name]
    stages = _Stages([], [], [], [])
    for stage in range(n):
        first, last = stage * work.layers // n, (stage + 1) * work.layers // n
        compressed = _compressed(work, first, last) if where in ("layers", "both") else 0
        forward, backward = FORWARD * layer * (last - first), (1 - FORWARD) * layer * (last - first)
        for exchange, layers in (
            (dense.exchange, last - first - compressed),
            (one.exchange, compressed),
        ):
            there, back = _exchanged(grid, exchange, dense.exchange, own, sent)
            forward, backward = forward + layers * there, backward + layers * back
        stages.forward.append(forward)
        stages.backward.append(backward)
        if stage == 0:
            continue
        through = first >= work.layers // 2 and where in ("boundaries", "both")
        crossing = one.crossing if through else dense.crossing
        _cross(grid, stages, crossing, own, sent)
    return stages


def _compressed(work: Layers, first: int, last: int) -> int:
    """Layers of a stage that belong to the last half."""
    return last - max(first, min(last, work.layers // 2))


def _exchanged(
    grid: Grid, exchange: Exchange, dense: Exchange, own: bool, sent: bool
) -> tuple[float, float]:
    """Seconds that the exchanges of one layer take, forward and backward."""
    if grid.tensor == 1:
        return 0.0, 0.0
    forward = backward = 0.0
    if own:
        forward += exchange.forward.seconds(grid.speed)
        backward += exchange.backward.seconds(grid.speed)
    if sent:
        forward += sum(all_reduce_seconds(grid.inside, size) for size in exchange.reduced)
        forward += sum(
            all_gather_seconds(grid.inside, grid.tensor * size) for size in exchange.gathered
        )
        # Gradients of a layer's input are added up in full.
        gradients = (*dense.reduced, *exchange.reduced_back)
        backward += sum(all_reduce_seconds(grid.inside, size) for size in gradients)
    return EXCHANGES * forward, EXCHANGES * backward


def _cross(grid: Grid, stages: _Stages, crossing: Crossing, own: bool, sent: bool) -> None:
    """Add the boundary that leads into the last of these stages."""
    if own:
        for part, works in (
            (stages.forward, (crossing.send, crossing.receive)),
            (stages.backward, (crossing.send_back, crossing.receive_back)),
        ):
            part[-2] += works[0].seconds(grid.speed)
            part[-1] += works[1].seconds(grid.speed)
    stages.forth.append(_message(grid.between, crossing.forth) if sent else 0.0)
    stages.back.append(_message(grid.between, crossing.back) if sent else 0.0)


def _message(link: Machine, size: int) -> float:
    return link.latency_s + size / link.link_bytes_per_s


def places(grid: Grid) -> tuple[Where, ...]:
    """Where something may be compressed."""
    if grid.tensor > 1 and grid.pipeline > 1:
        return "boundaries", "layers", "both"
    return ("layers",) if grid.tensor > 1 else ("boundaries",) if grid.pipeline > 1 else ()


def rows_of_layers(grid: Grid, found: dict[str, Counted] | None = None) -> list[LayerRow]:
    """Every compressor where it gains most, and none first."""
    found = found or counted(grid.work, grid.tensor)
    dense = step_of(grid, found, NONE, "")
    rows = [_row(grid, found, NONE, "", dense, dense)]
    for name in COMPRESSORS if places(grid) else ():
        steps: dict[Where, Step] = {
            where: step_of(grid, found, name, where) for where in places(grid)
        }
        best = min(steps, key=lambda where: steps[where].total)
        rows.append(_row(grid, found, name, best, steps[best], dense))
    return rows


def _row(
    grid: Grid, found: dict[str, Counted], name: str, where: Where, step: Step, dense: Step
) -> LayerRow:
    exchange = found[name if where in ("layers", "both") else NONE].exchange
    crossing = found[name if where in ("boundaries", "both") else NONE].crossing
    work, ring = grid.work, (grid.tensor - 1) / grid.tensor
    gradients = (*found[NONE].exchange.reduced, *exchange.reduced_back)
    one = 2 * ring * (sum(exchange.reduced) + sum(gradients))
    one += (grid.tensor - 1) * sum(exchange.gathered)
    last = work.layers - (grid.pipeline - 1) * work.layers // grid.pipeline
    compressed = _compressed(work, work.layers - last, work.layers)
    plain = 4 * ring * sum(found[NONE].exchange.reduced)
    inside = EXCHANGES * work.micro_batches * (compressed * one + (last - compressed) * plain)
    between = work.micro_batches * (crossing.forth + crossing.back) if grid.pipeline > 1 else 0
    accuracy = COMPRESSORS[name].accuracy if name != NONE else None
    return LayerRow(name, where, step, dense.total / step.total, inside, float(between), accuracy)
