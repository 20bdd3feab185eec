"""`advise_layers`: whether to compress activations, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import activation_report as report
from .activation_decision import choose_layer_row
from .formatting import format_advice
from .hardware import LAYER_SHARE, Machine, Speed, find_device, source_of
from .layer_prediction import NONE, Grid, LayerRow, Layers, count_codecs, predict_layer_rows
from .model_parallel import LayerCosts


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
        """The recommendation and its reasons, in one paragraph."""
        row = next(row for row in self.rows if row.compressor == self.compressor)
        if self.compressor == NONE:
            return f"Send activations as they are: {self.why}"
        of = {"both": "boundaries and layers"}.get(row.where, row.where)
        return f"Use {self.compressor}, of {of}: {self.why}"

    def __str__(self) -> str:
        return format_advice(
            self.recommendation,
            self.line,
            report.format_layer_table(self.rows, self.compressor),
            report.format_grid(self.grid),
        )


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
        link_bits_per_s: rate at which one rank sends to the next stage; needed where there
            is one.
        inside_bits_per_s: rate at which one rank sends to those that share its layers; needed
            where there are any.
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
    hardware, device_name = find_device(device)
    if not 0 <= loss_budget < math.inf:
        raise ValueError(f"loss_budget must be a share such as 0.01; got {loss_budget}.")
    _check_link("pipeline", pipeline, "link_bits_per_s", link_bits_per_s)
    _check_link("tensor", tensor, "inside_bits_per_s", inside_bits_per_s)
    computed = "measured" if costs else f"assumed: {device_name}"
    default_sources = {
        "computation": source_of(step_s, computed),
        "link": "given",
        "inside": "given",
        "link latency": source_of(latency_s),
        "inside latency": source_of(inside_latency_s),
        "micro-batches": "given",
        "own work": "measured" if local else f"assumed: {device_name}",
    }
    if step_s is None:
        # alpha is of the ranks of a layer together.
        alpha = costs.alpha if costs else 1 / (LAYER_SHARE * hardware.half_flops_per_s * tensor)
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
        Speed(*local) if local else hardware.speed,
        loss_budget,
        {**default_sources, **(sources or {})},
    )
    codecs = count_codecs(work, tensor)
    rows = predict_layer_rows(grid, codecs)
    best = choose_layer_row(grid, rows)
    row, why = best or rows[0], report.explain_layer_choice(grid, rows, codecs, best)
    line = report.make_lines(grid, row.compressor, row.where)
    return LayersAdvice(grid, rows, row.compressor, line, why)


def _check_link(dimension: str, ranks: int, name: str, rate: float | None) -> None:
    """Raise ValueError without ranks, or where their link has no rate."""
    if ranks < 1:
        raise ValueError(f"{dimension} must be at least 1; got {ranks}.")
    if ranks > 1 and rate is None:
        raise ValueError(f"{name} is missing: activations cross that link.")
