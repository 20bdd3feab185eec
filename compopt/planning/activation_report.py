"""The advice on activations as text: reasons, the lines to paste, the table, the inputs."""

from __future__ import annotations

import textwrap

from .activation_costs import COMPRESSORS, MEASURED_ON, UNCOMPRESSED
from .activation_decision import layers_pay_below
from .decision import WORTH_IT
from .formatting import align_columns, format_rate, format_seconds
from .layer_prediction import NONE, CodecCosts, Grid, LayerRow, Where, compressible_places


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
    waiting = 100 * dense.exchange / dense.total
    loses = f"at most {100 * grid.loss_budget:g} %" if grid.loss_budget else "nothing"
    because = (
        f"a step waits {waiting:.0f} % of its time for them, and no compressor that loses {loses} "
        "of the accuracy makes it 5 % faster."
    )
    faster = [row for row in rows if row.speedup >= WORTH_IT]
    if faster:
        other = max(faster, key=lambda row: row.speedup)
        return (
            f"{because} {other.compressor} would make it {other.speedup:.2f} times as fast, but "
            f"had {other.accuracy:.1f} % instead of {UNCOMPRESSED} % on {MEASURED_ON}."
        )
    rate = layers_pay_below(grid, codecs)
    where = "between stages" if grid.pipeline > 1 else "inside"
    return because + (f" Below about {format_rate(rate)} a rank {where} one would." if rate else "")


HEAD = (
    "  compressor",
    "where",
    "MB inside",
    "MB between",
    "compute ms",
    "own ms",
    "exposed ms",
    "step ms",
    "speed-up",
    "accuracy",
)


def format_grid(grid: Grid) -> str:
    """Format the inputs of the predictions: given, measured or assumed."""
    work, sources = grid.work, grid.sources
    links = [
        f"{what} {count}, over {format_rate(8 * link.link_bytes_per_s)} a rank ({sources[name]}) "
        f"and {format_seconds(link.latency_s)} a message ({sources[f'{name} latency']})"
        for what, count, link, name in (
            ("tensor parallelism of", grid.tensor, grid.inside, "inside"),
            ("stages:", grid.pipeline, grid.between, "link"),
        )
        if count > 1
    ]
    speed = grid.speed
    return "\n".join(
        [
            f"{work.layers} layers of width {work.hidden}, {work.micro_batches} micro-batches a "
            f"step ({sources['micro-batches']}) of {work.micro_batch} x {work.sequence} tokens, "
            f"{work.activation_bytes} bytes a number;",
            *(f"{link};" for link in links),
            f"a rank computes {format_seconds(grid.compute_s)} a step ({sources['computation']});",
            f"compressors at {speed.memory_bytes_per_s / 1e12:.4g} TB/s, "
            f"{speed.flops_per_s / 1e12:.4g} and {speed.half_flops_per_s / 1e12:.4g} TFLOP/s in "
            f"float32 and 16 bits ({sources['own work']});",
            "compressed: the last half of the layers, and the boundaries that lead into them.",
        ]
    )


def format_layer_table(rows: list[LayerRow], chosen: str) -> str:
    """A line a compressor, the fastest step first."""
    table: list[tuple[str, ...]] = [HEAD]
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
