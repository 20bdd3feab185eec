"""Rounds by time against rounds of 30 steps, where one of four ranks is slow: the loss over seconds.

    python bench/unequal.py                      # three runs, ten minutes on one core
    python bench/unequal.py --seconds 60 --seeds 0 1

Four ranks in one process (tests/sim.py) train the model of local_variants.py. The clock is simulated: a step takes
0.1 s, on the slow rank 0.3 s, an exchange none, and it begins when the last rank has come to it. All runs have the same
seconds and the same learning rate over these; in the first two rounds take 9 s once they have grown. Prints the
validation loss at the end and the seconds until the loss was that of rounds of 30 steps at their end; saves
results/unequal.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / name) for name in ("tests", "examples")]
import corpus  # noqa: E402
from sim import World  # noqa: E402
from train_gpt import GPT  # noqa: E402

import compopt  # noqa: E402
from compopt._local import rounds  # noqa: E402

BATCH, CONTEXT, EVERY = 8, 64, 30
ROWS = {
    "every=30": dict(every=EVERY),
    "round_seconds=9": dict(round_seconds=9),
    "round_seconds=3": dict(round_seconds=3),
}


class Clocks:
    """A clock for each rank; ranks that have waited for each other go on at the time of the last."""

    def __init__(self, ranks: int):
        self.times, self.running = [0.0] * ranks, 0
        self._begun: dict[int, float] = defaultdict(float)  # when the last rank came to a collective
        rounds.monotonic = lambda: self.times[self.running]

    def run(self, rank: int, turns: Iterator) -> Iterator:
        """The turns of a rank, on its clock."""
        while True:
            self.running = rank
            try:
                pending = next(turns)
            except StopIteration:
                return
            number = pending.number
            self._begun[number] = max(self._begun[number], self.times[rank])
            yield pending
            self.times[rank] = max(self.times[rank], self._begun[number])


def train(options: dict, seed: int, seconds: float, lr: float, steps: list[float]) -> list[dict]:
    """Losses over seconds; ``steps``: the seconds of one, for each rank."""
    ranks, clocks, losses = len(steps), Clocks(len(steps)), []
    text, val = corpus.load(None)
    data = [corpus.batches(text, BATCH, CONTEXT, seed=1000 * seed + 1 + rank) for rank in range(ranks)]
    torch.manual_seed(seed)
    model = GPT(2, 64, 2, CONTEXT)
    models, world = [copy.deepcopy(model) for _ in range(ranks)], World(ranks)
    growth = round(seconds / max(steps) / 2)
    optimizers = [
        compopt.LocalSteps(
            torch.optim.AdamW(m.parameters(), lr), every_warmup_steps=growth, process_group=comm, **options
        )
        for m, comm in zip(models, world.comms, strict=True)
    ]

    @torch.no_grad()
    def evaluate() -> float:
        return statistics.mean(
            models[0](x, y).item() for x, y in islice(corpus.batches(val, BATCH, CONTEXT, seed=0), 50)
        )

    def work(rank: int) -> Iterator:
        optimizer, clock = optimizers[rank], clocks.times

        def share() -> float:
            """Of the run; where rounds have equal steps, ranks' steps and learning rates are equal."""
            return (optimizer.stats.applied_steps * max(steps) if "every" in options else clock[rank]) / seconds

        while (now := share()) < 1 - 1e-9:
            scale = min(1.0, 15 * now) * (0.55 + 0.45 * math.cos(math.pi * now))
            optimizer.param_groups[0]["lr"] = lr * max(scale, 0.01)
            models[rank].zero_grad()
            with torch.enable_grad():
                models[rank](*next(data[rank])).backward()
            clock[rank] += steps[rank]
            yield from clocks.run(rank, optimizer.step_as_generator())
            is_new = not losses or clock[rank] >= losses[-1]["seconds"] + 3
            if rank == 0 and optimizer.stats.phase == "exchanged" and is_new:
                steps_of_0 = optimizer.stats.applied_steps
                losses.append({"seconds": round(clock[0], 1), "steps": steps_of_0, "loss": evaluate()})
        yield from clocks.run(rank, optimizer.end_round_as_generator())

    world.run([work(rank) for rank in range(ranks)])
    steps_of_0 = optimizers[0].stats.applied_steps
    losses.append({"seconds": round(clocks.times[0], 1), "steps": steps_of_0, "loss": evaluate()})
    return losses


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--seconds", type=float, default=180.0, help="simulated, of a run")
    cli.add_argument("--steps", type=float, nargs="+", default=[0.1, 0.1, 0.1, 0.3], help="seconds of a step, by rank")
    cli.add_argument("--lr", type=float, default=4e-3)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict] = []
    for seed, (name, options) in product(args.seeds, ROWS.items()):
        losses = train(options, seed, args.seconds, args.lr, args.steps)
        rows += [{"row": name, "seed": seed, **entry} for entry in losses]
        if name == "every=30":
            aim = losses[-1]["loss"]
        reached = next((entry["seconds"] for entry in losses if entry["loss"] <= aim), math.inf)
        print(f"{name:<20}{seed:>3}{losses[-1]['loss']:>9.4f}{reached:>9.1f} s", flush=True)
    with (HERE / "results" / "unequal.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
