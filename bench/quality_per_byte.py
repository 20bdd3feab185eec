"""The loss that each byte of a compressed step buys: all classes, with and without int8, beside PowerSGD and top-k.

    python bench/quality_per_byte.py                                  # 800 steps on 2 ranks, seed 0: about 3 hours
    python bench/quality_per_byte.py --only "SeparateAdam tracked 16, int8" --lr 4e-3
    python bench/quality_per_byte.py --ranks 4 --steps 5000 --seeds 0 1
    python bench/quality_per_byte.py --show                           # train nothing

A method is shown at its best learning rate of those that have run, its loss the mean over the seeds that have. Runs are
those of bench/quality.py and are kept with its own, so that nothing is trained twice. Prints a table and saves
results/quality_per_byte.csv and .png: loss over bytes, and the front of methods that none beats at fewer bytes.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product
from statistics import mean

import quality
from _runs import GRID, METHODS
from quality import RESULTS, Run

DENSE = ("AdamW (DDP)", "AdamS")
AROUND = tuple(lr / 4 for lr in GRID)  # AdamS wants a smaller one than AdamW
GROUPS = {  # what is drawn in one colour: how its names begin, and how they end
    "PowerSGD, torch's hook": ("PowerSGD", ""),
    "naive top-k": ("naive", ""),
    "tracked, int8": ("SeparateAdam tracked", "int8"),
    "tracked, int4": ("SeparateAdam tracked", "int4"),
    "tracked around AdamS, int8": ("Separate tracked", "int8"),
    "tracked": ("SeparateAdam tracked", ""),
    "Radius": ("RadiusAdamW", ""),
    "SCAPE": ("ScapeAdamS", ""),
    "SEPARATE, Gaussian": ("SeparateAdam", ""),
}
NAMES = [  # by the share of the dense bytes that a compressed step takes, in per cent
    *(f"PowerSGD rank {rank}" for rank in (1, 2, 4, 8, 16, 32)),  # 1.1 2.3 4.4 8.7 17 35
    *(f"naive top-k {density}" for density in (0.005, 0.01, 0.025, 0.05)),  # 1 2 5 10, and the small tensors
    *(f"SeparateAdam tracked {rank}" for rank in (1, 2, 4, 8)),  # 1.1 2.1 4.3 8.5
    *(f"SeparateAdam tracked {rank}, int8" for rank in (4, 8, 16, 32)),  # 1.1 2.2 4.4 8.8
    *(f"SeparateAdam tracked {rank}, int4" for rank in (4, 8, 16, 32)),  # 0.6 1.1 2.3 4.5
    *(f"Separate tracked {rank} around AdamS, int8" for rank in (4, 8, 16, 32)),
    *("RadiusAdamW 0.1", "RadiusAdamW 0.1, int8", "RadiusAdamW 0.2, int8", "RadiusAdamW 0.4, int8"),  # 10 3 5 10
    *("ScapeAdamS 0.01", "ScapeAdamS 0.05", "ScapeAdamS 0.1"),  # 1.3 6 11
    *(f"ScapeAdamS {density}, int8" for density in (0.01, 0.05, 0.1, 0.2)),  # 0.5 2 4 7
    *("SeparateAdam 64", "SeparateAdam 16", "SeparateAdam 8"),  # 1.7 6.4 13
    *("SeparateAdam 16, int8", "SeparateAdam 8, int8", "SeparateAdam 4, int8"),  # 1.6 3.2 6.4
]


def rates(name: str) -> tuple[float, ...]:
    return AROUND + GRID[:1] if "AdamS" in name and "Scape" not in name else GRID


def rows(ranks: int, steps: int) -> list[dict]:
    """A row for each method that has run on so many ranks and steps: its best learning rate, the mean over seeds."""
    there, found = quality.in_float32(), []
    for name in (*DENSE, *NAMES):
        losses: dict[float, list[float]] = {}
        for run, line in there.items():
            if (run.name, run.ranks, run.steps) == (name, ranks, steps):
                losses.setdefault(run.lr, []).append(line["evals"][-1]["val_loss"])
                sent, dense = line["bytes_per_step"]["compressed"], 4 * line["parameters"]
        if losses:
            best = min(losses, key=lambda lr: mean(losses[lr]))
            loss = mean(losses[best])
            tried = " ".join(f"{lr:g}" for lr in sorted(losses))
            share = (sent or dense) / dense
            found.append(dict(run=name, share=share, loss=loss, lr=best, seeds=len(losses[best]), tried=tried))
    for row in found:
        row |= {"to_first": row["loss"] / found[0]["loss"], "ranks": ranks, "steps": steps}
        row["front"] = all(o["loss"] > row["loss"] or o["share"] > row["share"] or o is row for o in found)
    return sorted(found, key=lambda row: row["share"])


def show(found: list[dict]) -> None:
    print(f"\n{'run':<44}{'share':>8}{'loss':>8}{'to AdamW':>10}{'lr':>9}{'seeds':>7}  front")
    for r in found:
        numbers = f"{r['share']:>8.2%}{r['loss']:>8.3f}{r['to_first']:>10.3f}{r['lr']:>9g}{r['seeds']:>7}"
        print(f"{r['run']:<44}{numbers}  {'*' if r['front'] else ''}")


def save(found: list[dict]) -> None:
    """The rows as CSV, those of other runs kept."""
    path, fields = RESULTS / "quality_per_byte.csv", [*found[0]]
    same = {(str(r["ranks"]), str(r["steps"])) for r in found}
    old = list(csv.DictReader(path.open())) if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(row for row in old if (row["ranks"], row["steps"]) not in same)
        writer.writerows({**r, **{key: round(r[key], 4) for key in ("share", "loss", "to_first")}} for r in found)


def plot(found: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    left = [row for row in found if row["run"] not in DENSE]
    for number, (label, (begins, ends)) in enumerate(GROUPS.items()):
        mine = [row for row in left if row["run"].startswith(begins) and row["run"].endswith(ends)]
        left = [row for row in left if row not in mine]
        points = [(100 * row["share"], row["loss"]) for row in mine]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=plt.get_cmap("tab10")(number), label=label)
    front = [(100 * row["share"], row["loss"]) for row in found if row["front"]]
    axes.plot(*zip(*front, strict=True), color="0.6", linewidth=1, zorder=0, label="none is better at fewer bytes")
    for row in found:
        if row["run"] in DENSE:
            axes.axhline(row["loss"], color="0.3", linestyle=":", linewidth=1)
            place = dict(xy=(0.01, row["loss"]), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
            axes.annotate(f"{row['run']}, dense", **place)
    title = f"{found[0]['steps']} steps, {found[0]['ranks']} ranks"
    axes.set(
        xscale="log", xlabel="bytes of a compressed step, % of dense float32", ylabel="validation loss", title=title
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "quality_per_byte.png", dpi=130)
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
    cli.add_argument("--lr", type=float, nargs="+", help="these learning rates instead of the grid")
    cli.add_argument("--steps", type=int, default=800)
    cli.add_argument("--ranks", type=int, default=2)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0])
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name, seed in () if args.show else product(args.only or (*DENSE, *NAMES), args.seeds):
        for lr in args.lr or rates(name):
            if (run := Run(name, lr, args.steps, args.ranks, seed)) not in quality.kept():
                quality.train(run)
    if found := rows(args.ranks, args.steps):
        show(found)
        save(found)
        plot(found)


if __name__ == "__main__":
    main()
