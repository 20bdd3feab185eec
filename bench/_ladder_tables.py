"""The tables and the plot of the ladder: every row at its best settings, size by size, for each number of ranks."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from _ladder_model import SIZES
from _ladder_rows import BASELINES, MAIN, MOMENTA, OUTER_LRS, ROWS
from _ladder_runs import Lines, best_of, list_missing, loss_of
from _table import color, drawing, print_rows

NAMES = dict(zip(BASELINES, ("to_adamw", "to_muon"), strict=True))


def tabulate(runs: Lines, **others: Any) -> list[dict[str, Any]]:
    """A line for each size and row that has finished runs on so many ranks, in the order of sizes and rows.

    Settings are the best of seed 0. A loss is the mean over the seeds that have run with these, a ratio the mean of
    the ratios to the baseline's run of the same seed on as many ranks, where there is one. Ranges are from the lowest
    to the highest seed.
    """
    table = []
    for size in SIZES:
        firsts = {name: _seeds(runs, size, name, others) for name in BASELINES}
        for row in ROWS:
            if seeds := _seeds(runs, size, row, others):
                table.append(_line(runs, size, row, seeds, firsts, others))
    return table


def _seeds(runs: Lines, size: str, row: str, others: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By seed, the runs with the best settings of seed 0."""
    best = best_of(runs, ROWS[row].start(size, **others))
    if best is None or loss_of(runs[best]) == float("inf"):
        return {}
    return {run.seed: line for run, line in runs.items() if run._replace(seed=0) == best}


def _line(runs: Lines, size: str, row: str, seeds: dict, firsts: dict, others: dict[str, Any]) -> dict[str, Any]:
    losses, first = {seed: loss_of(line) for seed, line in seeds.items()}, seeds[0]
    tuned = {name: first[name] for name in ("lr", "outer_lr", "momentum")}
    start = ROWS[row].start(size, **others)
    ratios: dict[str, float | None] = {}
    for baseline, name in NAMES.items():
        common = sorted(losses.keys() & firsts[baseline].keys())
        values = [losses[seed] / loss_of(firsts[baseline][seed]) for seed in common]
        ratios[name] = round(statistics.mean(values), 4) if values else None
        ratios[f"{name}_range"] = _range(values)
    return {
        "size": size,
        "row": row,
        "parameters": first["parameters"],
        "tokens_per_parameter": first["tokens"],
        "steps": first["steps"],
        "ranks": first["ranks"],
        "batch": f"{SIZES[size].batch} x {SIZES[size].context}",  # of a rank
        "loss": round(statistics.mean(losses.values()), 4),
        **ratios,
        "bytes_percent": round(100 * first["share"], 3),
        **tuned,
        "tried": sum(run._replace(**{name: getattr(start, name) for name in tuned}) == start for run in runs),
        "lr_at_an_edge": any(run.lr != first["lr"] for run in list_missing(runs, start, False)),
        "seeds": len(losses),
        "range": _range(losses.values()),
        "seconds": first["seconds"],
        "products": first["products"],
    }


def _range(values: Collection[float]) -> float | None:
    return round(max(values) - min(values), 4) if len(values) > 1 else None


def tabulate_outer(runs: Lines, **others: Any) -> list[dict[str, Any]]:
    """A line for each outer setting of each row that has been tried on the seed, at the best of its learning rates."""
    table = []
    for size, (row, made) in itertools.product(SIZES, ROWS.items()):
        start = made.start(size, **others)
        if made.momentum is None or (best := best_of(runs, start)) is None:
            continue
        for momentum, outer_lr in itertools.product(MOMENTA, OUTER_LRS):
            like = start._replace(momentum=momentum, outer_lr=outer_lr)
            rates = [run for run in runs if run._replace(lr=like.lr) == like]
            if not rates:
                continue
            run = min(rates, key=lambda run: loss_of(runs[run]))
            table.append(
                {
                    "size": size,
                    "row": row,
                    "ranks": run.ranks,
                    "momentum": momentum,
                    "outer_lr": outer_lr,
                    "lr": run.lr,
                    "rates": len(rates),
                    "loss": runs[run]["val_loss"],
                    "to_best": round(loss_of(runs[run]) / loss_of(runs[best]), 4),
                }
            )
    return table


