"""Loss on real text after the same number of steps: what compression costs in quality, and what it saves in bytes.

    python bench/quality.py radius                      # train what is missing of one table, then show it
    python bench/quality.py scape --only "AdamS" --lr 2e-3
    python bench/quality.py separate --show             # train nothing: the table of what is there

Each run is examples/train_gpt.py on two processes of one thread, real sockets between them. Runs are kept, a line each,
in results/quality.jsonl, whatever table they belong to; a table is saved as CSV beside it. Where
bench/time_to_loss.py has timed a method at 100 Mbit/s, the table has its seconds there.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _clock import RATE, put_on
from _runs import DENSE, METHODS, TABLES, parts

ROOT, RESULTS = Path(__file__).parent.parent, Path(__file__).parent / "results"
KEPT = RESULTS / "quality.jsonl"


class Run(NamedTuple):
    """The key of a run."""

    name: str
    lr: float
    steps: int
    ranks: int = 2
    seed: int = 0
    width: int = 128  # of the model; 128: 0.86 M parameters, 512: 13 M
    bf16: bool = False  # matrix products in bfloat16


def work(run: Run, out: str) -> None:
    """One rank: train_gpt.py's main, with the optimizer of this run."""
    sys.path.insert(0, str(ROOT / "examples"))
    import baselines
    import train_gpt

    method, hook, setting = parts(run.name)
    given = {"steps": run.steps, "lr": run.lr, "warmup-share": DENSE, "seed": run.seed, "width": run.width, "out": out}
    words = [f"--{key}={value}" for key, value in given.items()] + [f"--bf16={int(run.bf16)}"]
    if hook == "powersgd":
        baselines.POWERSGD_RANK = int(setting)
    elif hook == "alone":
        from _rivals import handed_back

        baselines.HOOKS["alone"] = lambda ddp, args: ddp.register_comm_hook(None, handed_back)
    elif hook:
        words += ["--density", setting]
    if hook == "forgetful":
        from _rivals import forgetful

        baselines.HOOKS["forgetful"] = forgetful
    optimizer = hook or run.name
    train_gpt.OPTIMIZERS[optimizer] = lambda params, args: method(params, args.lr, args.warmup)
    sys.argv = ["train_gpt.py", "--optimizer", optimizer, *words]
    train_gpt.main()


