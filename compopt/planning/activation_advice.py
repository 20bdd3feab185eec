"""`advise_layers`: whether to compress activations, how, and why, as text.

A compressor is advised when its measured accuracy is within the budget and a step at least 5 %
faster; of those the fastest, of as fast ones the most accurate. Otherwise activations are sent as
they are, which is the answer nearly always inside a node. The choice is deterministic.

``costmodel`` exports it, and `compopt-advise` prints it.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_left
from dataclasses import dataclass, replace

from .activation_costs import COMPRESSORS, MEASURED_ON, UNCOMPRESSED
from .advice_decision import WORTH_IT
from .formatting import align_columns, format_advice, format_rate, format_seconds
from .hardware import LAYER_SHARE, Machine, Speed, find_device, source_of
from .layer_prediction import (
    NONE,
    CodecCosts,
    Grid,
    LayerRow,
    Layers,
    Where,
    compressible_places,
    count_codecs,
    predict_layer_rows,
)

__all__ = ["Layers", "LayersAdvice", "advise_layers"]

# Steps within this of the fastest are as fast.
AS_FAST = 1.0005


@dataclass(frozen=True)
class LayersAdvice:
    """Result of `advise_layers`: a row per compressor, what to do, the lines of Python for it, why.

    `str()` shows all of it.
    """

    grid: Grid
    rows: list[LayerRow]
    compressor: str
    line: str
    why: str

    @property
    def recommendation(self) -> str:
        """The recommendation and its reasons, in one paragraph."""
        row = next(row for row in self.rows if row.compressor == self.compressor)
        if self.compressor == NONE:
            return f"Send activations as they are: {self.why}"
        of = {"both": "boundaries and layers"}.get(row.where, row.where)
        return f"Use {self.compressor}, of {of}: {self.why}"

    def __str__(self) -> str:
        table = format_layer_table(self.rows, self.compressor)
        return format_advice(self.recommendation, self.line, table, format_grid(self.grid))


def advise_layers(
    work: Layers,
    *,
    tensor: int,
    pipeline: int,
    link_bits_per_s: float | None = None,
    inside_bits_per_s: float | None = None,
    step_s: float | None = None,
    latency_s: float | None = None,
    inside_latency_s: float | None = None,
    device: str | None = None,
    local: tuple[float, float] | None = None,
    loss_budget: float = 0.02,
    sources: dict[str, str] | None = None,
) -> LayersAdvice:
    """Predict a step of tensor- and pipeline-parallel layers with every compressor, and say what to
    use.

    Args:
        work: the layers, and how they are fed.
        tensor, pipeline: ranks that share a layer; stages.
        link_bits_per_s, inside_bits_per_s: rates at which one rank sends to the next stage, and to
            those that share its layers; needed where there are any.
        step_s: seconds that one rank computes in a step, without communication or waiting; None:
            at the share of the device's peak that training reaches.
        latency_s, inside_latency_s: seconds of one message on either link; None: 50 and 10 us.
        device: a name in `DEVICES`; None: "a100".
        local: bytes a second in memory, and operations a second of products in float32, where they
            were measured.
        loss_budget: share of the accuracy that may be lost.
        sources: for a number by its name, "given", "measured" or "assumed", where that is not plain
            from the call.

    Raises:
        ValueError: a number is out of range or missing; the sentence names it.
    """
    hardware, device_name = find_device(device)
    if not 0 <= loss_budget < math.inf:
        raise ValueError(f"loss_budget must be a share such as 0.01; got {loss_budget}.")
    between = _make_link("pipeline", pipeline, "link_bits_per_s", link_bits_per_s, latency_s, 50e-6)
    inside = _make_link(
        "tensor", tensor, "inside_bits_per_s", inside_bits_per_s, inside_latency_s, 10e-6
    )
    default_sources = {
        "computation": source_of(step_s, f"assumed: {device_name}"),
        "link": "given",
        "inside": "given",
        "link latency": source_of(latency_s),
        "inside latency": source_of(inside_latency_s),
        "micro-batches": "given",
        "own work": "measured" if local else f"assumed: {device_name}",
    }
    if step_s is None:
        rate = LAYER_SHARE * hardware.half_flops_per_s * tensor  # of the ranks of a layer together
        step_s = work.flops * work.micro_batches / pipeline / rate
    speed = Speed(*local, hardware.speed.half_flops_per_s) if local else hardware.speed
    sources = {**default_sources, **(sources or {})}
    grid = Grid(work, tensor, pipeline, inside, between, step_s, speed, loss_budget, sources)
    codecs = count_codecs(work, tensor)
    rows = predict_layer_rows(grid, codecs)
    best = choose_layer_row(grid, rows)
    row, why = best or rows[0], explain_layer_choice(grid, rows, codecs, best)
    line = make_lines(grid, row.compressor, row.where)
    return LayersAdvice(grid, rows, row.compressor, line, why)


def _make_link(
    dimension: str, ranks: int, name: str, rate: float | None, latency: float | None, default: float
) -> Machine:
    """Raise ValueError without ranks, or where their link has no rate. One that nothing crosses has
    any rate.
    """
    if ranks < 1:
        raise ValueError(f"{dimension} must be at least 1; got {ranks}.")
    if ranks > 1 and rate is None:
        raise ValueError(f"{name} is missing: activations cross that link.")
    return Machine(ranks, (rate or 1e9) / 8, default if latency is None else latency)


# The choice


def choose_layer_row(grid: Grid, rows: list[LayerRow]) -> LayerRow | None:
    """The most accurate of the fastest rows within the budget; None where none is worth it."""
    least = (1 - grid.loss_budget) * UNCOMPRESSED - 1e-9
    near = [row for row in rows if row.accuracy >= least]
    fastest = max(row.speedup for row in near)
    as_fast = [row for row in near if row.speedup >= fastest / AS_FAST]
    best = max(as_fast, key=lambda row: (row.accuracy, row.speedup))
    return best if best.speedup >= WORTH_IT else None


def layers_pay_below(grid: Grid, codecs: dict[str, CodecCosts]) -> float | None:
    """About the fastest link between stages, or inside where there is one stage, on which some
    compressor is advised, in bit/s; None where none is at 1 Mbit/s.
    """

    def does_not_pay(exponent: int) -> bool:
        name = "between" if grid.pipeline > 1 else "inside"
        link = replace(getattr(grid, name), link_bytes_per_s=10 ** (exponent / 10) / 8)
        slower = Grid(**{**vars(grid), name: link})
        return choose_layer_row(slower, predict_layer_rows(slower, codecs)) is None

    exponents = range(60, 131)
    count = bisect_left(exponents, True, key=does_not_pay)
    return 10 ** (exponents[count - 1] / 10) if count else None


# The text: reasons, lines to paste, table, inputs


def explain_layer_choice(
    grid: Grid, rows: list[LayerRow], codecs: dict[str, CodecCosts], best: LayerRow | None
) -> str:
    """The reasons for a row, or for sending activations as they are where there is none."""
    dense = rows[0].step
    if best is not None:
        before, after = format_seconds(dense.total), format_seconds(best.step.total)
        certainty = (
            "Half of that gain would still be worth it."
            if best.speedup >= 2 * WORTH_IT
            else "That is a close call: time both."
            if best.speedup < 1.2 * WORTH_IT
            else "No close call, but time both."
        )
        return (
            f"a step takes {after} instead of {before}, {best.speedup:.2f} times as fast. Accuracy "
            f"was {best.accuracy:.1f} % instead of {UNCOMPRESSED} % on {MEASURED_ON}; harder tasks "
            f"lose more. {certainty}"
        )
    if not compressible_places(grid):
        return "one rank computes all layers, so that no activation crosses a link."
    loses = f"at most {100 * grid.loss_budget:g} %" if grid.loss_budget else "nothing"
    because = (
        f"a step waits {100 * dense.exchange / dense.total:.0f} % of its time for them, and no "
        f"compressor that loses {loses} of the accuracy makes it 5 % faster."
    )
    other = max(rows, key=lambda row: row.speedup)
    if other.speedup >= WORTH_IT:
        return (
            f"{because} {other.compressor} would make it {other.speedup:.2f} times as fast, but "
            f"had {other.accuracy:.1f} % instead of {UNCOMPRESSED} % on {MEASURED_ON}."
        )
    rate = layers_pay_below(grid, codecs)
    where = "between stages" if grid.pipeline > 1 else "inside"
    return because + (f" Below about {format_rate(rate)} a rank {where} one would." if rate else "")


def format_grid(grid: Grid) -> str:
    """Format the inputs of the predictions: given, measured or assumed."""
    work, speed, sources = grid.work, grid.speed, grid.sources
    lines = [
        f"{work.layers} layers of width {work.hidden}, {work.micro_batches} micro-batches a step "
        f"({sources['micro-batches']}) of {work.micro_batch} x {work.sequence} tokens, "
        f"{work.activation_bytes} bytes a number;"
    ]
    for what, link, name in (
        ("tensor parallelism of", grid.inside, "inside"),
        ("stages:", grid.between, "link"),
    ):
        if link.ranks > 1:
            lines.append(
                f"{what} {link.ranks}, over {format_rate(8 * link.link_bytes_per_s)} a rank "
                f"({sources[name]}) and {format_seconds(link.latency_s)} a message "
                f"({sources[f'{name} latency']});"
            )
    lines += [
        f"a rank computes {format_seconds(grid.compute_s)} a step ({sources['computation']});",
        f"compressors at {speed.memory_bytes_per_s / 1e12:.4g} TB/s, "
        f"{speed.flops_per_s / 1e12:.4g} and {speed.half_flops_per_s / 1e12:.4g} TFLOP/s in "
        f"float32 and 16 bits ({sources['own work']});",
        "compressed: the last half of the layers, and the boundaries that lead into them.",
    ]
    return "\n".join(lines)


def format_layer_table(rows: list[LayerRow], chosen: str) -> str:
    """A line per compressor, the fastest step first."""
    head = "  compressor|where|MB inside|MB between|compute ms|own ms|exposed ms|step ms|speed-up"
    table: list[tuple[str, ...]] = [(*head.split("|"), "accuracy")]
    for row in sorted(rows, key=lambda row: row.step.total):
        step = row.step
        cells = (
            f"{'>' if row.compressor == chosen else ' '} {row.compressor}",
            row.where,
            *(f"{size / 1e6:.1f}" for size in (row.inside, row.between)),
            *(f"{1e3 * s:.1f}" for s in (step.compute, step.local, step.exchange, step.total)),
            f"{row.speedup:.2f}x",
            f"{row.accuracy:.1f}",
        )
        table.append(cells)
    note = textwrap.fill(f"> advised. Accuracy: percent, on {MEASURED_ON}.", 100)
    return "\n".join([*align_columns(table, left=2), note])


def make_lines(grid: Grid, name: str, where: Where) -> str:
    """The lines of Python to paste."""
    if name == NONE:
        return "# Nothing to change: layers and stages as they are."
    kind, work = COMPRESSORS[name], grid.work
    codec = kind.text(work.micro_batch * work.sequence, work.hidden)
    made = kind.make(1, work.hidden)
    # The two ranks' own process group.
    pair = ", pair=pair" if made.straight_through and not made.fits_payload() else ""
    style = f"CompressedRowwiseParallel(lambda: {codec})"
    lines = []
    if where in ("layers", "both"):
        lines.append(f'plan |= {{"out": {style}, "down": {style}}}')
    if where in ("boundaries", "both"):
        lines.append(f"first = SendCompressed(first, {codec}{pair})")
        lines.append(f"second = ReceiveCompressed(second, {codec}, shape={work.shape}{pair})")
    return "\n".join(lines)
