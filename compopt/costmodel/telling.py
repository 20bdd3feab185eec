"""Advice in words: the situation, the table, and numbers as people write them."""

from __future__ import annotations

from .methods import LOCAL_ON, MEASURED_ON
from .predicting import Row, Situation


def told(situation: Situation) -> str:
    """The situation in words, with what was given, measured or assumed."""
    s, m = situation.sources, situation.machine
    cut = f", each copy cut over {situation.shard} ranks" if situation.shard > 1 else ""
    return "\n".join(
        [
            f"{_si(situation.work.parameters)} parameters a rank on {m.ranks} replicas{cut},",
            f"{rate_in_words(8 * m.link_bytes_per_s)} a rank ({s['link']});",
            f"{seconds_in_words(situation.compute_s)} of computation a step ({s['computation']}), "
            f"{seconds_in_words(situation.overlap_s)} of it hiding communication ({s['overlap']});",
            f"own work at {_si(m.memory_bytes_per_s)}B/s and {_si(m.flops_per_s)}FLOP/s "
            f"({s['own work']}).",
        ]
    )


HEAD = (
    "method",
    "MB sent",
    "compute ms",
    "own ms",
    "exposed ms",
    "step ms",
    "run",
    "run bytes",
    "state MB",
    "loss",
)


def table(rows: list[Row]) -> str:
    """One line a method, in columns as wide as what stands in them."""
    losses = f"* not ours.  Losses: over AdamW's, on {MEASURED_ON};"
    text = aligned([HEAD, *(_cells(row) for row in rows)])
    return "\n".join([*text, losses, f"of LocalSteps on {LOCAL_ON}."])


def aligned(lines: list[tuple[str, ...]], left: int = 1) -> list[str]:
    """Columns as wide as what stands in them, the first ``left`` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _cells(row: Row) -> tuple[str, ...]:
    step = row.step
    name = row.method if row.ours else f"{row.method} *"
    return (
        name,
        f"{row.sent / 1e6:.2f}",
        *(
            f"{1e3 * seconds:.1f}"
            for seconds in (step.compute, step.local, step.exchange, step.total)
        ),
        f"{row.run:.2f}x",
        f"{100 * row.run_bytes:.1f} %",
        f"{row.state / 1e6:.1f}" + ("" if row.fits else " (does not fit)"),
        "?" if row.loss is None else f"{row.loss:.3f}",
    )


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _si(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g} "


def rate_in_words(bits: float) -> str:
    """A rate as tc's names have it, with a space."""
    if bits >= 1e12:
        return f"{bits / 1e12:.3g} Tbit/s"
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
