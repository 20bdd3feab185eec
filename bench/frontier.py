"""The price of compression: the loss at the end of a run over the bytes of the whole run, dense start included.

    python bench/frontier.py --seeds 0                          # 2,000 steps on 4 ranks, what is missing: many hours
    python bench/frontier.py --only "LocalSteps 30, int4, growing 900" --lr 2e-3 4e-3 --seeds 0 1 2
    python bench/frontier.py --width 512 --steps 1500 --lr 1e-3
    python bench/frontier.py --show                             # train nothing

A method is shown at its best learning rate of those that have run on the first seed, its loss the mean of all seeds
that have run at that rate, with their range. Bytes are what a rank handed to collectives from the first step to the
last, over those of DDP in float32; a gather counts as the all-reduce that loads a link as much. Runs are
bench/quality.py's and are kept with its own, in quality.jsonl, so that nothing is trained twice. Prints a table, saves
results/frontier*.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product
from statistics import mean

import quality
from _runs import GRID, METHODS
from quality import RESULTS, Run

DENSE = "AdamW (DDP)"
COLOURS = {  # how names begin
    "LocalSteps": "#d55e00",
    "SeparateAdam": "#0072b2",
    "RadiusAdamW": "#009e73",
    "ScapeAdamS": "#cc79a7",
    "PowerSGD": "#4d4d4d",
    "DeMo": "#999999",
    "SparseLoCo": "#e69f00",
}
RANKS = {
    **{f"LocalSteps 30, tracked {rank}, int4, growing {n}": rank for rank in (16, 24) for n in (780, 1000)},
    "LocalSteps 10, tracked 16, int4, growing 300": 16,
    "SeparateAdam tracked 16, int8": 16,
    "SeparateAdam tracked 4, int8": 4,
    "PowerSGD rank 4": 4,
    "PowerSGD rank 16": 16,
}
NAMES = [
    *(
        "LocalSteps 10, int4, growing 300",
        "LocalSteps 30, int4, growing 600",
        "LocalSteps 30, int4, growing 900",
        "LocalSteps 30, int4, growing 780",
        "LocalSteps 30, int4, growing 800",
        "LocalSteps 30, tracked 16, int4, growing 780",
        "LocalSteps 30, tracked 24, int4, growing 780",
        "LocalSteps 30, tracked 24, int4, growing 1000",
        "LocalSteps 10, tracked 16, int4, growing 300",
        "LocalSteps 250, int4, growing 2000",
        "LocalSteps 300, int4, growing 2000",
        "LocalSteps 300, int4, growing 2000, outer lr 1",
        "LocalSteps 300, int4, growing 1500, outer lr 1",
        "LocalSteps 30, int4, growing 780, 4 fragments",
        "LocalSteps 30, int2, growing 780, outer lr 1",
        *(f"LocalSteps {every}, int2, growing {growth}, outer lr 1" for every in (30, 140) for growth in (1500, 2000)),
    ),
    *("SeparateAdam tracked 16, int8", "SeparateAdam tracked 4, int8", "PowerSGD rank 4", "PowerSGD rank 16"),
    *("DeMo 32", "DeMo 8", "SparseLoCo 15", "SparseLoCo 30"),
    *("RadiusAdamW 0.4, int8", "RadiusAdamW 0.1, int8", "ScapeAdamS 0.1, int8", "ScapeAdamS 0.01, int8"),
]


def rows(ranks: int, steps: int, width: int) -> list[dict]:
    """A row for each method that has run so: the best of its learning rates on seed 0, the mean over seeds."""
    there, found = quality.in_float32(width), []
    for name in (DENSE, *NAMES):
        runs = {(r.lr, r.seed): line for r, line in there.items() if (r.name, r.ranks, r.steps) == (name, ranks, steps)}
        first = {lr: line["evals"][-1]["val_loss"] for (lr, seed), line in runs.items() if seed == 0}
        if not first:
            continue
        best = min(first, key=first.__getitem__)
        mine = {seed: line for (lr, seed), line in runs.items() if lr == best}
        losses = [line["evals"][-1]["val_loss"] for line in mine.values()]
        last = mine[0]
        found.append(
            {
                "run": name,
                "share": last["evals"][-1]["bytes"] / (4 * last["parameters"] * steps),
                "loss": mean(losses),
                "low": min(losses),
                "high": max(losses),
                "seeds": len(losses),
                "lr": best,
                "tried": " ".join(f"{lr:g}" for lr in sorted(first)),
                "rank_to_width": f"{RANKS[name]}/{width}" if name in RANKS else "",
            }
        )
    for row in found:
        row |= {"to_adamw": row["loss"] / found[0]["loss"], "ranks": ranks, "steps": steps, "width": width}
    return found


def show(found: list[dict]) -> None:
    print(f"\n{'run':<34}{'run bytes':>10}{'loss':>8}{'range':>16}{'to AdamW':>10}{'seeds':>6}{'lr':>8}  tried")
    for r in sorted(found, key=lambda row: -row["share"]):
        spread = f"{r['low']:.3f} to {r['high']:.3f}" if r["seeds"] > 1 else ""
        numbers = f"{r['share']:>10.3%}{r['loss']:>8.3f}{spread:>16}{r['to_adamw']:>10.3f}{r['seeds']:>6}{r['lr']:>8g}"
        print(f"{r['run'] + (r['rank_to_width'] and ', rank/width ' + r['rank_to_width']):<34}{numbers}  {r['tried']}")


def save(found: list[dict], name: str) -> None:
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*found[0]])
        writer.writeheader()
        for r in found:
            writer.writerow(r | {key: round(r[key], 5) for key in ("share", "loss", "low", "high", "to_adamw")})


def plot(found: list[dict], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    dense, *others = found
    for row in others:
        colour = next(c for begins, c in COLOURS.items() if row["run"].startswith(begins))
        error = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
        axes.errorbar(100 * row["share"], row["loss"], error, fmt="o", color=colour, capsize=3)
        label = row["run"] + (f" (rank/width {row['rank_to_width']})" if row["rank_to_width"] else "")
        axes.annotate(label, (100 * row["share"], row["loss"]), (5, 4), textcoords="offset points", fontsize=7)
    axes.axhspan(dense["low"], dense["high"], color="0.85")
    axes.axhline(dense["loss"], color="0.3", linestyle=":", linewidth=1)
    axes.annotate(
        "DDP + AdamW, 100 %", (0.01, dense["loss"]), xycoords=("axes fraction", "data"), fontsize=8, va="bottom"
    )
    title = f"{dense['steps']} steps, {dense['ranks']} ranks, width {dense['width']}"
    axes.set(
        xscale="log", xlabel="bytes of the whole run, % of DDP's in float32", ylabel="validation loss", title=title
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / f"{name}.png", dpi=130)
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--only",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        help="train these methods and no others; a wrong name lists them",
    )
    cli.add_argument("--lr", type=float, nargs="+", default=GRID)
    cli.add_argument("--steps", type=int, default=2000)
    cli.add_argument("--ranks", type=int, default=4)
    cli.add_argument("--width", type=int, default=128, help="of the model: 128 is 0.86 M parameters, 512 is 13 M")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0])
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for seed, name, lr in () if args.show else product(args.seeds, args.only or (DENSE, *NAMES), args.lr):
        if (run := Run(name, lr, args.steps, args.ranks, seed, args.width)) not in quality.kept():
            quality.train(run)
    found = rows(args.ranks, args.steps, args.width)
    if not found or found[0]["run"] != DENSE:
        cli.error(f"there is no run of {DENSE!r} to compare with yet")
    name = "frontier" + ("" if args.width == 128 else f"-{args.width}")
    show(found)
    save(found, name)
    plot(found, name)


if __name__ == "__main__":
    main()
