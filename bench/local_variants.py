"""Variants of local steps at a small size: how often a checkpoint is written, and a delay.

    python bench/local_variants.py                                # 30 runs of 600 steps, an hour on one core
    python bench/local_variants.py --table saves --seeds 0

Four ranks in one process (tests/sim.py) train 0.14 M parameters on Python source: LocalSteps(AdamW), rounds grow to 30
steps over half of the run. A save is end_round() and consolidate_state(), as trainers do it; rows differ in how often,
and in what is loaded afterwards. Prints the validation loss after the last round was ended, and before that the loss of
the anchors and of one replica; saves results/local_variants.csv.
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
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / name) for name in ("tests", "examples")]
import corpus  # noqa: E402
from sim import World  # noqa: E402
from train_gpt import GPT  # noqa: E402

import compopt  # noqa: E402

RANKS, BATCH, CONTEXT = 4, 8, 64


@dataclass(frozen=True)
class Variant:
    """``share``: steps between saves as a share of the run."""

    share: float | None = None
    averages_moments: bool = False
    loads_of_rank_0: bool = False
    options: dict[str, int] = field(default_factory=dict)


TABLES = {
    "saves": {
        "no save": Variant(),
        "one save": Variant(0.5, averages_moments=True),
        "a save every 1/6 of the run": Variant(1 / 6, averages_moments=True),
        "rounds ended as often, moments not averaged": Variant(1 / 6),
        "one save without consolidate_state(), rank 0's file loaded on all": Variant(0.5, loads_of_rank_0=True),
    },
    "delay": {
        "no delay": Variant(),
        "delay=1": Variant(options=dict(delay=1)),
        "delay=10": Variant(options=dict(delay=10)),
        "delay=30": Variant(options=dict(delay=30)),
        "delay=1, fragments=4": Variant(options=dict(delay=1, fragments=4)),
    },
}


def train(variant: Variant, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Validation losses at the end: of one replica and of the anchors within the round, and of the model after it."""
    share = variant.share
    saves = [] if share is None else [round(share * steps * n) for n in range(1, math.ceil(1 / share))]
    text, val = corpus.load(None)
    data = [corpus.batches(text, BATCH, CONTEXT, seed=1000 * seed + 1 + rank) for rank in range(RANKS)]
    torch.manual_seed(seed)
    model = GPT(2, 64, 2, CONTEXT)
    models, world = [copy.deepcopy(model) for _ in range(RANKS)], World(RANKS)
    options = dict(every=30, every_warmup_steps=steps // 2, **variant.options)
    optimizers = [
        compopt.LocalSteps(torch.optim.AdamW(m.parameters(), lr), process_group=comm, **options)
        for m, comm in zip(models, world.comms, strict=True)
    ]

    @torch.no_grad()
    def evaluate() -> float:
        batches = islice(corpus.batches(val, BATCH, CONTEXT, seed=0), 100)
        return round(statistics.mean(models[0](x, y).item() for x, y in batches), 4)

    for step in range(1, steps + 1):
        for optimizer in optimizers:  # a rise over 40 steps, and a cosine down to a tenth
            scale = min(1.0, step / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = lr * scale
        for m, batches in zip(models, data, strict=True):
            m.zero_grad()
            m(*next(batches)).backward()
        world.step(optimizers)
        if step == steps:
            losses = {"into_round": optimizers[0].stats.steps_into_round, "replica_loss": evaluate()}
            with optimizers[0].use_anchors():
                losses["anchor_loss"] = evaluate()
        if step in [*saves, steps]:
            world.run([optimizer.end_round_as_generator() for optimizer in optimizers])
        if step in saves and variant.averages_moments:
            world.consolidate(optimizers)
        if step in saves and variant.loads_of_rank_0:
            saved = copy.deepcopy(optimizers[0].state_dict())
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(saved))
    return losses | {"val_loss": evaluate()}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES))
    cli.add_argument("--steps", type=int, default=600)
    cli.add_argument("--lr", type=float, default=4e-3)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict] = []
    for table, seed in product(args.table, args.seeds):
        for name, variant in TABLES[table].items():
            begin, case = time.perf_counter(), {"table": table, "row": name, "seed": seed}
            losses = train(variant, seed, args.steps, args.lr)
            rows.append(case | {"steps": args.steps, "lr": args.lr} | losses)
            print(f"{name:<70}{seed:>3}", *losses.values(), f"{time.perf_counter() - begin:>7.0f} s", flush=True)
    with (HERE / "results" / "local_variants.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    for table in args.table:
        losses = {n: [r["val_loss"] for r in rows if (r["table"], r["row"]) == (table, n)] for n in TABLES[table]}
        first = next(iter(losses.values()))
        for name, local in losses.items():
            ratio = statistics.mean(a / b for a, b in zip(local, first, strict=True))
            print(f"{name:<70}{statistics.mean(local):>9.4f}{ratio:>9.4f} of the first row")


if __name__ == "__main__":
    main()
