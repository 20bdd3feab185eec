"""Does the gap to AdamW close as runs get longer? Every method's loss over AdamW's, in short runs and in long ones.

    python bench/length.py                                        # what is missing: many hours
    python bench/length.py --only "RadiusAdamW 0.4" --steps 8000
    python bench/length.py --show                                 # train nothing

Runs are bench/quality.py's, on two ranks, and are kept with its own. Each is a whole run: its learning rate decays to
its end, and 15 % of its steps are dense. So ends of runs are compared with ends, and the parts of a run (an eighth, a
quarter, half of its steps) with AdamW's at the same step and rate, if that has run, else at its best one. AdamW wants
a smaller rate in longer runs, so ``to_best`` is over its best run of that length, of the rates that have run. Prints a
table and saves results/length.csv and length.png.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product

import quality
from quality import RESULTS, Run

DENSE = "AdamW (DDP)"
RATES = {  # the best of quality.py's on 800 steps (of what ran at one rate its next relative's), and for longer runs
    DENSE: (4e-3, 2e-3),
    "naive top-k 0.4": (4e-3, 2e-3),
    "naive top-k 0.2": (4e-3, 2e-3),
    "RadiusAdamW 0.5": (4e-3, 2e-3),
    "RadiusAdamW 0.4": (4e-3, 2e-3),
    "RadiusAdamW 0.4, interval 100": (4e-3, 2e-3),
    "RadiusAdamW 0.4, residual scale 0.3": (4e-3, 2e-3),
    "RadiusAdamW 0.4, residual scale 0.1": (4e-3, 2e-3),
    "SeparateAdam tracked 16, int8": (4e-3, 2e-3),
    "SeparateAdam 16": (4e-3, 2e-3),
    "SeparateAdam 16, blocks": (4e-3, 2e-3),
    "SeparateAdam 16, orthonormal": (2e-3, 2e-3),
    "PowerSGD rank 4": (4e-3, 2e-3),
    "TagcAdamW 0.9875": (4e-3, 2e-3),
    "AdamS": (1e-3, 1e-3),
    "ScapeAdamS 0.1": (1e-3, 1e-3),
    "ScapeAdamS 0.1, no mask delay": (1e-3, 1e-3),
    "ScapeAdamS 0.1, ramp over half, from scratch": (1e-3, 1e-3),
    "ScapeAdamS 0.01": (1e-3, 1e-3),
}
STEPS = (800, 2000, 4000, 8000)
PARTS = {"at_eighth": 8, "at_quarter": 4, "at_half": 2, "at_end": 1}  # of a run: its steps over this
MEASURED = ("loss", "gap", *PARTS, "to_best")


def losses(line: dict) -> dict[int, float]:
    return {e["step"]: e["val_loss"] for e in line["evals"]}


def rows(ranks: int, width: int) -> list[dict]:
    """A row for each run of a method that is compared, beside AdamW's of that length and seed."""
    there, found = quality.in_float32(width), []
    order = list(RATES)
    runs = [run for run in there if run.name in RATES and run.steps in STEPS and run.ranks == ranks]
    for run in sorted(runs, key=lambda run: (run.seed, order.index(run.name), run.steps, -run.lr)):
        dense = {lr: losses(line) for lr, line in of_rates(there, run._replace(name=DENSE)).items()}
        if not dense:
            continue
        mine, best = losses(there[run]), min(dense.values(), key=lambda its: its[run.steps])
        its = dense.get(run.lr, best)
        row = {"run": run.name, "lr": run.lr, "steps": run.steps, "seed": run.seed, "loss": mine[run.steps]}
        row["gap"], row["to_best"] = mine[run.steps] - its[run.steps], mine[run.steps] / best[run.steps]
        ratios = {n: loss / its[n] for n, loss in mine.items()}  # every 100 steps
        row |= {key: ratios.get(run.steps // part) for key, part in PARTS.items()}
        found.append(row | {"curve": ratios})
    return found


def of_rates(there: dict[Run, dict], like: Run) -> dict[float, dict]:
    """Runs that differ from this one in their learning rate, by that."""
    return {run.lr: line for run, line in there.items() if run._replace(lr=0) == like._replace(lr=0)}


def show(found: list[dict]) -> None:
    print(
        f"\n{'run':<48}{'lr':>7}{'steps':>7}{'seed':>5}{'loss':>8}{'gap':>8}"
        + "".join(f"{key:>12}" for key in (*PARTS, "to_best"))
    )
    for r in found:
        ratios = "".join(f"{r[key]:>12.3f}" if r[key] else f"{'-':>12}" for key in (*PARTS, "to_best"))
        print(f"{r['run']:<48}{r['lr']:>7g}{r['steps']:>7}{r['seed']:>5}{r['loss']:>8.3f}{r['gap']:>+8.3f}{ratios}")


def save(found: list[dict]) -> None:
    with (RESULTS / "length.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "lr", "steps", "seed", *MEASURED], extrasaction="ignore")
        writer.writeheader()
        for r in found:
            writer.writerow(r | {key: r[key] and round(r[key], 4) for key in MEASURED})


def plot(found: list[dict]) -> None:
    """Left the longest run of each method, step by step; right the ends of its runs over their lengths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    for number, name in enumerate(n for n in RATES if n != DENSE):
        of_length: dict[int, dict] = {}  # its best rate's
        for r in found:
            if r["run"] == name and r["seed"] == 0:
                best = of_length.setdefault(r["steps"], r)
                of_length[r["steps"]] = min(best, r, key=lambda r: r["loss"])
        mine = [of_length[steps] for steps in sorted(of_length)]
        longest = bool(mine) and mine[-1]["steps"] == max(r["steps"] for r in found)
        if len(mine) < 2 and not longest:
            continue
        style = dict(color=plt.get_cmap("tab20")(2 * number % 20 + 2 * number // 20), linewidth=1.4)
        if longest:
            left.plot(*zip(*mine[-1]["curve"].items(), strict=True), **style)
        right.plot([r["steps"] for r in mine], [r["to_best"] for r in mine], "o-", label=name, **style)
    for axis in (left, right):
        axis.axhline(1, color="0.3", linestyle=":", linewidth=1)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    left.set(xlabel=f"step of a run of {max(r['steps'] for r in found)}", ylabel="validation loss over AdamW's")
    lengths = sorted({r["steps"] for r in found})
    right.set(xlabel="steps of the whole run", xscale="log", title="at the end, each at its best rate")
    right.set_xticks(lengths, lengths)
    right.minorticks_off()
    left.set_title("at the same step, each at its best rate")
    left.set_ylim(top=1.4)  # orthonormal projections begin at 1.7
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(RESULTS / "length.png", dpi=130)
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--only",
        nargs="+",
        metavar="METHOD",
        choices=RATES,
        default=list(RATES),
        help="train these methods and no others; a wrong name lists them",
    )
    cli.add_argument("--steps", type=int, nargs="+", choices=STEPS, default=[800, 8000])
    cli.add_argument("--ranks", type=int, default=2)
    cli.add_argument("--width", type=int, default=128, help="of the model: 128 is 0.86 M parameters, 512 is 13 M")
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    for steps, name in () if args.show else product(args.steps, args.only):
        lr = RATES[name][steps > 800]
        if (run := Run(name, lr, steps, args.ranks, args.seed, args.width)) not in quality.kept():
            quality.train(run)
    found = rows(args.ranks, args.width)
    if not found:
        cli.error(f"there is no run of {DENSE!r} to compare with yet")
    show(found)
    save(found)
    plot(found)


if __name__ == "__main__":
    main()
