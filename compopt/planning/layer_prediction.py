"""Every compressor's step in one situation of tensor and pipeline parallelism.

A layer adds up activations over its tensor-parallel ranks twice in forward, through the compressor,
and twice in backward, where gradients are never compressed. A stage hands on activations, and gets
gradients back. As in MCBench, and as accuracies were measured, the last half of the layers is
compressed, and the boundaries that lead into them.

``activation_advice`` compares what it predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..activations import Identity
from ..activations.base import Compressor
from .activation_costs import (
    COMPRESSORS,
    UNCOMPRESSED,
    Crossing,
    Exchange,
    crossing_of,
    dtype_of,
    exchange_of,
)
from .hardware import (
    Machine,
    Speed,
    all_gather_seconds,
    all_reduce_seconds,
    check_positive,
    ring_bytes,
)
from .model_parallel import layer_flops
from .prediction import Step

# Most micro-batches times stages: the schedule goes through them one by one.
MAX_PASSES = 1 << 14


@dataclass(frozen=True)
class Layers:
    """The layers of one model, of width ``hidden``, and the micro-batches of a step: each of
    ``micro_batch`` sequences of ``sequence`` tokens, of 2 or 4 ``activation_bytes`` a number.
    """

    hidden: int
    layers: int
    sequence: int
    micro_batch: int
    micro_batches: int
    activation_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "sequence", "micro_batch", "micro_batches"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} must be a positive number; got {getattr(self, name)}.")
        dtype_of(self.activation_bytes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a micro-batch's activation."""
        return self.micro_batch, self.sequence, self.hidden

    @property
    def flops(self) -> float:
        """Operations of all layers on one micro-batch: of four passes as long as forward, all but
        recomputation.
        """
        recomputing = layer_flops(self.micro_batch, self.sequence, self.hidden)
        return 3 / 4 * self.layers * recomputing


@dataclass(frozen=True)
class Grid:
    """Layers spread over ``tensor`` ranks that share a layer, times ``pipeline`` stages.

    ``inside`` and ``between`` are a rank's links to those that share its layers, and to the next
    stage. A rank computes for ``compute_s`` seconds a step; ``speed`` is for the compressors' work.
    ``sources`` say for each number whether it was given, measured or assumed.
    """

    work: Layers
    tensor: int
    pipeline: int
    inside: Machine
    between: Machine
    compute_s: float
    speed: Speed
    loss_budget: float
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.work.hidden % self.tensor:
            raise ValueError(
                f"tensor must divide the width, {self.work.hidden}; got {self.tensor}."
            )
        if self.pipeline > min(self.work.layers, self.work.micro_batches):
            raise ValueError(
                f"pipeline must be no more than the {self.work.layers} layers and the "
                f"{self.work.micro_batches} micro-batches of a step; got {self.pipeline}."
            )
        if self.pipeline * self.work.micro_batches > MAX_PASSES:
            raise ValueError(
                f"pipeline times micro_batches must be at most {MAX_PASSES}; got {self.pipeline} "
                f"times {self.work.micro_batches}."
            )
        check_positive(compute_s=self.compute_s)


