"""The table and the plot of the ladder: every row at its best settings, size by size."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

from _ladder_model import SIZES
from _ladder_rows import BASELINES, ROWS
from _ladder_search import Lines, best_of, list_missing, loss_of

NAMES = dict(zip(BASELINES, ("to_adamw", "to_muon"), strict=True))


def tabulate(runs: Lines, **others: Any) -> list[dict[str, Any]]:
    """A line for each size and row that has finished runs, in the order of sizes and rows.

    Settings are the best of seed 0. A loss is the mean over the seeds that have run with these, a ratio the mean of
    the ratios to the baseline's run of the same seed, where there is one.
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
    ratios = {}
    for baseline, name in NAMES.items():
        common = sorted(losses.keys() & firsts[baseline].keys())
        values = [losses[seed] / loss_of(firsts[baseline][seed]) for seed in common]
        ratios[name] = round(statistics.mean(values), 4) if values else None
    return {
        "size": size,
        "row": row,
        "parameters": first["parameters"],
        "tokens_per_parameter": first["tokens"],
        "steps": first["steps"],
        "ranks": first["ranks"],
        "loss": round(statistics.mean(losses.values()), 4),
        **ratios,
        "bytes_percent": round(100 * first["share"], 3),
        **tuned,
        "tried": sum(run._replace(**{name: getattr(start, name) for name in tuned}) == start for run in runs),
        "lr_at_an_edge": any(run.lr != first["lr"] for run in list_missing(runs, start, False)),
        "seeds": len(losses),
        "range": round(max(losses.values()) - min(losses.values()), 4) if len(losses) > 1 else None,
        "seconds": first["seconds"],
        "products": first["products"],
    }


def show(table: list[dict[str, Any]], path: Path) -> None:
    """Print the table and write it as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(table)
    for size in dict.fromkeys(line["size"] for line in table):
        lines = [line for line in table if line["size"] == size]
        about = "{parameters:,} parameters, {tokens_per_parameter:g} tokens per parameter, {ranks} ranks, {steps} steps"
        print(f"\n{size}: {about.format(**lines[0])}, products in {lines[0]['products']}")
        heads = ("loss", "to AdamW", "to Muon", "bytes", "lr", "outer lr", "momentum", "runs", "seeds", "range")
        print(f"{'':<24}" + "".join(f"{head:>10}" for head in heads))
        for line in lines:
            cells = [line["loss"], line["to_adamw"], line["to_muon"], f"{line['bytes_percent']:.2f}%"]
            lr = f"{line['lr']:g}" + "*" * line["lr_at_an_edge"]
            cells += [lr, line["outer_lr"], line["momentum"], line["tried"], line["seeds"], line["range"]]
            print(f"{line['row']:<24}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells))
    print("\n*: a rate beside this one has not run: it is not tuned")


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Loss over DDP + AdamW's and over DDP + Muon's, by size: a line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for axis, (baseline, name) in zip(panels, NAMES.items(), strict=True):
        for number, row in enumerate(ROWS):
            points = [line for line in table if line["row"] == row and line[name]]
            if row == baseline or not points:
                continue
            share = statistics.mean(line["bytes_percent"] for line in points)
            axis.plot(
                [line["parameters"] / 1e6 for line in points],
                [line[name] for line in points],
                marker="o",
                label=f"{row}, {share:.3g} % of the bytes" if axis is panels[0] or row == BASELINES[0] else None,
                color=plt.get_cmap("tab20")(2 * number % 19),
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xlabel="million parameters", ylabel=f"validation loss / {baseline}'s", xscale="log")
        ticks = sorted({line["parameters"] / 1e6 for line in table})
        axis.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
