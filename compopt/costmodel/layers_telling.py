"""Advice on activations in words: the situation, the table, the lines to paste."""

from __future__ import annotations

import textwrap

from .compressors import COMPRESSORS, MEASURED_ON, UNCOMPRESSED
from .grid import Grid
from .layers import NONE, LayerRow, Where
from .telling import aligned, rate_in_words, seconds_in_words

HEAD = (
    "compressor",
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


def told(grid: Grid) -> str:
    """The situation in words, with what was given, measured or assumed."""
    work, s = grid.work, grid.sources
    links = [
        f"{what} {count}, over {rate_in_words(8 * link.link_bytes_per_s)} a rank ({s[name]}) and "
        f"{1e6 * link.latency_s:.3g} us a message ({s[f'{name} latency']})"
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
            f"step ({s['micro-batches']}) of {work.micro_batch} x {work.sequence} tokens, "
            f"{work.activation_bytes} bytes a number;",
            *(f"{link};" for link in links),
            f"a rank computes {seconds_in_words(grid.compute_s)} a step ({s['computation']});",
            f"compressors at {speed.memory_bytes_per_s / 1e12:.4g} TB/s, "
            f"{speed.flops_per_s / 1e12:.4g} and {speed.half_flops_per_s / 1e12:.4g} TFLOP/s in "
            f"float32 and 16 bits ({s['own work']});",
            "compressed: the last half of the layers, and the boundaries that lead into them.",
        ]
    )


def table(rows: list[LayerRow]) -> str:
    """One line a compressor."""
    text = aligned([HEAD, *(_cells(row) for row in rows)], left=2)
    return "\n".join([*text, textwrap.fill(f"Accuracy: percent, on {MEASURED_ON}.", 110)])


def _cells(row: LayerRow) -> tuple[str, ...]:
    step = row.step
    accuracy = UNCOMPRESSED if row.compressor == NONE else row.accuracy
    return (
        row.compressor,
        row.where,
        *(f"{size / 1e6:.1f}" for size in (row.inside, row.between)),
        *(
            f"{1e3 * seconds:.1f}"
            for seconds in (step.compute, step.local, step.exchange, step.total)
        ),
        f"{row.speedup:.2f}x",
        "?" if accuracy is None else f"{accuracy:.1f}",
    )


def lines_of(grid: Grid, name: str, where: Where) -> str:
    """What to write in Python."""
    if name == NONE:
        return "# Nothing to change: layers and stages as they are."
    kind, work = COMPRESSORS[name], grid.work
    codec = kind.text(work.micro_batch * work.sequence, work.hidden)
    one = kind.make(1, work.hidden)
    # What dist.new_group makes of the two ranks.
    pair = ", pair=pair" if one.straight_through and not one.fits_payload() else ""
    style = f"CompressedRowwiseParallel(lambda: {codec})"
    lines = []
    if where in ("layers", "both"):
        lines.append(f'plan |= {{"out": {style}, "down": {style}}}')
    if where in ("boundaries", "both"):
        lines.append(f"first = SendCompressed(first, {codec}{pair})")
        lines.append(f"second = ReceiveCompressed(second, {codec}, shape={work.shape}{pair})")
    return "\n".join(lines)
