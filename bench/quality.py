"""Loss on real text after the same number of steps: what compression costs in quality, and what it saves in bytes.

    python bench/quality.py radius              # one table: CSV, PNG, and the text printed
    python bench/quality.py radius --show       # from the runs that are there, train nothing
    python bench/quality.py scape --only NAME   # one run of a table

Each run is examples/train_gpt.py on two processes, real sockets between them. Runs are kept in runs/quality.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
KEPT, RESULTS = ROOT / "runs" / "quality", Path(__file__).parent / "results"

# A table: steps, options common to its runs, and its runs. The first is what the others are compared with.
TABLES = {
    "radius": (
        1500,
        "--lr 1e-3 --warmup-share 0.15",
        {
            "AdamW (DDP)": "--optimizer adamw",
            "RadiusAdamW 0.9": "--optimizer radius --density 0.9 --interval 20",
            "RadiusAdamW 0.5": "--optimizer radius --density 0.5 --interval 20",
            "RadiusAdamW 0.4": "--optimizer radius --density 0.4 --interval 20",
            "RadiusAdamW 0.4, interval 100": "--optimizer radius --density 0.4 --interval 100",
            "naive top-k 0.4": "--optimizer topk --density 0.4",
        },
    ),
}


def train(table: str, name: str, steps: int, options: str) -> None:
    """Train one run unless it is there already."""
    out = path_of(table, name)
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "examples/train_gpt.py"), "--steps", str(steps), *options.split()]
    print(f"{table}: {name}", flush=True)
    subprocess.run([*command, "--out", str(out)], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=900)


def path_of(table: str, name: str) -> Path:
    return KEPT / table / ("".join(c if c.isalnum() or c == "." else "_" for c in name) + ".json")


def rows(results: dict[str, dict]) -> list[dict]:
    """One row a run: loss, and bytes of a compressed step and of the whole run, beside the first run's."""
    first = next(iter(results.values()))
    dense = first["bytes_per_step"]["dense"]
    return [
        {
            "run": name,
            "validation_loss": round(r["evals"][-1]["val_loss"], 4),
            "to_first": round(r["evals"][-1]["val_loss"] / first["evals"][-1]["val_loss"], 4),
            "bytes_a_step": round(r["bytes_per_step"]["compressed"] or dense),
            "share_of_dense": round((r["bytes_per_step"]["compressed"] or dense) / dense, 4),
            "bytes_in_all": r["evals"][-1]["bytes"],
            "lr": r["config"]["lr"],
            "steps": r["config"]["steps"],
        }
        for name, r in results.items()
    ]


def show(table: str, results: dict[str, dict]) -> None:
    """Print the table, write CSV and PNG."""
    found = rows(results)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"quality-{table}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    print(f"{'run':<42}{'loss':>8}{'to first':>10}{'bytes a step':>14}{'share':>8}")
    for row in found:
        print(
            f"{row['run']:<42}{row['validation_loss']:>8.3f}{row['to_first']:>10.3f}"
            f"{row['bytes_a_step']:>14,}{row['share_of_dense']:>8.3f}"
        )
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, (key, unit) in zip(panels, [("step", 1), ("bytes", 1e9)], strict=True):
        for name, result in results.items():
            evals = result["evals"][1:]
            axis.plot([row[key] / unit for row in evals], [row["val_loss"] for row in evals], label=name, linewidth=1.5)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set(xlabel="step", ylabel="validation loss (nats a byte)")
    panels[1].set(xlabel="gigabytes handed to collectives by each rank", xscale="log")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"quality-{table}.png", dpi=130)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("table", choices=TABLES)
    cli.add_argument("--only", help="train this run of the table and nothing else")
    cli.add_argument("--show", action="store_true", help="train nothing")
    args = cli.parse_args()
    steps, common, runs = TABLES[args.table]
    for name, options in runs.items():
        if not args.show and args.only in (None, name):
            train(args.table, name, steps, f"{common} {options}")
    there = {name: path_of(args.table, name) for name in runs if path_of(args.table, name).exists()}
    if there:
        show(args.table, {name: json.loads(path.read_text()) for name, path in there.items()})


if __name__ == "__main__":
    main()