def train(run: Run) -> None:
    """Train one run in processes of its own and keep its line."""
    print(f"{run.name}, lr {run.lr:g}, {run.steps} steps, {run.ranks} ranks, seed {run.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        worker = [str(ROOT / "bench/quality.py"), "--worker", json.dumps(run), out]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*launcher, *worker], env=env, check=True, timeout=900 + 4 * run.steps)
        result = json.loads(Path(out).read_text())
    line = {"run": run.name, "lr": run.lr, "steps": run.steps, "ranks": run.ranks, "seed": run.seed}
    line |= {"width": run.width} if run.width != 128 else {}
    line |= {"bf16": True} if run.bf16 else {}
    line |= {key: result[key] for key in ("parameters", "bytes_per_step", "phases")}
    line["evals"] = [{k: round(e[k], 4) for k in ("step", "bytes", "train_loss", "val_loss")} for e in result["evals"]]
    with KEPT.open("a") as file:
        file.write(json.dumps(line) + "\n")


def kept() -> dict[Run, dict]:
    """All runs there are; of two of the same name, the later."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    runs = [json.loads(line) for line in lines]
    others = Run._field_defaults  # said where they differ
    return {Run(r["run"], r["lr"], r["steps"], *(r.get(key, others[key]) for key in others)): r for r in runs}


def in_float32(width: int = 128) -> dict[Run, dict]:
    """Those of models of this width whose matrix products are in float32: others are not compared with them."""
    return {run: line for run, line in kept().items() if run.width == width and not run.bf16}


def best_of(table: str) -> list[dict]:
    """A row for each method of the table that has run: its best learning rate, beside the first row."""
    steps, there, rows = TABLES[table].steps, kept(), []
    for name, lrs in TABLES[table].rows.items():
        runs = [there[key] for lr in lrs if (key := Run(name, lr, steps)) in there]
        if runs:
            best = min(runs, key=lambda run: run["evals"][-1]["val_loss"])
            tried = " ".join(f"{run['lr']:g}" for run in runs)
            rows.append({**best, "tried": tried, "loss": best["evals"][-1]["val_loss"]})
    for row in rows:
        dense = row["bytes_per_step"]["dense"] or 4 * row["parameters"]
        sent = row["bytes_per_step"]["compressed"] or dense
        row |= {
            "bytes": round(sent),
            "share": sent / (4 * row["parameters"]),
            "to_first": row["loss"] / rows[0]["loss"],
        }
        row["bytes_in_all"] = row["evals"][-1]["bytes"]
    return rows


def show(table: str, rows: list[dict]) -> None:
    """Print the table and write it as CSV; seconds of the whole run where its phases were timed."""
    fields = ["run", "loss", "to_first", "bytes", "share", "bytes_in_all", "seconds", "lr", "tried", "steps"]
    for r in rows:
        r["seconds"] = round(r["evals"][-1]["seconds"], 1) if "seconds" in r["evals"][-1] else None
    with (RESULTS / f"quality-{table}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**r, "to_first": round(r["to_first"], 4), "share": round(r["share"], 4)} for r in rows)
    heads = f"{'lr':>7}{'loss':>8}{'to first':>10}{'share':>8}{'s at ' + RATE:>14}"
    print(f"\n{'run, ' + str(rows[0]['steps']) + ' steps':<44}{heads}")
    for r in rows:
        seconds = "-" if r["seconds"] is None else f"{r['seconds']:.0f}"
        print(f"{r['run']:<44}{r['lr']:>7g}{r['loss']:>8.3f}{r['to_first']:>10.3f}{r['share']:>8.4f}{seconds:>14}")


PANELS = {  # key of an evaluation: label, unit, scale
    "bytes": ("gigabytes handed to collectives by each rank", 1e9, "log"),
    "seconds": ("seconds at {rate}, composed of measured step times", 1, "linear"),
}


def draw(rows: list[dict], keys: Sequence[str], path: Path, rate: str) -> None:
    """Loss over what the keys name, a panel each; a run without seconds is left out where they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(keys), figsize=(5 * len(keys) + 2, 5), sharey=True, layout="constrained")
    for axis, key in zip(panels, keys, strict=True):
        label, unit, scale = PANELS[key]
        for number, row in enumerate(rows):
            points = [e for e in row["evals"] if key in e]
            style = dict(color=plt.get_cmap("tab20")(number % 20), linewidth=1.4, linestyle="-" if number < 20 else ":")
            name = f"{row['run']} (lr {row['lr']:g})" if axis is panels[0] else None
            axis.plot([e[key] / unit for e in points], [e["val_loss"] for e in points], label=name, **style)
        axis.set(xlabel=label.format(rate=rate), xscale=scale)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss (nats a byte)")
    panels[0].set_ylim(top=max(row["evals"][1]["val_loss"] for row in rows))  # all fall alike before
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("table", choices=TABLES, nargs="?")
    cli.add_argument(
        "--only",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        help="train these methods of the table and no others; a wrong name lists them",
    )
    cli.add_argument("--lr", type=float, nargs="+", help="only these learning rates of the table")
    cli.add_argument("--show", action="store_true", help="train nothing")
    cli.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.worker:
        run, out = args.worker
        return work(Run(*json.loads(run)), out)
    if args.table is None:
        cli.error(f"name a table: {', '.join(TABLES)}")
    RESULTS.mkdir(exist_ok=True)
    table = TABLES[args.table]
    for name, lrs in table.rows.items():
        for lr in lrs:
            wanted = not args.show and (not args.only or name in args.only) and (not args.lr or lr in args.lr)
            if wanted and (run := Run(name, lr, table.steps)) not in kept():
                train(run)
    if rows := best_of(args.table):
        put_on(rows, RATE)
        show(args.table, rows)


if __name__ == "__main__":
    main()
