"""Does the order that compopt.diagnose gives agree with the losses that were measured afterwards?

    python bench/diagnosed.py             # ten times 60 steps watched, ten minutes on a quiet core
    python bench/diagnosed.py --show      # train nothing: the tables of what is there

The GPT and the training of quality.py's runs (0.86 M parameters, two ranks' batches averaged in one process), watched
for 60 steps from the first one on, and for 60 after the dense start, with every method of results/quality.jsonl that is
a class and not a rival's. For each group of runs of the same length and learning rate: Kendall's tau and Spearman's rho
of `kept`, falling, and the loss, rising; AdamW itself, which all are compared with, is left out.
Saves results/diagnosed.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT, RESULTS = Path(__file__).parent.parent, Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT / "examples"))

import corpus  # noqa: E402
import train_gpt  # noqa: E402
from quality import in_float32  # noqa: E402

import compopt  # noqa: E402
from compopt.planning.candidates import ADAMS_BETAS, Candidate, construct_silently  # noqa: E402
from compopt.planning.diagnosis import Diagnosis  # noqa: E402

STEPS, START, RANKS = 60, 10, 2
GROUPS = ((800, 2e-3), (400, 2e-3), (800, 4e-3), (1500, 1e-3), (800, 1e-3))
FIELDS = ("steps", "lr", "run", "loss", "first", "after", "residual")


class Everywhere(Candidate):
    """Attention too: naive top-k, which TAGC is otherwise."""

    def make_optimizer(self, groups, start):
        return super().make_optimizer([{**group, "compress": True} for group in groups], start)


class AroundAdamS(Candidate):
    """Separate, around AdamS."""

    def make_optimizer(self, groups, start):
        groups = [{**group, "betas": ADAMS_BETAS} for group in groups]
        base = construct_silently(compopt.AdamS, groups, lr=1.0)
        return construct_silently(compopt.Separate, base, simulate=True, warmup_steps=start, **self.options)


def separate(cls=Candidate, **options) -> Candidate:
    return cls("SeparateAdam", options)


def radius(density: float, interval: int = 20, **options) -> Candidate:
    return Candidate("RadiusAdamW", {"density": density, "interval": interval, **options})


def gaussian(ratio: int, **options) -> dict:
    return {"projection": "gaussian", "ratio": ratio, **options}


CANDIDATES: dict[str, Candidate] = {
    "AdamS": Candidate("AdamS", {}),
    **{f"RadiusAdamW {d}": radius(d) for d in (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9)},
    **{f"RadiusAdamW {d}, interval {i}": radius(d, i) for d in (0.2, 0.4, 0.6, 0.8) for i in (100, 400)},
    "RadiusAdamW 0.4, int8": radius(0.4, payload_dtype="int8"),
    **{f"ScapeAdamS {d}": Candidate("ScapeAdamS", {"density": d}) for d in (0.2, 0.1, 0.05, 0.01)},
    **{f"ScapeAdamS {d}, no mask delay": Candidate("ScapeAdamS", {"density": d, "mask_delay": 0}) for d in (0.1, 0.01)},
    "ScapeAdamS 0.1, int8": Candidate("ScapeAdamS", {"density": 0.1, "payload_dtype": "int8"}),
    **{f"SeparateAdam {r}": separate(**gaussian(r)) for r in (8, 16, 64)},
    **{f"SeparateAdam {r}, no error feedback": separate(**gaussian(r, ef_beta=1.0)) for r in (16, 64)},
    **{f"PowerSGD rank {r}": separate(rank=r, payload_dtype=None) for r in (2, 4, 6, 8, 13)},
    **{f"SeparateAdam tracked {r}, int8": separate(rank=r) for r in (4, 16)},
    **{f"SeparateAdam tracked {r}, int4": separate(rank=r, payload_dtype="int4") for r in (4, 8, 16, 32)},
    "Separate tracked 16 around AdamS, int8": separate(AroundAdamS, rank=16),
    "Separate 16 around AdamS": separate(AroundAdamS, **gaussian(16)),
    **{f"TagcAdamW {s}": Candidate("TagcAdamW", {"sparsity": s}) for s in (0.8, 0.9, 0.9875)},
    **{f"naive top-k {d}": Everywhere("TagcAdamW", {"sparsity": 1 - d}) for d in (0.4, 0.025)},
}


def watched(steps: int, lr: float, skip: int) -> dict[str, tuple[float, float]]:
    """`kept` and the residual of every method, over 60 steps after so many."""
    torch.manual_seed(0)
    model = train_gpt.GPT(layers=4, width=128, heads=4, context=64)
    matrices, scales = ([p for p in model.parameters() if (p.dim() >= 2) == m] for m in (True, False))
    groups = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    text = corpus.load()[0]
    data = [corpus.batches(text, 8, 64, seed=1 + rank) for rank in range(RANKS)]

    def train(number: int) -> None:
        for _ in range(number):
            for batches in data:
                (model(*next(batches)) / RANKS).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    train(skip)
    with Diagnosis(model, optimizer, STEPS, START, 1 << 21, None, CANDIDATES) as records:
        train(STEPS)
    print(f"lr {lr:g}, steps {skip + 1} to {skip + STEPS}: {records.seconds:.0f} s of diagnosis", flush=True)
    return {row.method: (row.kept, row.residual) for row in records.rows}


def tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's, b: ties count for neither side."""
    pairs = [((a - b), (c - d)) for (a, c), (b, d) in itertools.combinations(zip(x, y, strict=True), 2)]
    signs = [((a > 0) - (a < 0), (c > 0) - (c < 0)) for a, c in pairs]
    untied = math.prod(sum(s[i] != 0 for s in signs) for i in (0, 1))
    return sum(a * c for a, c in signs) / math.sqrt(untied)


