"""Draw the picture of README.md from kept runs: loss over seconds at 100 Mbit/s, and over the bytes of a whole run.

    .venv/bin/python bench/readme.py

Trains nothing and times nothing. The runs are those of the ladder (bench/ladder.py), at the largest size at which all
of LADDER have run on four ranks and are timed (`bench/time_to_loss.py ladder`): both panels then are of one setting.

Until there is such a size losses and bytes come from results/quality.jsonl, step times from results/time_to_loss.jsonl
(see bench/quality.py, bench/frontier.py and bench/time_to_loss.py). The right panel then divides each loss by that of
DDP + AdamW after the same steps on as many ranks, because its points come from two settings. The left panel composes
seconds from measured step times.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import _ladder_clock
import _ladder_runs
import _ladder_tables
import frontier
import matplotlib.pyplot as plt
import quality
from _clock import RATE, put_on
from _ladder_model import SIZES

PICTURE = quality.RESULTS / "readme.png"
DENSE, POWERSGD = "DDP + AdamW", "PowerSGD rank 4, torch's hook"
SEPARATE, RADIUS, LOCAL = "SeparateAdam", "RadiusAdamW, density 0.4", "LocalSteps"
COLORS = {DENSE: "0.25", POWERSGD: "tab:orange", RADIUS: "tab:brown", SEPARATE: "tab:blue", LOCAL: "tab:green"}
OTHERS = "0.55"  # the color of rivals that bench/ implements


class Point(NamedTuple):
    """A kept run and where its label goes, in points from the marker."""

    run: str
    method: str
    label: str
    offset: tuple[float, float]


CURVES = {
    "AdamW (DDP)": DENSE,
    "RadiusAdamW 0.4": RADIUS,
    "PowerSGD rank 4": POWERSGD,
    "SeparateAdam tracked 16, int8": SEPARATE,
}
TWO_RANKS = [
    Point("SeparateAdam tracked 16, int8", SEPARATE, "SeparateAdam, rank 16", (7, 2)),
    Point("PowerSGD rank 4", POWERSGD, "PowerSGD rank 4", (-90, -4)),
    Point("RadiusAdamW 0.4", RADIUS, "RadiusAdamW 0.4", (-45, 9)),
]
FOUR_RANKS = [
    Point("LocalSteps 30, int4, growing 780", LOCAL, "LocalSteps, every=30, int4", (-60, -15)),
    Point("LocalSteps 140, int2, growing 2000, outer lr 1", LOCAL, "LocalSteps, every=140, int2", (-8, 9)),
    Point("PowerSGD rank 4", POWERSGD, "PowerSGD rank 4", (-90, -4)),
    Point("DeMo 8", OTHERS, "DeMo", (7, -3)),
]


LADDER = {  # row: offset of its label in the right panel
    "DDP + AdamW": (-75, -14),
    "DDP + Muon": (-62, 6),
    "PowerSGD 4": (7, 2),
    "SeparateAdam": (7, 4),
    "LocalSteps(Muon) 30": (7, -12),
}
BESIDE = {"LocalSteps(Muon) 140": (-8, 13)}  # in the right panel, once it has run


def load_ladder() -> list[dict[str, Any]]:
    """The rows of the ladder at the largest size at which all of LADDER are timed; none if there is no such size."""
    runs, timings = _ladder_runs.kept(), _ladder_clock.kept()
    for size, products in product(reversed(SIZES), ("bfloat16", "float32")):
        others = {"ranks": 4, "tokens": 20, "products": products}
        seconds = _ladder_clock.tabulate(runs, timings, size, **others)
        lines = {line["row"]: line for line in seconds if line["rate"] == RATE}
        if LADDER.keys() <= lines.keys():
            table = [line for line in _ladder_tables.tabulate(runs, **others) if line["size"] == size]
            return [line | {"evals": lines[line["row"]]["evals"]} for line in table if line["row"] in lines]
    return []


def draw_ladder(left: Any, right: Any, lines: list[dict[str, Any]]) -> None:
    """Draw loss over seconds, and the last loss, the mean over seeds, over the bytes of the run."""
    first = lines[0]
    for line in lines:
        row, color = line["row"], _ladder_clock.color_of(line["row"])
        if row in LADDER:
            points = [[point[key] for point in line["evals"]] for key in ("seconds", "val_loss")]
            left.plot(*points, color=color, label=row, linewidth=2)
            left.plot(points[0][-1], points[1][-1], "o", color=color)
        if offset := (LADDER | BESIDE).get(row):
            at = (line["bytes_percent"], line["to_adamw"])
            right.plot(*at, "o", color=color)
            right.annotate(row, at, offset, textcoords="offset points", fontsize=9, color=color)
    about = "{ranks} ranks, {:.2g} M parameters, {tokens_per_parameter:g} tokens per parameter"
    left.set(title=about.format(first["parameters"] / 1e6, **first), xlim=(0, None))
    left.set(ylim=(None, first["evals"][1]["val_loss"]))  # all fall alike before
    right.axhline(1, color="0.25", linestyle=":", linewidth=1)
    right.margins(x=0.2, y=0.15)


def draw_curves(axes: Any, rows: dict[str, dict]) -> None:
    """Draw loss over seconds of the runs on two ranks."""
    for run, method in CURVES.items():
        evals = rows[run]["evals"]
        line = [[point[key] for point in evals] for key in ("seconds", "val_loss")]
        axes.plot(*line, color=COLORS[method], label=method, linewidth=2)
        axes.plot(line[0][-1], line[1][-1], "o", color=COLORS[method])
    parameters, steps = rows["AdamW (DDP)"]["parameters"] / 1e6, rows["AdamW (DDP)"]["steps"]
    axes.set(
        title=f"{steps} steps on 2 ranks, {parameters:.2f} M parameters",
        xlim=(0, None),
        ylim=(1.68, 2.5),
    )


def draw_points(axes: Any, rows: dict[str, dict], points: list[Point], marker: str, label: str) -> None:
    """Draw the last loss over the bytes of the whole run; both as ratios to DDP + AdamW."""
    axes.plot([], [], marker, color="0.5", label=label)
    for point in points:
        row, color = rows[point.run], COLORS.get(point.method, OTHERS)
        at = (100 * row["share_of_run"], row["to_adamw"])
        axes.plot(*at, marker, color=color)
        place = {"xytext": point.offset, "textcoords": "offset points", "fontsize": 9, "color": color}
        axes.annotate(point.label, at, **place)


def load_two_ranks() -> dict[str, dict]:
    """The runs of 800 steps at their best learning rates, with seconds."""
    rows = quality.best_of("time_to_loss")
    put_on(rows, RATE)
    for row in rows:
        row |= {"share_of_run": row["bytes_in_all"] / (4 * row["parameters"] * row["steps"])}
        row |= {"to_adamw": row["to_first"]}
    return {row["run"]: row for row in rows}


def load_four_ranks() -> dict[str, dict]:
    """The runs of 2,000 steps, means over their seeds."""
    return {row["run"]: row | {"share_of_run": row["share"]} for row in frontier.rows(4, 2000, 128)}


def draw_two_settings(left: Any, right: Any) -> None:
    """Draw runs of 800 steps on two ranks, and of 2,000 steps on four beside them."""
    two, four = load_two_ranks(), load_four_ranks()
    draw_curves(left, two)
    right.axhline(1, color=COLORS[DENSE], linestyle=":", linewidth=1)
    right.annotate(DENSE, (1, 1), (-4, -12), ("axes fraction", "data"), "offset points", ha="right", fontsize=9)
    draw_points(right, two, TWO_RANKS, "o", "800 steps, 2 ranks")
    draw_points(right, four, FOUR_RANKS, "s", "2,000 steps, 4 ranks")
    right.set(xlim=(0.2, 130), ylim=(0.98, 1.15))
    right.legend(frameon=False, fontsize=9, loc="upper right")


def draw(path: Path = PICTURE) -> None:
    plt.switch_backend("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    right.set(
        title="The end of each run",
        xscale="log",
        xlabel="bytes of the whole run, % of DDP's in float32",
        ylabel="final loss / DDP + AdamW's",
    )
    if lines := load_ladder():
        draw_ladder(left, right, lines)
    else:
        draw_two_settings(left, right)
    left.set(xlabel="seconds over a link of 100 Mbit/s", ylabel="validation loss")
    left.legend(frameon=False, fontsize=9)
    right.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    right.minorticks_off()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw()
