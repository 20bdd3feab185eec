"""Show the older runs, which bench/quality.py trains, and experiments that were made once: tables, CSV and pictures.

    python bench/tables.py                                # all; trains and times nothing
    python bench/tables.py --steps 800 8000 --ranks 2     # of the runs, those
    python bench/tables.py --once                         # the experiments whose scripts are gone: their kept CSV files

Runs that are alike but for method, rate and seed are a table. A method is shown at the best rate of seed 0, its loss
the mean of the seeds that ran at that rate; ``x AdamW`` is over AdamW's best, means over means, then by seed; ``same
lr`` is over AdamW's at the same rate, on seed 0. Seconds are composed of step times at 100 Mbit/s that were measured
once (results/time_to_loss.jsonl). Saves results/quality.csv, time_to_loss-100mbit.csv and .png, quality_per_byte.png,
frontier.png, length.png and width.png.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import groupby
from statistics import mean
from typing import Any

import quality
from _clock import RATE, put_on, reached, timings
from _table import RESULTS, Row, color, drawing, print_rows, read_rows, write_rows
from quality import Run

ADAMW = "AdamW (DDP)"
TOKENS = 512  # of a rank and step
KIND = ("width", "bf16", "ranks", "steps")  # of runs: what a table has in common
LEVELS = (1.05, 1.1, 1.2)  # times AdamW's last loss
Runs = dict[Run, dict]


def kind_of(run: Run) -> tuple:
    return tuple(getattr(run, name) for name in KIND)


def last_loss(line: dict) -> float:
    return line["evals"][-1]["val_loss"]


def tabulate(runs: Runs) -> list[Row]:
    """A row for each kind of run and method, in the order of quality.METHODS."""
    order = [*quality.METHODS, *quality.REMOVED]
    kinds: dict[tuple, dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda run: (*kind_of(run), order.index(run.name), run.seed, run.lr)):
        kinds[kind_of(run)][run.name][run] = runs[run]
    return [row for kind, methods in kinds.items() for row in rows_of_kind(kind, methods)]


def rows_of_kind(kind: tuple, methods: dict[str, Runs]) -> list[Row]:
    best_adamw, adamw_at = ({}, {}) if ADAMW not in methods else best_of(methods[ADAMW])
    rows = []
    for name, runs in methods.items():
        seeds, rates = best_of(runs)
        if not seeds:
            continue
        run, line = next(iter(seeds.items()))
        losses = {run.seed: last_loss(line) for run, line in seeds.items()}
        of_adamw = {run.seed: last_loss(line) for run, line in best_adamw.items()}
        ratios = [losses[seed] / of_adamw[seed] for seed in losses if seed in of_adamw]
        dense = 4 * line["parameters"]
        sent = line["bytes_per_step"]["compressed"] or (dense if set(line["phases"]) == {"dense"} else None)
        rows.append(
            {
                "run": name,
                **dict(zip(KIND, kind, strict=True)),
                "parameters": line["parameters"],
                "tokens_per_parameter": TOKENS * run.ranks * run.steps / line["parameters"],
                "lr": run.lr,
                "at_rates": " ".join(f"{lr:g}:{loss:g}" for lr, loss in rates.items()),
                "seeds": len(losses),
                "loss": mean(losses.values()),
                "low": min(losses.values()),
                "high": max(losses.values()),
                "to_adamw": mean(losses.values()) / mean(of_adamw.values()) if of_adamw else None,
                "to_adamw_same_lr": losses[0] / adamw_at[run.lr] if run.lr in adamw_at else None,
                "by_seed": " ".join(f"{ratio:.3f}" for ratio in ratios),
                "step_share": sent and sent / dense,
                "run_share": line["evals"][-1]["bytes"] / (dense * run.steps),
            }
        )
    return rows


def best_of(runs: Runs) -> tuple[Runs, dict[float, float]]:
    """The runs of all seeds at the best rate of seed 0, and the losses of seed 0 by rate."""
    rates = {run.lr: last_loss(line) for run, line in runs.items() if run.seed == 0}
    best = min(rates, key=rates.__getitem__, default=None)
    return {run: line for run, line in runs.items() if run.lr == best}, rates


COLUMNS = {
    "lr": ("lr", "9g"),
    "loss": ("loss", "8.3f"),
    "low": ("low", "8.3f"),
    "high": ("high", "8.3f"),
    "to_adamw": ("x AdamW", "8.3f"),
    "to_adamw_same_lr": ("same lr", "8.3f"),
    "step_share": ("step bytes", "9.2%"),
    "run_share": ("run bytes", "9.2%"),
    "by_seed": ("by seed", ">22"),
    "at_rates": ("loss at rates of seed 0", ">46"),
}
DIGITS = {"loss": 4, "to_adamw": 4, "to_adamw_same_lr": 4, "step_share": 4, "run_share": 5, "tokens_per_parameter": 2}


def show(rows: list[Row]) -> None:
    for kind, of_kind in groupby(rows, key=lambda row: [row[name] for name in KIND]):
        lines = list(of_kind)
        _, bf16, ranks, steps = kind
        products = "bfloat16" if bf16 else "float32"
        about = "{parameters:,} parameters (width {width}), {tokens_per_parameter:.2g} tokens per parameter"
        print(f"\n{steps} steps, {ranks} ranks, {about.format(**lines[0])}, products in {products}")
        print_rows(lines, COLUMNS, "run", 46)


# Seconds


def seconds_rows(runs: Runs) -> list[Row]:
    """Runs of 800 steps on two ranks that were timed, and AdamW's shorter ones: seconds in all and to each level."""
    lines, rate = [], next(run.lr for run in best_of(of_kind(runs, 800, ADAMW))[0])
    for name in quality.METHODS:
        seeds, _ = best_of(of_kind(runs, 800, name))
        lines += [(name, run, line) for run, line in seeds.items() if run.seed == 0]
    for steps in (200, 400):
        short = Run(ADAMW, rate, steps)
        lines += [(f"{ADAMW}, {steps} steps", short, runs[short])] if short in runs else []
    rows = [line | {"run": run.name, "lr": run.lr, "label": name} for name, run, line in lines]
    put_on(rows, RATE)
    timed = [row for row in rows if "dense_s" in row and "seconds" in row["evals"][-1]]
    first = last_loss(timed[0])
    return [
        {
            "run": row["label"],
            **{name: row[name] for name in ("lr", "steps")},
            "loss": last_loss(row),
            "to_first": last_loss(row) / first,
            "dense_s": number(row["dense_s"]),
            "compressed_s": number(row["compressed_s"]),
            "bytes_in_all": row["evals"][-1]["bytes"],
            "seconds": row["evals"][-1]["seconds"],
            **{f"seconds_to_{level}": reached(level * first, row["evals"], "seconds") for level in LEVELS},
            "evals": row["evals"],
        }
        for row in timed
    ]


