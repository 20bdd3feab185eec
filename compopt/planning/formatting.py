"""Numbers and tables as text, and quantities read from it.

Used by all reports of this folder, as ``advice_report``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def parse_quantity(text: str, suffix: str = "") -> float:
    """Read '350M', '1.8b' or '12000' as a number; with suffix 'bit', a rate as tc writes it
    ('100mbit', '2.5gbit').
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:e\d{{1,2}})?)([kmgbt]?){suffix}", text.strip().lower())
    if match is None or float(match[1]) == 0:
        example = "100mbit or 2.5gbit" if suffix else "350M, 1.8B or 12000"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: write it like {example}.")
    return float(match[1]) * UNITS[match[2]]


def parse_rate(text: str) -> float:
    """Bits a second, as tc writes them."""
    return parse_quantity(text, "bit")


def format_digits(number: float) -> str:
    """Three digits, or a whole number of more."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def format_seconds(seconds: float) -> str:
    """Format as microseconds to days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (2 if unit != "s" else 1) * size:
            return f"{format_digits(seconds / size)} {unit}"
    if seconds >= 1e-3:
        return f"{format_digits(1e3 * seconds)} ms"
    return f"{format_digits(1e6 * seconds)} us"


def format_quantity(number: float) -> str:
    """Format with an SI prefix, for a unit to follow."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g} "


def format_count(number: float) -> str:
    """Thousands, millions or billions, as sizes of models are given."""
    for unit, size in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{format_digits(number / size)}{unit}"
    return f"{number:.0f}"


def format_number_of(number: int, noun: str) -> str:
    """'1 rank', '2,000 ranks'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_rate(bits: float) -> str:
    """Bits a second in tc's units."""
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if bits >= size:
            return f"{format_digits(bits / size)} {unit}bit/s"
    return f"{format_digits(bits / 1e6)} Mbit/s"


def format_percent(share: float) -> str:
    """Two digits, or whole percents from 10 on."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def align_columns(lines: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """Columns as wide as their cells, the first ``left`` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def format_advice(recommendation: str, line: str, table: str, inputs: str) -> str:
    """The recommendation and the line to paste, then what they follow from."""
    paragraph = textwrap.fill(recommendation, 100, break_on_hyphens=False)
    return "\n\n".join([paragraph, textwrap.indent(line, "    "), table, inputs])


def print_report(text: str) -> None:
    """Print a report. End silently if the reader has closed the pipe, as ``| head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left is flushed once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
