"""step() alone, one process of one thread: every class beside torch's fused AdamW, in turns, at 10 M parameters.

    python bench/step.py                       # all rows; a minute
    python bench/step.py --only "ScapeAdamS 0.01" --profile

Gradients are those of real batches, made before the clock starts; masks are refreshed within the time. Only the ratios
mean anything: all rows take turns, step by step. Saves results/step.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
from _model import Batches, make_model

import compopt

RESULTS = Path(__file__).parent / "results"
ROWS = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=3e-4, fused=True),
    "AdamS": lambda p: compopt.AdamS(p, lr=3e-4),
    "RadiusAdamW 0.4, sparse": lambda p: compopt.RadiusAdamW(p, lr=3e-4, density=0.4, interval=10**6, warmup_steps=1),
    "ScapeAdamS 0.1": lambda p: compopt.ScapeAdamS(p, lr=3e-4, density=0.1, density_warmup_steps=0),
    "ScapeAdamS 0.01": lambda p: compopt.ScapeAdamS(p, lr=3e-4, density=0.01, density_warmup_steps=0),
    "SeparateAdam 16": lambda p: compopt.SeparateAdam(p, lr=3e-4, ratio=16),
}
SETTLE, GRADIENTS = 6, 4  # untimed steps before the clock; sets of gradients that are handed out in turn


def gradients(sets: int) -> list[list[torch.Tensor]]:
    model, batches = make_model(), Batches(rank=0)
    found = []
    for _ in range(sets):
        model.zero_grad()
        model(*batches.next()).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def measure(names: list[str], steps: int, profile: bool) -> dict[str, list[float]]:
    pool, seconds = gradients(GRADIENTS), {name: [] for name in names}
    models = {name: make_model() for name in names}
    optimizers = {name: ROWS[name](models[name].parameters()) for name in names}
    for step in range(SETTLE + steps):
        for name in names:
            for p, g in zip(models[name].parameters(), pool[step % len(pool)], strict=True):
                p.grad = g
            start = time.perf_counter()
            optimizers[name].step()
            if step >= SETTLE:
                seconds[name].append(time.perf_counter() - start)
    if profile:
        with torch.profiler.profile() as found:
            optimizers[names[-1]].step()
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))
    return seconds


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows, beside AdamW")
    cli.add_argument("--steps", type=int, default=40)
    cli.add_argument("--profile", action="store_true", help="show where one step of the last row goes")
    args = cli.parse_args()
    torch.set_num_threads(1)
    first, *_ = ROWS
    names = [first, *(name for name in args.only if name != first)]
    seconds = measure(names, args.steps, args.profile)
    rows = []
    for name in names:
        low, middle, high = (1000 * t for t in statistics.quantiles(seconds[name], n=4))
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[first], strict=True))
        rows.append({"row": name, "ms": round(middle, 2), "iqr_ms": round(high - low, 2), "to_adamw": round(ratio, 2)})
        print(f"{name:<28}{middle:>8.1f} ms  IQR {high - low:>5.1f}  {ratio:>6.2f} x fused AdamW")
    if args.only == list(ROWS):
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "step.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
