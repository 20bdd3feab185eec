"""The cost model against the steps that links.py measured: predicted, measured, and by how much it is off.

    sudo .venv/bin/python bench/links.py && .venv/bin/python bench/predictions.py

Inputs: the step without communication measured beside each method, and the rate the links were shaped to. What a
method computes locally comes twice: from the formulas and this machine's memory and matrix speed with all ranks busy
("formula"), and as measured once, at the rate of --calibrate, for the prediction of all other rates ("calibrated").
Gradients travel while backward goes on, in as many buckets as the optimizer makes; the last leaves at its end.
Unshaped links have no rate: theirs is what the DDP step of the same run implies, so that row is not a prediction.
"""

from __future__ import annotations

import argparse
import csv
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from _model import make_model
from _net import bits_per_second

from compopt.costmodel import METHODS, Cost, Machine, Step, Workload, step_seconds
from compopt.costmodel.measure import measure_local

RESULTS = Path(__file__).parent / "results"
BACKWARD = 2 / 3  # of a step without communication: two of its three passes over the layers
BUCKETS = 5  # of 8 MiB for 10 M parameters
STEADY = 10**9  # links.py times sparse steps only: a mask that is never drawn again


def costs(work: Workload, ranks: int) -> dict[str, Cost]:
    """links.py's methods by its names, with its settings."""
    return {
        "ddp": METHODS["AdamW+DDP"](work, ranks),
        "powersgd": METHODS["PowerSGD rank 4"](work, ranks),
        "powersgd32": METHODS["PowerSGD rank 4"](work, ranks, rank=32),
        "radius": METHODS["RadiusAdamW"](work, ranks, density=0.4, interval=STEADY),
        "scape": METHODS["ScapeAdamS"](work, ranks, density=0.01),
        "separate": METHODS["SeparateAdam"](work, ranks, ratio=16),
        "tagc": METHODS["TagcAdamW"](work, ranks),
    }


def busy_local(_: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    return measure_local()


def link_of(rate: str, step: dict[tuple[str, str], float], dense: Cost, ranks: int) -> float:
    """Bytes a second of one rank's link."""
    if rate not in ("unshaped", "loopback"):
        return bits_per_second(rate) / 8
    return 2 * (ranks - 1) / ranks * dense.reduced / max(1e-9, step[rate, "ddp"] - step[rate, "none"])


def with_overlap(machine: Machine, cost: Cost, compute: float) -> Step:
    """All buckets but the last may travel during backward, each from when it is ready."""
    alone = step_seconds(machine, cost, compute)
    return step_seconds(machine, cost, compute, (1 - 1 / BUCKETS) * min(BACKWARD * compute, alone.exchange))


def predict(rows: list[dict[str, str]], work: Workload, calibrate: str) -> list[list]:
    """[rate, method, measured, formula, its error, calibrated, its error] of every method timed; seconds and shares."""
    ranks = int(rows[0]["ranks"])
    with ProcessPoolExecutor(ranks) as pool:
        measured = list(pool.map(busy_local, range(ranks)))
    memory, flops = (min(column) for column in zip(*measured, strict=True))
    step = {(row["rate"], row["method"]): float(row["step_ms"]) / 1e3 for row in rows}
    known = {name: cost for name, cost in costs(work, ranks).items() if any(name == method for _, method in step)}
    rates = list(dict.fromkeys(rate for rate, _ in step))
    machines = {r: Machine(ranks, link_of(r, step, known["ddp"], ranks), 50e-6, memory, flops) for r in rates}
    local, found = {}, []
    for method, cost in known.items():
        if (calibrate, method) in step:
            predicted = with_overlap(machines[calibrate], cost, step[calibrate, "none"])
            local[method] = step[calibrate, method] - predicted.compute - predicted.exchange
    for rate in rates:
        for method, cost in known.items():
            if (rate, method) not in step or (method == "ddp" and rate in ("unshaped", "loopback")):
                continue
            took, predicted = step[rate, method], with_overlap(machines[rate], cost, step[rate, "none"])
            row = [rate, method, took, predicted.total, predicted.total / took - 1]
            if method in local and rate != calibrate:
                again = predicted.compute + predicted.exchange + local[method]
                row += [again, again / took - 1]
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=RESULTS / "links.csv", help="what links.py saved")
    parser.add_argument("--calibrate", default="1gbit", help="the rate whose steps give each method's local cost")
    options = parser.parse_args()
    if not options.measured.exists():
        parser.error(f"{options.measured} is not there: run bench/links.py first.")
    with options.measured.open() as file:
        rows = predict(list(csv.DictReader(file)), Workload.of(make_model().named_parameters()), options.calibrate)
    print(
        f"{'rate':<10}{'method':<12}{'measured ms':>13}{'formula ms':>12}{'error':>8}{'calibrated ms':>15}{'error':>8}"
    )
    for rate, method, took, *predicted in rows:
        print(f"{rate:<10}{method:<12}{1e3 * took:>13.1f}{1e3 * predicted[0]:>12.1f}{predicted[1]:>+8.1%}", end="")
        print(f"{1e3 * predicted[2]:>15.1f}{predicted[3]:>+8.1%}" if len(predicted) == 4 else "")
    for name, column in (("formula", 4), ("calibrated", 6)):
        errors = [abs(row[column]) for row in rows if len(row) > column]
        print(
            f"largest error, {name}: {max(errors):.1%} over {len(errors)} steps" if errors else f"no {name} prediction"
        )
    head = ["rate", "method", "measured_s", "formula_s", "formula_error", "calibrated_s", "calibrated_error"]
    with (options.measured.parent / "predictions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *([*row[:2], *(f"{value:.4f}" for value in row[2:])] for row in rows)])


if __name__ == "__main__":
    main()
