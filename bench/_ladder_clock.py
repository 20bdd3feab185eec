"""Seconds of the ladder's runs over links, composed: measured step times x the steps of each kind, in their order.

_ladder_links.py measures the step times. Losses are those of the runs in results/ladder.jsonl.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from _clock import reached
from _ladder_rows import BASELINES, DENSE, MAIN, ROWS, Local
from _ladder_search import Lines, best_of
from _net import bits_per_second

from compopt._local.rounds import round_length

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "time_to_loss-ladder.jsonl"
NOT_TIMED = ("DeMo 8", "SparseLoCo 15")  # _rivals.py exchanges tensor by tensor, which a real implementation would not
TIMED = [row for row in MAIN if row not in NOT_TIMED]


class Timing(NamedTuple):
    """The key of a measurement."""

    row: str
    size: str
    ranks: int
    rate: str
    products: str


Timings = Mapping[Timing, dict[str, Any]]


def kept() -> dict[Timing, dict[str, Any]]:
    """All measurements there are; of two of the same name, the later."""
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {Timing(*(line[name] for name in Timing._fields)): line for line in lines}


def base_of(row: str) -> str:
    """The baseline whose optimizer the row has, or has inside."""
    return BASELINES["Muon" in row]


def list_kinds(row: str, steps: int) -> list[str]:
    """The kind of each step: "dense", "compressed", "local", or "exchanged": local, and an exchange after it."""
    if row in BASELINES:
        return ["dense"] * steps
    make, kinds = ROWS[row].make, []
    if not isinstance(make, Local):
        return (["dense"] * DENSE + ["compressed"] * steps)[:steps]
    while len(kinds) < steps:
        length = round_length({"every": make.every, "every_warmup_steps": make.growth_of(steps)}, len(kinds))
        kinds += ["local"] * (min(length, steps - len(kinds)) - 1) + ["exchanged"]  # the last round ends with the run
    return kinds


def compose(line: dict[str, Any], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """The evaluations of a run, each with the seconds that the steps up to it take."""
    clock = [*accumulate(seconds[kind] for kind in list_kinds(line["row"], line["steps"]))]
    return [{**point, "seconds": clock[point["step"] - 1]} for point in line["evals"]]


def tabulate(runs: Lines, timings: Timings, size: str, **others: Any) -> list[dict[str, Any]]:
    """The lines of all rates, the slowest first."""
    rates = {timing.rate for timing in timings if timing.size == size}
    speed = {rate: bits_per_second(rate) if rate.endswith("bit") else math.inf for rate in rates}
    return [line for rate in sorted(rates, key=speed.__getitem__) for line in _at(rate, runs, timings, size, others)]


def _at(rate: str, runs: Lines, timings: Timings, size: str, others: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each row that has run and was timed, the best of its runs on seed 0; none without DDP + AdamW."""
    table: list[dict[str, Any]] = []
    for row in TIMED:
        run = best_of(runs, ROWS[row].start(size, **others))
        timing = None if run is None else timings.get(Timing(row, size, run.ranks, rate, run.products))
        if run is not None and timing is not None and runs[run]["val_loss"] is not None:
            table.append(_line(runs[run], timing))
    if not table or table[0]["row"] != BASELINES[0]:
        return []
    level, last = table[0]["loss"], table[0]["run_seconds"]
    for line in table:
        line["seconds_to_adamw"] = reached(level, line["evals"], "seconds")
        line["to_adamw"] = None if line["seconds_to_adamw"] is None else line["seconds_to_adamw"] / last
    return table