def ranks(x: Sequence[float]) -> list[float]:
    return [sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


def rho(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks."""
    both = torch.tensor([ranks(x), ranks(y)], dtype=torch.float64)
    return float(torch.corrcoef(both)[0, 1])


def measure() -> list[dict]:
    losses = {
        (run.steps, run.lr, run.name): result["evals"][-1]["val_loss"]
        for run, result in in_float32().items()
        if run.ranks == RANKS and run.seed == 0 and run.name in CANDIDATES
    }
    rows = []
    for steps, lr in GROUPS:
        first, after = watched(steps, lr, 0), watched(steps, lr, round(0.15 * steps))
        for (s, rate, name), loss in losses.items():
            if (s, rate) == (steps, lr):
                numbers = {"first": first[name][0], "after": after[name][0], "residual": first[name][1]}
                rows.append({"steps": steps, "lr": lr, "run": name, "loss": loss} | numbers)
    return rows


def show(rows: list[dict]) -> None:
    for steps, lr in GROUPS:
        group = sorted((r for r in rows if (r["steps"], r["lr"]) == (steps, lr)), key=lambda r: r["loss"])
        loss = [r["loss"] for r in group]
        print(f"\n{steps} steps, lr {lr:g}, {len(group)} runs{'':<17}{'loss':>9}{'kept, first':>13}{'kept, after':>13}")
        for r in group:
            print(f"  {r['run']:<40}{r['loss']:>9.4f}{r['first']:>13.3f}{r['after']:>13.3f}")
        for name, score in (("Kendall's tau", tau), ("Spearman's rho", rho)):
            cells = [score([-r[key] for r in group], loss) for key in ("first", "after")]
            print(f"  {name:<49}" + "".join(f"{cell:>13.2f}" for cell in cells))


def draw(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    for axis, (steps, lr) in zip(panels, GROUPS, strict=False):
        group = [r for r in rows if (r["steps"], r["lr"]) == (steps, lr)]
        axis.plot([r["first"] for r in group], [r["loss"] for r in group], "o", markersize=4)
        for r in group:
            axis.annotate(f" {r['run']}", (r["first"], r["loss"]), fontsize=6, va="center")
        results = tau([-r["first"] for r in group], [r["loss"] for r in group])
        axis.set_title(f"{steps} steps, lr {lr:g}: Kendall's tau {results:.2f}", fontsize=10)
        axis.set(xlabel="kept of AdamW's update in the first 60 steps", ylabel="validation loss in the end")
        axis.set_xlim(right=1.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "diagnosed.png", dpi=130)
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "diagnosed.csv"
    if not args.show:
        rows = measure()
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    with path.open() as file:
        rows = [{k: v if k == "run" else json.loads(v) for k, v in row.items()} for row in csv.DictReader(file)]
    show(rows)
    draw(rows)


if __name__ == "__main__":
    main()
