"""Loss against bytes, and against seconds on a slow link: AdamW, AdamS, ScapeAdamS and PowerSGD on real text.

    python bench/scape_quality.py                       # all runs, one after the other
    python bench/scape_quality.py --only adamw scape-0.1
    python bench/scape_quality.py --only                # none: the table and the plot of what is there

Every run is examples/train_gpt.py on two processes of one thread, 800 steps, with its rising and falling learning rate.
A method is tried at every learning rate of its small grid and shown at its best. Seconds are measured on loopback, plus
the bytes over the link, 100 Mbit/s, as if nothing overlapped. Saves results/scape_quality.csv, .png and a JSON a run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
RANKS, STEPS, LINK = 2, 800, 100e6  # LINK in bits a second
DENSE = 120  # steps, 15 %


def scape(lrs: tuple[float, ...] = (1e-3, 2e-3), **options: object) -> dict:
    return {"class": "ScapeAdamS", "lrs": lrs, "options": {"density": 0.1, "density_warmup_steps": 0} | options}


METHODS = {
    "adamw": {"hook": "adamw", "lrs": (1e-3, 2e-3)},
    "adams": {"class": "AdamS", "lrs": (5e-4, 1e-3, 2e-3), "options": {}},
    "powersgd": {"hook": "powersgd", "lrs": (1e-3, 2e-3)},
    "scape-0.1, as printed": scape(clip="scape"),
    "scape-0.1, no delay": scape(mask_delay=0),
    "scape-0.1, dense start": scape(warmup_steps=DENSE),
    "scape-0.1, dense start, no delay": scape(warmup_steps=DENSE, mask_delay=0),
    "scape-0.1, dense start, ramp": scape(warmup_steps=DENSE // 2, density_warmup_steps=DENSE),
    "scape-0.01, dense start": scape(warmup_steps=DENSE, density=0.01),
    "scape-0.01, dense start, no delay": scape(warmup_steps=DENSE, density=0.01, mask_delay=0),
}


def work(name: str, lr: float, out: str) -> None:
    """One rank: train_gpt.py's main, with the method's optimizer."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    import compopt

    method = METHODS[name]
    if "class" in method:
        make = getattr(compopt, method["class"])
        weight_decay = 1e-2  # AdamW's default, for all
        train_gpt.OPTIMIZERS[name] = lambda p, a: make(p, a.lr, weight_decay=weight_decay, **method["options"])
    optimizer = method.get("hook", name)
    sys.argv = ["train_gpt.py", "--optimizer", optimizer, "--lr", str(lr), "--steps", str(STEPS), "--out", out]
    train_gpt.main()


def result_file(name: str, lr: float) -> Path:
    return RESULTS / f"scape_quality-{name.replace(', ', '-').replace(' ', '_')}-{lr:g}.json"


def run(name: str, lr: float) -> None:
    out = result_file(name, lr)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    own = [__file__, "--worker", name, str(lr), str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*launcher, *own], env=env, check=True, timeout=900)


def curve(result: dict) -> list[dict]:
    """The evaluations, with the seconds that the bytes take on the link added."""
    wire = 2 * (RANKS - 1) / RANKS * 8 / LINK
    return [e | {"link_seconds": e["seconds"] + wire * e["bytes"]} for e in result["evals"]]


def best() -> list[dict]:
    """For each method that has run, the run of lowest final validation loss."""
    rows = []
    for name, method in METHODS.items():
        runs = [
            (lr, json.loads(result_file(name, lr).read_text()))
            for lr in method["lrs"]
            if result_file(name, lr).exists()
        ]
        if runs:
            lr, result = min(runs, key=lambda pair: pair[1]["evals"][-1]["val_loss"])
            end = curve(result)[-1]
            sizes = result["bytes_per_step"]
            rows.append(
                {
                    "method": name,
                    "lr": lr,
                    "lrs_tried": " ".join(f"{lr:g}" for lr, _ in runs),
                    "val_loss": end["val_loss"],
                    "bytes_per_parameter_all_steps": end["bytes"] / STEPS / result["parameters"],
                    "bytes_per_parameter_compressed_step": (sizes["compressed"] or sizes["dense"])
                    / result["parameters"],
                    "seconds_loopback": end["seconds"],
                    "seconds_100mbit": end["link_seconds"],
                    "curve": curve(result),
                }
            )
    return rows


def show(rows: list[dict]) -> None:
    print(
        f"{'method':<34}{'lr':>8}{'val loss':>10}{'B/param, run':>14}{'B/param, step':>15}{'s':>7}{'s, 100 Mbit/s':>15}"
    )
    for r in rows:
        print(
            f"{r['method']:<34}{r['lr']:>8g}{r['val_loss']:>10.3f}{r['bytes_per_parameter_all_steps']:>14.3f}"
            f"{r['bytes_per_parameter_compressed_step']:>15.3f}{r['seconds_loopback']:>7.0f}{r['seconds_100mbit']:>15.0f}"
        )


def save(rows: list[dict]) -> None:
    with open(RESULTS / "scape_quality.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[key for key in rows[0] if key != "curve"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for panel, key, label in zip(
        panels, ("bytes", "link_seconds"), ("bytes a rank has sent", "seconds at 100 Mbit/s"), strict=True
    ):
        for number, row in enumerate(rows):
            style = "-" if row["method"].startswith("scape") else "--"
            x, y = ([e[k] for e in row["curve"]] for k in (key, "val_loss"))
            panel.plot(x, y, style, color=f"C{number}", label=f"{row['method']} (lr {row['lr']:g})", linewidth=1.3)
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss")
    panels[1].legend(fontsize=7, frameon=False)
    figure.savefig(RESULTS / "scape_quality.png", dpi=130)
    print(f"Saved {RESULTS / 'scape_quality.csv'} and .png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS), help="methods to run")
    parser.add_argument("--lr", type=float, help="only this learning rate of the grid")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, lr, out = options.worker
        work(name, float(lr), out)
        return
    RESULTS.mkdir(exist_ok=True)
    for name in options.only:
        for lr in METHODS[name]["lrs"]:
            if options.lr in (None, lr):
                run(name, lr)
    rows = best()
    if rows:
        show(rows)
        save(rows)


if __name__ == "__main__":
    main()