def order_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """The passes of a stage in torch's 1F1B schedule: (is forward, micro-batch).

    As many forwards as stages follow it, then a forward and a backward in turn, then the remaining
    backwards.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(True, k) for k in range(ahead)]
    for k in range(ahead, micro_batches):
        order += [(True, k), (False, k - ahead)]
    return order + [(False, k) for k in range(micro_batches - ahead, micro_batches)]


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    forth: Sequence[float],
    back: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds of one step in the 1F1B schedule, from those of a micro-batch in every stage, and of
    a message ``forth`` (the activation) and ``back`` (its gradient) across every boundary.

    A link carries one message at a time, in each direction, while its stages compute.
    """
    stages = len(forward)
    orders = [order_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    ended, busy, position = [0.0] * stages, [[0.0] * stages for _ in range(2)], [0] * stages
    # By stage and pass, when its input arrives.
    ready: list[dict[tuple[bool, int], float]] = [{} for _ in range(stages)]
    ready[0] = {(True, k): 0.0 for k in range(micro_batches)}
    ready[-1] |= {(False, k): 0.0 for k in range(micro_batches)}
    waiting = list(range(stages))
    while waiting:
        stage = waiting.pop()
        while position[stage] < len(orders[stage]):
            step = orders[stage][position[stage]]
            arrived = ready[stage].get(step)
            if arrived is None:
                break
            is_forward, _ = step
            end = max(ended[stage], arrived) + (forward if is_forward else backward)[stage]
            ended[stage], other = end, stage + (1 if is_forward else -1)
            position[stage] += 1
            if 0 <= other < stages:
                link = busy[is_forward]
                link[stage] = max(link[stage], end) + (forth[stage] if is_forward else back[other])
                ready[other][step] = link[stage]
                waiting.append(other)
    return max(ended)


# All-reduces of a layer and a micro-batch in forward, and again in backward.
EXCHANGES = 2
# Share of a layer's seconds that is forward: one of its three passes.
FORWARD = 1 / 3
# The row without a compressor.
NONE = "none"

Where = Literal["", "boundaries", "layers", "both"]


@dataclass(frozen=True)
class LayerRow:
    """One compressor of `COMPRESSORS`, where it gains most: at the "boundaries" between stages, in
    the all-reduces of "layers", or at "both".

    ``speedup`` is over a step that sends everything. In a step a rank of the last stage sends
    ``inside`` bytes to those it shares layers with, and ``between`` cross the last boundary, both
    ways. ``accuracy`` was measured, in percent.
    """

    compressor: str
    where: Where
    step: Step
    speedup: float
    inside: float
    between: float
    accuracy: float


@dataclass(frozen=True)
class CodecCosts:
    """Bytes and work of a compressor in one model."""

    exchange: Exchange
    crossing: Crossing


def count_codecs(work: Layers, tensor: int) -> dict[str, CodecCosts]:
    """The costs of every compressor, and of none, by name."""
    tokens = work.micro_batch * work.sequence
    codecs: dict[str, Compressor] = {NONE: Identity()}
    codecs |= {name: kind.make(tokens, work.hidden) for name, kind in COMPRESSORS.items()}
    dtype = dtype_of(work.activation_bytes)
    return {
        name: CodecCosts(
            exchange_of(codec, work.shape, dtype, tensor), crossing_of(codec, work.shape, dtype)
        )
        for name, codec in codecs.items()
    }


# Links that take no time, and ranks whose compressors' own work takes none.
INSTANT_LINK = {"link_bytes_per_s": 1e300, "latency_s": 0.0}
INSTANT_WORK = Speed(1e300, 1e300, 1e300)


def predict_step(grid: Grid, costs: dict[str, CodecCosts], name: str, where: Where) -> Step:
    """Predict one step, from schedules without work and messages, with work, and with both."""
    links = {at: replace(getattr(grid, at), **INSTANT_LINK) for at in ("inside", "between")}
    with_work = replace(grid, **links)
    grids = replace(with_work, speed=INSTANT_WORK), with_work, grid
    compute, worked, total = (schedule_seconds(each, costs, name, where) for each in grids)
    # Equal sums in another order differ by rounding.
    return Step(compute, max(0.0, worked - compute), max(0.0, total - max(worked, compute)))


def schedule_seconds(grid: Grid, costs: dict[str, CodecCosts], name: str, where: Where) -> float:
    """Seconds of a step with this compressor at these places."""
    work, n, speed, link = grid.work, grid.pipeline, grid.speed, grid.between
    layer = grid.compute_s / work.micro_batches / (work.layers / n)
    dense, compressor = costs[NONE], costs[name]
    forward, backward, forth, back = [0.0] * n, [0.0] * n, list[float](), list[float]()
    for stage in range(n):
        first, last = stage * work.layers // n, (stage + 1) * work.layers // n
        compressed = count_compressed(work, first, last) if where in ("layers", "both") else 0
        forward[stage] += FORWARD * layer * (last - first)
        backward[stage] += (1 - FORWARD) * layer * (last - first)
        for exchange, layers in (
            (dense.exchange, last - first - compressed),
            (compressor.exchange, compressed),
        ):
            seconds = layer_exchange_seconds(grid, exchange, dense.exchange)
            forward[stage] += layers * seconds[0]
            backward[stage] += layers * seconds[1]
        if stage == 0:
            continue
        is_compressed = first >= work.layers // 2 and where in ("boundaries", "both")
        crossing = compressor.crossing if is_compressed else dense.crossing
        forward[stage - 1] += crossing.send.seconds(speed)
        forward[stage] += crossing.receive.seconds(speed)
        backward[stage - 1] += crossing.send_back.seconds(speed)
        backward[stage] += crossing.receive_back.seconds(speed)
        forth.append(link.latency_s + crossing.forth / link.link_bytes_per_s)
        back.append(link.latency_s + crossing.back / link.link_bytes_per_s)
    return pipeline_seconds(forward, backward, forth, back, work.micro_batches)


def count_compressed(work: Layers, first: int, last: int) -> int:
    """Layers of a stage that belong to the last half of the model."""
    return last - max(first, min(last, work.layers // 2))


def layer_exchange_seconds(grid: Grid, exchange: Exchange, dense: Exchange) -> tuple[float, float]:
    """Seconds of one layer's exchanges, forward and backward."""
    if grid.tensor == 1:
        return 0.0, 0.0
    link = grid.inside
    forward = exchange.forward.seconds(grid.speed)
    forward += sum(all_reduce_seconds(link, size) for size in exchange.reduced)
    forward += sum(all_gather_seconds(link, grid.tensor * size) for size in exchange.gathered)
    # Gradients of a layer's input are summed uncompressed.
    gradients = (*dense.reduced, *exchange.reduced_back)
    backward = exchange.backward.seconds(grid.speed)
    backward += sum(all_reduce_seconds(link, size) for size in gradients)
    return EXCHANGES * forward, EXCHANGES * backward


def compressible_places(grid: Grid) -> tuple[Where, ...]:
    """Return the places at which activations cross a link."""
    if grid.tensor > 1 and grid.pipeline > 1:
        return "boundaries", "layers", "both"
    return ("layers",) if grid.tensor > 1 else ("boundaries",) if grid.pipeline > 1 else ()


def predict_layer_rows(grid: Grid, costs: dict[str, CodecCosts] | None = None) -> list[LayerRow]:
    """The row without a compressor, then every compressor where it gains most."""
    costs = costs or count_codecs(grid.work, grid.tensor)
    dense = predict_step(grid, costs, NONE, "")
    rows = [_make_row(grid, costs, NONE, "", dense, dense)]
    for name in COMPRESSORS if compressible_places(grid) else ():
        steps: dict[Where, Step] = {
            where: predict_step(grid, costs, name, where) for where in compressible_places(grid)
        }
        best = min(steps, key=lambda where: steps[where].total)
        rows.append(_make_row(grid, costs, name, best, steps[best], dense))
    return rows


def _make_row(
    grid: Grid, costs: dict[str, CodecCosts], name: str, where: Where, step: Step, dense: Step
) -> LayerRow:
    exchange = costs[name if where in ("layers", "both") else NONE].exchange
    crossing = costs[name if where in ("boundaries", "both") else NONE].crossing
    work, tensor = grid.work, grid.tensor
    gradients = (*costs[NONE].exchange.reduced, *exchange.reduced_back)
    one = ring_bytes(tensor, sum(exchange.reduced) + sum(gradients))
    one += (tensor - 1) * sum(exchange.gathered)
    last = work.layers - (grid.pipeline - 1) * work.layers // grid.pipeline
    compressed = count_compressed(work, work.layers - last, work.layers)
    plain = 2 * ring_bytes(tensor, sum(costs[NONE].exchange.reduced))
    inside = EXCHANGES * work.micro_batches * (compressed * one + (last - compressed) * plain)
    between = work.micro_batches * (crossing.forth + crossing.back) if grid.pipeline > 1 else 0
    accuracy = COMPRESSORS[name].accuracy if name != NONE else UNCOMPRESSED
    return LayerRow(name, where, step, dense.total / step.total, inside, float(between), accuracy)
