"""What SEPARATE costs in loss: ratios, projections, error feedback and bases beside AdamW and PowerSGD, on real text.

    .venv/bin/python bench/separate_quality.py                             # everything: about 20 minutes on 2 cores
    .venv/bin/python bench/separate_quality.py --methods "separate 16" adamw --lrs 2e-3

Trains the GPT of examples/train_gpt.py on the standard library's source, 2 ranks of one thread under DDP, once for each
method and learning rate. Prints a table of the best learning rate of each, and saves results/separate_quality.csv and
.png beside this file; rows that are there already are kept, and run again when asked for again.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import baselines
import corpus
import train_gpt

import compopt

RESULTS = Path(__file__).parent / "results"
FIELDS = ["method", "lr", "steps", "ranks", "bytes_per_step", "dense_bytes", "validation_loss", "seed"]
WARMUP_SHARE = 0.15

Make = Callable[[list, float, int], torch.optim.Optimizer]  # from groups, learning rate, dense steps


def adamw(groups: list, lr: float, warmup: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def separate(**options: object) -> Make:
    return lambda groups, lr, warmup: compopt.SeparateAdam(groups, lr=lr, **{"warmup_steps": warmup, **options})


def around(base: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    def make(groups: list, lr: float, warmup: int) -> torch.optim.Optimizer:
        return compopt.Separate(base(groups, lr=lr), **{"warmup_steps": warmup, **options})

    return make


def adams(groups: list, lr: float, warmup: int = 0) -> torch.optim.Optimizer:
    return compopt.AdamS(groups, lr=lr)


def sgd(groups: list, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=100 * lr, momentum=0.9, nesterov=True)


METHODS: dict[str, Make] = {
    "adamw": adamw,
    "separate 8": separate(ratio=8),
    "separate 16": separate(ratio=16),
    "separate 64": separate(ratio=64),
    "separate 16, from scratch": separate(ratio=16, warmup_steps=0),
    "separate 16, no error feedback": separate(ratio=16, ef_beta=1.0),
    "separate 64, no error feedback": separate(ratio=64, ef_beta=1.0),
    "separate 64, ef_beta .95": separate(ratio=64, ef_beta=0.95),
    "separate 16, never reset": separate(ratio=16, reset_interval=None),
    "separate 16, adaptive": separate(ratio=16, adaptive=True, adapt_interval=100),
    "orthonormal 16": separate(ratio=16, projection="orthonormal", reset_interval=None),
    "orthonormal 64": separate(ratio=64, projection="orthonormal", reset_interval=None),
    "orthonormal 16, reset": separate(ratio=16, projection="orthonormal"),
    "orthonormal 16, no error feedback": separate(ratio=16, projection="orthonormal", ef_beta=1.0),
    "powersgd 13": adamw,
    "powersgd 6": adamw,
    "powersgd 2": adamw,
    "adams": adams,
    "separate 16 around adams": around(adams, ratio=16),
    "separate 16 around adams, from scratch": around(adams, ratio=16, warmup_steps=0),
    "separate 16 around sgd": around(sgd, ratio=16),
}


def train(method: str, lr: float, steps: int, seed: int) -> tuple[float, int]:
    """Validation loss at the end, and bytes this rank hands to collectives in a compressed step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, held_out = corpus.load()
    batches = corpus.batches(text, 8, 64, seed=1000 * seed + 1 + rank)
    torch.manual_seed(seed)
    model = train_gpt.GPT(layers=4, width=128, heads=4, context=64)
    ddp = DistributedDataParallel(model)
    matrices, scales = ([p for p in model.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
    warmup = round(WARMUP_SHARE * steps)
    optimizer = METHODS[method]([{"params": matrices}, {"params": scales, "weight_decay": 0.0}], lr, warmup)
    stats = baselines.Dense(ddp)
    if method.startswith("powersgd"):
        baselines.POWERSGD_RANK = int(method.split()[1])
        stats = baselines.PowerSGD(ddp, warmup)

    def rate(step: int) -> float:  # as examples/train_gpt.py: a rise over 40 steps, and a cosine down to a tenth
        return min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for x, y in islice(batches, steps):
        ddp(x, y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    sent = getattr(optimizer, "stats", stats).bytes_sent
    with torch.no_grad():
        losses = [model(x, y).item() for x, y in islice(corpus.batches(held_out, 8, 64, seed=0), rank, 200, world)]
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item(), sent


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for method in options.methods:
        for lr in options.lrs:
            loss, sent = train(method, lr, options.steps, options.seed)
            if dist.get_rank() == 0:
                dense = 4 * sum(p.numel() for p in train_gpt.GPT(4, 128, 4, 64).parameters())
                row = [method, lr, options.steps, dist.get_world_size(), sent, dense, round(loss, 4), options.seed]
                keep(dict(zip(FIELDS, row, strict=True)))
                print(f"{method:40} lr {lr:g}: {sent:9} bytes a step, validation loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


def kept() -> list[dict]:
    path = RESULTS / "separate_quality.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def keep(row: dict) -> None:
    """Write ``row`` in place of an earlier one of the same run."""
    same = ("method", "lr", "steps", "ranks", "seed")
    rows = [old for old in kept() if any(old[key] != str(row[key]) for key in same)] + [row]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "separate_quality.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


def show(steps: int, seed: int) -> None:
    """The table of best learning rates, and the plot of loss over bytes."""
    rows = [row for row in kept() if int(row["steps"]) == steps and int(row["seed"]) == seed]
    runs = [[row for row in rows if row["method"] == method] for method in METHODS]
    best = [min(same, key=lambda row: float(row["validation_loss"])) for same in runs if same]
    print(f"\n| method ({steps} steps) | best lr | bytes a step | of dense | validation loss |\n|---|---|---|---|---|")
    for r in best:
        share, loss = float(r["bytes_per_step"]) / float(r["dense_bytes"]), float(r["validation_loss"])
        print(f"| {r['method']} | {float(r['lr']):g} | {r['bytes_per_step']} | {share:.1%} | {loss:.3f} |")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("No plot: matplotlib is not installed.")
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    for prefix, colour in [
        ("separate", "tab:blue"),
        ("orthonormal", "tab:green"),
        ("powersgd", "tab:orange"),
        ("ada", "black"),
    ]:
        for r in (r for r in best if r["method"].startswith(prefix)):
            place = 100 * float(r["bytes_per_step"]) / float(r["dense_bytes"]), float(r["validation_loss"])
            axes.plot(*place, "o", color=colour)
            axes.annotate(r["method"], place, textcoords="offset points", xytext=(6, 3), fontsize=8)
    axes.set(
        xscale="log", xlabel="bytes a step, % of dense", ylabel=f"validation loss after {steps} steps, nats a byte"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(1, 400)
    figure.tight_layout()
    figure.savefig(RESULTS / "separate_quality.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if options.methods:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        subprocess.run([*launch, __file__, "--worker", *sys.argv[1:]], check=True, timeout=3600)
    show(options.steps, options.seed)


if __name__ == "__main__":
    main()
