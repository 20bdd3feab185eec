"""What averaging the inner optimizer's moments, when a checkpoint is written, does to the loss of local steps.

    python bench/consolidation.py                                 # 15 runs of 600 steps, half an hour on one core

Four ranks in one process (tests/sim.py) train 0.14 M parameters on Python source: LocalSteps(AdamW), rounds grow to 30
steps over half of the run. A save is end_round() and consolidate_state(), as trainers do it; rows differ in how often,
and in what is loaded afterwards. Prints the validation loss at the end, saves results/consolidation.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import statistics
import sys
import time
import warnings
from itertools import islice
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / name) for name in ("tests", "examples")]
import corpus  # noqa: E402
from sim import World  # noqa: E402
from train_gpt import GPT  # noqa: E402

import compopt  # noqa: E402

RANKS, BATCH, CONTEXT = 4, 8, 64
# name: steps between saves as a share of the run, whether moments are averaged, whether rank 0's file is loaded on all
ROWS = {
    "no save": (None, False, False),
    "one save": (0.5, True, False),
    "a save every 1/6 of the run": (1 / 6, True, False),
    "rounds ended as often, moments not averaged": (1 / 6, False, False),
    "one save without consolidate_state(), rank 0's file loaded on all": (0.5, False, True),
}


def train(row: str, seed: int, steps: int, lr: float) -> float:
    """The validation loss at the end, where all ranks hold the same model."""
    share, averages, loads = ROWS[row]
    saves = [] if share is None else [round(share * steps * n) for n in range(1, math.ceil(1 / share))]
    text, val = corpus.load(None)
    data = [corpus.batches(text, BATCH, CONTEXT, seed=1000 * seed + 1 + rank) for rank in range(RANKS)]
    torch.manual_seed(seed)
    model = GPT(2, 64, 2, CONTEXT)
    models, world = [copy.deepcopy(model) for _ in range(RANKS)], World(RANKS)
    optimizers = [
        compopt.LocalSteps(
            torch.optim.AdamW(m.parameters(), lr), 30, every_warmup_steps=steps // 2, process_group=world.comms[rank]
        )
        for rank, m in enumerate(models)
    ]
    for step in range(1, steps + 1):
        for optimizer in optimizers:  # a rise over 40 steps, and a cosine down to a tenth
            scale = min(1.0, step / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = lr * scale
        for m, batches in zip(models, data, strict=True):
            m.zero_grad()
            m(*next(batches)).backward()
        world.step(optimizers)
        if step in [*saves, steps]:
            world.run([optimizer.end_round_in_turns() for optimizer in optimizers])
        if step in saves and averages:
            world.consolidate(optimizers)
        if step in saves and loads:
            saved = copy.deepcopy(optimizers[0].state_dict())
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        losses = [models[0](x, y).item() for x, y in islice(corpus.batches(val, BATCH, CONTEXT, seed=0), 100)]
    return statistics.mean(losses)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=600)
    cli.add_argument("--lr", type=float, default=4e-3)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict] = []
    for seed in args.seeds:
        for row in ROWS:
            begin = time.perf_counter()
            loss = train(row, seed, args.steps, args.lr)
            rows.append({"row": row, "seed": seed, "steps": args.steps, "lr": args.lr, "val_loss": round(loss, 4)})
            print(f"{row:<70}{seed:>3}{loss:>9.4f}{time.perf_counter() - begin:>7.0f} s", flush=True)
            with (HERE / "results" / "consolidation.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
    base = {r["seed"]: r["val_loss"] for r in rows if r["row"] == "no save"}
    for row in ROWS:
        losses = [r["val_loss"] for r in rows if r["row"] == row]
        ratios = [r["val_loss"] / base[r["seed"]] for r in rows if r["row"] == row]
        print(f"{row:<70}{statistics.mean(losses):>9.4f}{statistics.mean(ratios):>9.4f} of no save")


if __name__ == "__main__":
    main()
