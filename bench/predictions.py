"""The cost model against the steps that links.py measured: predicted, measured, and by how much it is off.

    sudo .venv/bin/python bench/links.py && .venv/bin/python bench/predictions.py

Inputs, none of them fitted to what is predicted: the step without communication measured beside each method, the rate
the links were shaped to, and this machine's memory and matrix speed with as many processes busy as there were ranks.
Unshaped links have no rate: theirs is what the DDP step of the same run implies, so that row is not a prediction.
"""

from __future__ import annotations

import argparse
import csv
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from _model import make_model
from _net import bits_per_second

from compopt.costmodel import METHODS, Cost, Machine, Workload, step_seconds
from compopt.costmodel.measure import measure_local

RESULTS = Path(__file__).parent / "results"
STEADY = 10**9  # links.py times sparse steps only: a mask that is never drawn again


def costs(work: Workload, ranks: int) -> dict[str, Cost]:
    """links.py's methods by its names, with its settings."""
    return {
        "ddp": METHODS["AdamW+DDP"](work, ranks),
        "powersgd": METHODS["PowerSGD rank 4"](work, ranks),
        "powersgd32": METHODS["PowerSGD rank 4"](work, ranks, rank=32),
        "radius": METHODS["RadiusAdamW"](work, ranks, density=0.4, interval=STEADY),
        "scape": METHODS["ScapeAdamS"](work, ranks, density=0.1),
        "scape1": METHODS["ScapeAdamS"](work, ranks, density=0.01),
        "separate": METHODS["SeparateAdam"](work, ranks, ratio=16),
        "tagc": METHODS["TagcAdamW"](work, ranks),
    }


def busy_local(_: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    return measure_local()


def predict(rows: list[dict[str, str]], work: Workload) -> list[list]:
    """[rate, method, measured ms, predicted ms, error %] of every method that links.py timed and the model knows."""
    ranks = int(rows[0]["ranks"])
    with ProcessPoolExecutor(ranks) as pool:
        measured = list(pool.map(busy_local, range(ranks)))
    memory, flops = (min(column) for column in zip(*measured, strict=True))
    step = {(row["rate"], row["method"]): float(row["step_ms"]) / 1e3 for row in rows}
    found = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        known = costs(work, ranks)
        compute = step[rate, "none"]
        if rate == "unshaped":
            link = 2 * (ranks - 1) / ranks * known["ddp"].reduced / max(1e-9, step[rate, "ddp"] - compute)
        else:
            link = bits_per_second(rate) / 8
        machine = Machine(ranks, link, 50e-6, memory, flops)
        for method, cost in known.items():
            if (rate, method) in step and not (rate == "unshaped" and method == "ddp"):
                predicted = step_seconds(machine, cost, compute).total
                error = 100 * (predicted / step[rate, method] - 1)
                found.append([rate, method, 1e3 * step[rate, method], 1e3 * predicted, error])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=RESULTS / "links.csv", help="what links.py saved")
    options = parser.parse_args()
    if not options.measured.exists():
        parser.error(f"{options.measured} is not there: run bench/links.py first.")
    with options.measured.open() as file:
        rows = predict(list(csv.DictReader(file)), Workload.of(make_model().named_parameters()))
    head = ["rate", "method", "measured_ms", "predicted_ms", "error_percent"]
    print(f"{head[0]:<10}{head[1]:<12}{'measured ms':>13}{'predicted ms':>14}{'error %':>9}")
    for rate, method, measured, predicted, error in rows:
        print(f"{rate:<10}{method:<12}{measured:>13.1f}{predicted:>14.1f}{error:>+9.1f}")
    worst = max((abs(row[-1]) for row in rows), default=math.nan)
    print(f"\nlargest error {worst:.1f} % over {len(rows)} steps")
    with (options.measured.parent / "predictions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *([*row[:2], *(f"{value:.2f}" for value in row[2:])] for row in rows)])


if __name__ == "__main__":
    main()