def of_kind(runs: Runs, steps: int, name: str) -> Runs:
    return {run: line for run, line in runs.items() if run.name == name and kind_of(run) == (128, False, 2, steps)}


def number(x: float) -> float | None:
    return None if x != x else x


SECONDS = {
    "loss": ("loss", "8.3f"),
    "dense_s": ("dense s", "9.3f"),
    "compressed_s": ("compressed s", "9.3f"),
    "seconds": ("s in all", "9.1f"),
    **{f"seconds_to_{level}": (f"s to x{level}", "9.1f") for level in LEVELS},
}


def show_seconds(rows: list[Row]) -> None:
    alone = timings(RATE)["no communication"]["dense"]
    print(f"\nSeconds at {RATE}, 2 ranks, 800 steps; a step without communication takes {alone:.3f} s")
    print_rows(rows, SECONDS, "run", 40)
    digits = {"loss": 4, "to_first": 4, "dense_s": 4, "compressed_s": 4, "seconds": 1}
    digits |= {f"seconds_to_{level}": 1 for level in LEVELS}
    fields = [name for name in rows[0] if name != "evals"]
    write_rows(RESULTS / f"time_to_loss-{RATE}.csv", rows, fields, digits)


# Pictures


def draw_seconds(rows: list[Row]) -> None:
    labels = {"seconds": f"seconds at {RATE}, composed of measured step times", "bytes": "gigabytes of a rank"}
    with drawing(RESULTS / f"time_to_loss-{RATE}.png", 2, (12, 5), sharey=True) as (figure, panels):
        for axis, (key, label), unit in zip(panels, labels.items(), (1, 1e9), strict=True):
            for n, row in enumerate(rows):
                points = [(e[key] / unit, e["val_loss"]) for e in row["evals"]]
                name = f"{row['run']} (lr {row['lr']:g})" if axis is panels[0] else None
                axis.plot(*zip(*points, strict=True), color=color(n), label=name, linewidth=1.4)
            axis.set(xlabel=label, xscale="log" if key == "bytes" else "linear")
        panels[0].set_ylabel("validation loss (nats a byte)")
        panels[0].set_ylim(top=max(row["evals"][1]["val_loss"] for row in rows))  # all fall alike before
        figure.legend(loc="outside right upper", frameon=False, fontsize=7)