def _line(line: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    evals = compose(line, timing["seconds"])
    step = evals[-1]["seconds"] / line["steps"]
    return {
        "size": line["size"],
        "rate": timing["rate"],
        "row": line["row"],
        "parameters": line["parameters"],
        "tokens_per_parameter": line["tokens"],
        "ranks": line["ranks"],
        "steps": line["steps"],
        **{name: line[name] for name in ("lr", "outer_lr", "momentum")},
        "bytes_percent": 100 * line["share"],
        "loss": line["val_loss"],
        "step_ms": 1e3 * step,
        "compute_ms": 1e3 * timing["compute"],
        "compute_percent": 100 * timing["compute"] / step,
        "network_percent": 100 * (1 - timing["compute"] / step),
        "run_seconds": evals[-1]["seconds"],
        "evals": evals,
    }


COLUMNS = {  # key: heading, format, digits kept in the CSV
    "bytes_percent": ("bytes", "8.2f", 3),
    "loss": ("loss", "8.3f", None),
    "step_ms": ("step ms", "9.1f", 2),
    "compute_percent": ("compute %", "11.0f", 1),
    "network_percent": ("network %", "11.0f", 1),
    "run_seconds": ("s in all", "10.1f", 1),
    "seconds_to_adamw": ("s to loss", "11.1f", 1),
    "to_adamw": ("x DDP + AdamW", "15.3f", 4),
}


def show(table: list[dict[str, Any]]) -> None:
    """Print a table per rate. s to loss: until the row is at DDP + AdamW's last loss."""
    for rate in dict.fromkeys(line["rate"] for line in table):
        _show_rate([line for line in table if line["rate"] == rate])


def _show_rate(table: list[dict[str, Any]]) -> None:
    first, level = table[0], table[0]["loss"]
    about = "{size}: {parameters:,} parameters, {tokens_per_parameter:g} tokens per parameter, {ranks} ranks, {rate}"
    widths = [len(format(0, form)) for _, form, _ in COLUMNS.values()]
    heads = "".join(head.rjust(width) for (head, *_), width in zip(COLUMNS.values(), widths, strict=True))
    print(f"\n{about.format(**first)}\n{'':<24}{heads}")
    for line in table:
        cells = [
            "never".rjust(width) if line[key] is None else format(line[key], form)
            for (key, (_, form, _)), width in zip(COLUMNS.items(), widths, strict=True)
        ]
        print(f"{line['row']:<24}{''.join(cells)}")
    for line in table:
        if line["seconds_to_adamw"] is None:
            lowest = min(point["val_loss"] for point in line["evals"])
            print(f"{line['row']} never reaches {level:.3f}: its lowest loss is {lowest:.3f}.")
    if missing := [row for row in TIMED if row not in {line["row"] for line in table}]:
        print(f"No finished run, or not timed: {', '.join(missing)}.")


def save(table: list[dict[str, Any]], path: Path) -> None:
    """Write the lines of all rates as CSV; where a loss is never reached its seconds are empty."""
    digits = {key: places for key, (_, _, places) in COLUMNS.items()} | {"compute_ms": 2}
    with path.open("w", newline="") as file:
        names = [name for name in table[0] if name != "evals"]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        for line in table:
            writer.writerow({k: round(v, digits[k]) if v and digits.get(k) else v for k, v in line.items()})


COLORS = {  # how names begin
    "DDP + AdamW": "0.25",
    "DDP + Muon": "tab:purple",
    "LocalSteps(Muon)": "tab:green",
    "LocalSteps(AdamW)": "tab:olive",
    "Separate(Muon)": "tab:cyan",
    "SeparateAdam": "tab:blue",
    "PowerSGD": "tab:orange",
}


def color_of(row: str) -> str:
    return next(color for begins, color in COLORS.items() if row.startswith(begins))


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Loss over seconds, a panel a rate; the line is DDP + AdamW's last loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = list(dict.fromkeys(line["rate"] for line in table))
    figure, panels = plt.subplots(
        1, len(rates), figsize=(4.6 * len(rates) + 2, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, rate in zip(panels[0], rates, strict=True):
        for line in (line for line in table if line["rate"] == rate):
            points = [[point[key] for point in line["evals"]] for key in ("seconds", "val_loss")]
            style = "--" if line["row"].endswith("140") else "-"
            label = line["row"] if axis is panels[0][0] else None
            axis.plot(*points, style, color=color_of(line["row"]), label=label, linewidth=1.5)
            axis.plot(points[0][-1], points[1][-1], "o", color=color_of(line["row"]), markersize=4)
        level = next(line["loss"] for line in table if (line["rate"], line["row"]) == (rate, BASELINES[0]))
        axis.axhline(level, color=COLORS[BASELINES[0]], linestyle=":", linewidth=1)
        axis.set(title=rate, xlabel="seconds, composed of measured step times", xscale="log")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("validation loss (nats a byte)")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
