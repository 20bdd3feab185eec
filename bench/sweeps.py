"""The papers' sweeps in small: density and interval of Radius (Table 2, Figure 7), density of SCAPE.

    python bench/sweeps.py                 # train what is missing, then show: 18 runs of 35 s on two quiet cores
    python bench/sweeps.py --show          # train nothing

Each run is one of bench/quality.py's: examples/train_gpt.py on two processes, 400 steps on real text, the first 60 of
them dense, learning rate 2e-3, one seed; kept in results/quality.jsonl. Every interval divides 400, so all runs of
Radius end on a resample: nothing is left behind at the last step. Prints the papers' differences beside ours, and saves
results/quality-radius-sweep.csv and quality-scape-sweep.csv.
"""

from __future__ import annotations

import argparse
import math

import quality
from _runs import TABLES
from quality import RESULTS, Run

SWEEPS = ("radius-sweep", "scape-sweep")
DENSITIES, INTERVALS = (0.8, 0.6, 0.4, 0.2), (20, 100, 400)
# Radius, Table 2: validation perplexity of GPT-2.0B after 300,000 steps, by density and interval.
PAPER_BASELINE = 11.42
PAPER = {(0.9, 200): 11.37, (0.5, 200): 11.39, (0.4, 200): 11.41, (0.4, 400): 11.46, (0.1, 200): 11.98}


def train() -> None:
    RESULTS.mkdir(exist_ok=True)
    for table in map(TABLES.get, SWEEPS):
        for name, lrs in table.rows.items():
            for lr in lrs:
                if (run := Run(name, lr, table.steps)) not in quality.kept():
                    quality.train(run)


def name_of(density: float, interval: int) -> str:
    return f"RadiusAdamW {density}" + ("" if interval == INTERVALS[0] else f", interval {interval}")


def losses(rows: list[dict]) -> dict[str, float]:
    return {row["run"]: row["loss"] for row in rows}


def show(radius: dict[str, float], scape: dict[str, float]) -> None:
    """Loss beyond the dense run's, in nats: ours for each pair, and what the papers' tables say."""
    dense = radius["AdamW (DDP)"]
    print(f"\nRadius: nats a byte beyond AdamW's {dense:.3f}\n{'density':<10}", end="")
    print("".join(f"{f'every {interval}':>12}" for interval in INTERVALS))
    for density in DENSITIES:
        results = [radius.get(name_of(density, interval), math.nan) - dense for interval in INTERVALS]
        print(f"{density:<10}" + "".join(f"{value:>+12.3f}" for value in results))
    print("The paper, nats a token beyond its baseline (GPT-2.0B, 300,000 steps):", end=" ")
    print(", ".join(f"{d} every {t} {math.log(ppl / PAPER_BASELINE):+.4f}" for (d, t), ppl in PAPER.items()))
    print(f"\nSCAPE: nats a byte beyond AdamS's {scape['AdamS']:.3f}, and beyond AdamW's")
    for name, loss in scape.items():
        print(f"{name:<18}{loss - scape['AdamS']:>+8.3f}{loss - dense:>+8.3f}")
    print("The paper: 0.1 below AdamS's loss, 0.01 less than 0.04 above it (GPT-345M, 100,000 steps).")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--show", action="store_true", help="train nothing")
    if not cli.parse_args().show:
        train()
    rows = [quality.best_of(table) for table in SWEEPS]
    if not all(rows):
        cli.error("nothing has run yet: leave --show away")
    for table, results in zip(SWEEPS, rows, strict=True):
        quality.show(table, results)
    show(*map(losses, rows))


if __name__ == "__main__":
    main()