FAMILIES = {  # how names begin and end
    "PowerSGD, torch's hook": ("PowerSGD", ""),
    "naive top-k": ("naive", ""),
    "tracked, int8": ("SeparateAdam tracked", "int8"),
    "tracked, int4": ("SeparateAdam tracked", "int4"),
    "tracked around AdamS, int8": ("Separate tracked", ""),
    "SEPARATE, Gaussian": ("Separate", ""),
    "Radius": ("RadiusAdamW", ""),
    "SCAPE": ("ScapeAdamS", ""),
    "TAGC, parameters included": ("TagcAdamW", ""),
    "local steps": ("LocalSteps", ""),
    "DeMo": ("DeMo", ""),
    "SparseLoCo": ("SparseLoCo", ""),
}


def draw_bytes(rows: list[Row], key: str, name: str) -> None:
    """Loss over a share of the bytes: a point a method, a color a family; dense methods are lines."""
    first = rows[0]
    with drawing(RESULTS / f"{name}.png") as (_, (axis,)):
        others = [row for row in rows if row["run"] not in (ADAMW, "AdamS")]
        for n, (label, (begins, ends)) in enumerate(FAMILIES.items()):
            members = [row for row in others if row["run"].startswith(begins) and row["run"].endswith(ends)]
            others = [row for row in others if row not in members]
            for row in members:
                error = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
                label = axis.errorbar(100 * row[key], row["loss"], error, fmt="o", color=color(n), label=label) and None
        for row in rows:
            if row["run"] in (ADAMW, "AdamS"):
                axis.axhline(row["loss"], color="0.3", linestyle=":", linewidth=1)
                place = dict(xy=(0.01, row["loss"]), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
                axis.annotate(f"{row['run']}, dense", **place)
        of = "the whole run" if key == "run_share" else "a compressed step"
        axis.set(xscale="log", xlabel=f"bytes of {of}, % of DDP's in float32", ylabel="validation loss")
        axis.set_title(f"{first['steps']} steps, {first['ranks']} ranks, width {first['width']}")
        axis.legend(frameon=False, fontsize=8)


def first_seed(row: Row) -> float:
    """The ratio to AdamW of seed 0."""
    return float(row["by_seed"].split()[0])


def draw_length(runs: Runs, rows: list[Row]) -> None:
    """Left runs of 8,000 steps over AdamW at the same step, right the ends of runs over their lengths."""
    names, ticks = [row["run"] for row in rows if row["steps"] == 8000 and row["run"] != ADAMW], (800, 2000, 8000)
    with drawing(RESULTS / "length.png", 2, (13, 5.5), sharey=True) as (figure, (left, right)):
        dense = next(iter(best_of(of_kind(runs, 8000, ADAMW))[0].values()))["evals"]
        for n, name in enumerate(names):
            line = next(iter(best_of(of_kind(runs, 8000, name))[0].values()))["evals"]
            curve = [(e["step"], e["val_loss"] / d["val_loss"]) for e, d in zip(line, dense, strict=True)]
            left.plot(*zip(*curve, strict=True), color=color(n), linewidth=1.4)
            ends = [(row["steps"], first_seed(row)) for row in rows if row["run"] == name and row["steps"] in ticks]
            right.plot(*zip(*ends, strict=True), "o-", color=color(n), label=name, linewidth=1.4)
        for axis in (left, right):
            axis.axhline(1, color="0.3", linestyle=":", linewidth=1)
        left.set(xlabel="step of a run of 8000", ylabel="validation loss over AdamW's", title="at the same step")
        left.set_ylim(top=1.4)  # orthonormal projections begin at 1.7
        right.set(xlabel="steps of the whole run", xscale="log", title="at the end, each at its best rate")
        right.set_xticks(ticks, ticks)
        right.minorticks_off()
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)