HEADS = {"to_adamw": "x AdamW", "to_muon": "x Muon"}
COLUMNS = {
    "loss": ("loss", "9.4f"),
    "range": ("range", "9.4f"),
    **{f"{name}{what}": (head, "9.4f") for name in NAMES.values()
       for what, head in (("", HEADS[name]), ("_range", "range"))},
    "bytes_percent": ("bytes, %", "9.2f"),
    "rate": ("lr", ">9"),
    "outer_lr": ("outer lr", "9g"),
    "momentum": ("momentum", "9g"),
    "tried": ("runs", "5d"),
    "seeds": ("seeds", "5d"),
}  # fmt: skip
OUTER = {
    "size": ("size", ">7"),
    "ranks": ("ranks", "5d"),
    "momentum": ("momentum", "9g"),
    "outer_lr": ("outer lr", "9g"),
}
OUTER |= {"loss": ("loss", "9.4f"), "to_best": ("x best", "8.4f"), "lr": ("lr", "8g"), "rates": ("rates", "5d")}


def show(table: list[dict[str, Any]]) -> None:
    """Print a table for each size and number of ranks."""
    about = "{size}: {parameters:,} parameters, {tokens_per_parameter:g} tokens per parameter, {ranks} ranks, "
    about += "{steps} steps of {batch}, products in {products}"
    for size, ranks in dict.fromkeys((line["size"], line["ranks"]) for line in table):
        lines = [line for line in table if (line["size"], line["ranks"]) == (size, ranks)]
        print("\n" + about.format(**lines[0]))
        rates = [{"rate": f"{line['lr']:g}" + "*" * line["lr_at_an_edge"]} for line in lines]
        print_rows([line | rate for line, rate in zip(lines, rates, strict=True)], COLUMNS, "row", 52)
    print("\n*: a rate beside this one has not run: it is not tuned")


def show_outer(table: list[dict[str, Any]]) -> None:
    """Print what outer settings ended at, each at the best of the learning rates it was tried with."""
    print("\nOuter settings, one seed; rates: learning rates tried with these")
    print_rows(table, OUTER, "row", 52)


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Loss over DDP + AdamW's and over DDP + Muon's, by size, of the ranks and batch of most lines: a line a method."""
    ((ranks, batch), _) = Counter((line["ranks"], line["batch"]) for line in table).most_common(1)[0]
    lines = [line for line in table if (line["ranks"], line["batch"]) == (ranks, batch)]
    ticks, labels = sorted({line["parameters"] / 1e6 for line in lines}), {}
    with drawing(path, 2, (13, 5)) as (figure, panels):
        for axis, (baseline, name) in zip(panels, NAMES.items(), strict=True):
            labels |= _draw_panel(axis, lines, baseline, name)
            axis.set(xlabel="million parameters", ylabel=f"validation loss / {baseline}'s", title=f"{ranks} ranks")
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
            axis.minorticks_off()
        texts = [f"{row}, {_share_of([line for line in lines if line['row'] == row])} % of the bytes" for row in labels]
        figure.legend(labels.values(), texts, loc="outside right upper", frameon=False, fontsize=8)


def _share_of(lines: list[dict[str, Any]]) -> str:
    shares = [line["bytes_percent"] for line in lines]
    return " to ".join(dict.fromkeys(f"{float(f'{share:.2g}'):g}" for share in (min(shares), max(shares))))


def _draw_panel(axis: Any, lines: list[dict[str, Any]], baseline: str, name: str) -> dict[str, Any]:
    """Draw the methods over one baseline. Returns a line of the plot for each."""
    labels = {}
    for number, row in enumerate(MAIN):
        points = [line for line in lines if line["row"] == row and line[name]]
        if row != baseline and points:
            (labels[row],) = axis.plot(
                [line["parameters"] / 1e6 for line in points],
                [line[name] for line in points],
                marker="o",
                color=color(number),
            )
    axis.axhline(1, color="black", linewidth=0.8)
    return labels
