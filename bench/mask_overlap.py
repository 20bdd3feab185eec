"""How much two masks in a row have in common, layer by layer (SCAPE, Figure 6), on the real-text GPT.

    python bench/mask_overlap.py                  # one process, a minute
    python bench/mask_overlap.py --density 0.01 --steps 1000

Prints the overlap of every compressed matrix at five moments of the run, and saves results/mask_overlap.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
EVERY = 10  # steps between two measurements
sys.path.insert(0, str(ROOT / "examples"))

import corpus  # noqa: E402
import train_gpt  # noqa: E402

import compopt  # noqa: E402


def measure(options: argparse.Namespace) -> list[dict]:
    """Train, and record every matrix's overlap: {"step", "layer", "overlap"}."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = train_gpt.GPT(layers=4, width=128, heads=4, context=64)
    optimizer = compopt.ScapeAdamS(
        model.named_parameters(),
        lr=1e-3,
        betas=(0.9, 0.95),
        density=options.density,
        warmup_steps=options.warmup,
        density_warmup_steps=0,
        mask_delay=options.mask_delay,
        simulate=True,
    )
    data = corpus.batches(corpus.load()[0], batch=8, context=64, seed=1)
    rows = []
    for step in range(1, options.steps + 1):
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            for layer, (shared, size) in optimizer.mask_overlaps().items():
                rows.append({"step": step, "layer": layer, "overlap": shared / size})
            print(f"\rstep {step}, loss {float(loss):.2f}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return rows


def show(rows: list[dict]) -> None:
    steps = sorted({row["step"] for row in rows})
    moments = [steps[round(share * (len(steps) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]
    value = {(row["layer"], row["step"]): row["overlap"] for row in rows}
    print(f"{'layer':<28}" + "".join(f"{step:>8}" for step in moments))
    for layer in dict.fromkeys(row["layer"] for row in rows):
        print(f"{layer:<28}" + "".join(f"{value.get((layer, step), float('nan')):>8.2f}" for step in moments))
    print(
        f"{'mean':<28}"
        + "".join(f"{statistics.mean(v for (_, s), v in value.items() if s == m):>8.2f}" for m in moments)
    )


def save(rows: list[dict]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / "mask_overlap.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["step", "layer", "overlap"])
        writer.writeheader()
        writer.writerows(rows)
    print(f"Saved {RESULTS / 'mask_overlap.csv'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=50, help="dense steps at the start")
    parser.add_argument("--mask-delay", type=int, default=1, choices=(0, 1))
    options = parser.parse_args()
    rows = measure(options)
    show(rows)
    save(rows)


if __name__ == "__main__":
    main()