def draw_width(rows: list[Row]) -> None:
    """A line a method, from width 128 to width 512."""
    names = list(dict.fromkeys(row["run"] for row in rows if row["run"] != ADAMW))
    with drawing(RESULTS / "width.png", size=(9, 0.36 * len(names) + 1.6)) as (_, (axis,)):
        for place, name in enumerate(reversed(names)):
            ends = {row["width"]: first_seed(row) for row in rows if row["run"] == name}
            axis.plot(list(ends.values()), [place] * len(ends), color="0.75", linewidth=2, zorder=1)
            for width, tone in ((128, "#0072b2"), (512, "#d55e00")):
                if width in ends:
                    axis.scatter(ends[width], place, color=tone, s=40, zorder=2)
        for width, tone in ((128, "#0072b2"), (512, "#d55e00")):
            axis.scatter([], [], color=tone, s=40, label=f"width {width}")
        axis.axvline(1, color="0.3", linestyle=":", linewidth=1)
        axis.set_yticks(range(len(names)), reversed(names))
        axis.set_xlabel("validation loss over AdamW's, after 1,500 steps")
        axis.legend(frameon=False, loc="center right")


def draw(runs: Runs, rows: list[Row]) -> None:
    def of(**kind: Any) -> list[Row]:
        return [row for row in rows if all(row[name] == value for name, value in kind.items())]

    small = {"width": 128, "bf16": False}
    draw_bytes(of(**small, ranks=2, steps=800), "step_share", "quality_per_byte")
    draw_bytes(of(**small, ranks=4, steps=2000), "run_share", "frontier")
    draw_length(runs, of(**small, ranks=2))
    draw_width(of(bf16=True, ranks=2, steps=1500))


# Experiments that were made once

ONCE = {  # file of results/: what it is
    "local_variants": "delays and saves of local steps: 0.14 M parameters, 4 simulated ranks, 600 steps, lr 4e-3",
    "rounding": "what rounding takes off, root mean square, relative; milliseconds for 10 M values",
    "time_to_loss-validation": "60 real steps at 100 Mbit/s: seconds as composed, and by the clock on the wall",
    "residuals": "SCAPE and top-k in one process, 400 steps: means of the last 40",
}


LABELS = ("table", "row", "run", "what", "bits", "seed", "steps", "step", "lr", "rate", "phases")  # are no results


def show_once(name: str) -> None:
    """The rows of a kept file; of several seeds or steps of one run, the means."""
    rows: dict[str, dict[str, list[float]]] = {}
    for row in read_rows(RESULTS / f"{name}.csv"):
        if name == "residuals" and int(row["step"]) <= 360:
            continue
        names = [row[key] for key in ("table", "row", "run", "what") if key in row and name != "rounding"]
        names = names or [f"{row['what']}, int{row['bits']}, {row['row']} values a scale"]
        numbers = rows.setdefault(", ".join(names), {})
        for key, value in row.items():
            if (
                key not in ("table", "row", "run", "what", "bits", "seed", "steps", "step", "lr", "rate", "phases")
                and value
            ):
                numbers.setdefault(key, []).append(float(value))
    fields = list(dict.fromkeys(key for numbers in rows.values() for key in numbers))
    table = [{"row": label} | {k: mean(v) for k, v in numbers.items()} for label, numbers in rows.items()]
    print(f"\n{name}.csv: {ONCE[name]}")
    print_rows(table, {key: (key, "9.4f") for key in fields}, "row", 78)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, nargs="+")
    cli.add_argument("--ranks", type=int, nargs="+")
    cli.add_argument("--once", action="store_true", help="show only the experiments whose scripts are gone")
    args = cli.parse_args()
    if not args.once:
        runs = quality.kept()
        rows, seconds = tabulate(runs), seconds_rows(runs)
        wanted = {name: given for name in ("steps", "ranks") if (given := getattr(args, name))}
        show([row for row in rows if all(row[name] in given for name, given in wanted.items())])
        show_seconds(seconds)
        write_rows(RESULTS / "quality.csv", rows, digits=DIGITS)
        draw(runs, rows)
        draw_seconds(seconds)
    for name in ONCE if args.once or not (args.steps or args.ranks) else ():
        show_once(name)


if __name__ == "__main__":
    main()
