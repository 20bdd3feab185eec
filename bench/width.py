"""Does the gap to AdamW close as models get wider? Every method's loss over AdamW's, in a narrow model and a wide one.

    python bench/width.py                                         # what is missing: some hours
    python bench/width.py --only "RadiusAdamW 0.4" --widths 512
    python bench/width.py --show                                  # train nothing

Runs are bench/quality.py's, of 1,500 steps on two ranks, matrix products in bfloat16, and kept with its own. 15 % of
each is dense. AdamW and AdamS are tried at several rates on 400 steps, then run at the best of them, at half and at a
quarter of it, since longer runs want less; what is built on them runs at the best of the three. ``to_best`` is over
AdamW's best run, ``to_base`` over that of its own base, AdamW or AdamS. Prints a table and saves results/width.csv and
width.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Sequence

import quality
from quality import RESULTS, Run

DENSE, MOMENTUM_ONLY = "AdamW (DDP)", "AdamS"
SHORT, STEPS = 400, 1500
TRIED = {
    128: {DENSE: (1e-3, 2e-3, 4e-3, 8e-3), MOMENTUM_ONLY: (5e-4, 1e-3, 2e-3)},
    512: {DENSE: (5e-4, 1e-3, 2e-3, 4e-3), MOMENTUM_ONLY: (1.25e-4, 2.5e-4, 5e-4, 1e-3)},
}
METHODS = (
    DENSE,
    "SeparateAdam tracked 16, int8",
    "RadiusAdamW 0.4",
    "TagcAdamW 0.9875",
    "ScapeAdamS 0.1",
    "SeparateAdam 16",
    "PowerSGD rank 4",
    "naive top-k 0.4",
    MOMENTUM_ONLY,
    "ScapeAdamS 0.01",
    "RadiusAdamW 0.5",
    "RadiusAdamW 0.4, interval 100",
    "ScapeAdamS 0.1, no mask delay",
    "SeparateAdam 16, orthonormal",
    "SeparateAdam 16, blocks",
    "RadiusAdamW 0.4, residual scale 0.3",
    "RadiusAdamW 0.4, residual scale 0.1",
)
FIELDS = ("run", "width", "parameters", "lr", "loss", "to_best", "to_base", "gigabytes")


def base(name: str) -> str:
    return MOMENTUM_ONLY if "AdamS" in name else DENSE


def at(width: int, name: str, lr: float, steps: int = STEPS) -> Run:
    return Run(name, lr, steps, width=width, bf16=True)


def end(run: Run) -> float:
    return quality.kept()[run]["evals"][-1]["val_loss"]


def best(runs: Iterable[Run]) -> Run | None:
    """The best of those that have run."""
    there = quality.kept()
    return min((run for run in runs if run in there), key=end, default=None)


def rates(width: int, name: str) -> tuple[float, ...]:
    """Of whole runs: of a base three, by its short runs; of what is built on it the best one."""
    root = base(name)
    short = best(at(width, root, lr, SHORT) for lr in TRIED[width][root])
    if short is None:
        return ()
    three = short.lr, short.lr / 2, short.lr / 4
    found = None if name == root else best(at(width, root, lr) for lr in three)
    return three if found is None else (found.lr,)


def wanted(width: int, names: Sequence[str]) -> Iterator[Run]:
    """In the order in which they are needed."""
    for name, tried in TRIED[width].items():
        yield from (at(width, name, lr, SHORT) for lr in tried)
        yield from (at(width, name, lr) for lr in rates(width, name))
    for name in names:
        yield from (at(width, name, lr) for lr in rates(width, name))


def rows(width: int) -> list[dict]:
    """A row for each method that has run."""
    there, found = quality.kept(), []
    found_of = {name: run for name in METHODS if (run := best(at(width, name, lr) for lr in rates(width, name)))}
    for name, run in found_of.items() if DENSE in found_of else ():
        line, loss = there[run], end(run)
        row = {"run": name, "width": width, "parameters": line["parameters"], "lr": run.lr, "loss": loss}
        row["to_best"], row["to_base"] = loss / end(found_of[DENSE]), None
        if base(name) in found_of:
            row["to_base"] = loss / end(found_of[base(name)])
        found.append(row | {"gigabytes": line["evals"][-1]["bytes"] / 1e9})
    return found


def show(found: list[dict]) -> None:
    print(f"\n{'run':<40}{'width':>6}{'lr':>10}{'loss':>8}{'to best':>9}{'to base':>9}{'GB':>8}")
    for r in found:
        same = f"{r['to_base']:>9.3f}" if r["to_base"] else f"{'-':>9}"
        print(
            f"{r['run']:<40}{r['width']:>6}{r['lr']:>10g}{r['loss']:>8.3f}{r['to_best']:>9.3f}{same}{r['gigabytes']:>8.2f}"
        )


def save(found: list[dict]) -> None:
    digits = {"to_best": 4, "to_base": 4, "gigabytes": 3}
    with (RESULTS / "width.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for r in found:
            writer.writerow(r | {key: r[key] and round(r[key], n) for key, n in digits.items()})


def plot(found: list[dict]) -> None:
    """A line a method, from the narrow model to the wide one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in METHODS if name != DENSE and any(r["run"] == name for r in found)]
    figure, axis = plt.subplots(figsize=(9, 0.36 * len(names) + 1.6), layout="constrained")
    for place, name in enumerate(reversed(names)):
        mine = {r["width"]: r["to_best"] for r in found if r["run"] == name}
        axis.plot(list(mine.values()), [place] * len(mine), color="0.75", linewidth=2, zorder=1)
        for width, colour in ((128, "#0072b2"), (512, "#d55e00")):
            if width in mine:
                axis.scatter(mine[width], place, color=colour, s=40, zorder=2)
    sizes = {r["width"]: r["parameters"] / 1e6 for r in found}
    for width, colour in ((128, "#0072b2"), (512, "#d55e00")):
        if width in sizes:
            axis.scatter([], [], color=colour, s=40, label=f"width {width}, {sizes[width]:.2g} M parameters")
    axis.axvline(1, color="0.3", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(names)), reversed(names))
    axis.set(xlabel=f"validation loss over AdamW's, after {STEPS:,} steps", ylim=(-0.6, len(names) - 0.4))
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(RESULTS / "width.png", dpi=130)
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--only",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        default=METHODS,
        help="train these methods and no others; a wrong name lists them",
    )
    cli.add_argument("--widths", type=int, nargs="+", choices=TRIED, default=[*TRIED])
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    for width in () if args.show else args.widths:
        for run in wanted(width, args.only):
            if run not in quality.kept():
                quality.train(run)
    found = [row for width in TRIED for row in rows(width)]
    if not found:
        cli.error(f"there is no run of {DENSE!r} to compare with yet")
    show(found)
    save(found)
    plot(found)


if __name__ == "__main__":
    main()
