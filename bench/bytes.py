"""Bytes that a rank hands over in one compressed step, at the sizes people train, beside a dense float32 gradient.

    python bench/bytes.py                      # GPT-2's four small shapes up to 355 M: 2 minutes, 8 GB
    python bench/bytes.py --sizes 124M

Nothing crosses a network: two ranks run in lockstep in the tests' simulator, on the same parameters to save memory,
and select, encode and count as always, masks included. Saves results/bytes.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import compopt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sim import World

RESULTS = Path(__file__).parent / "results"
SIZES = {"10M": (8, 320, 256, 64), "124M": (12, 768, 50257, 1024), "355M": (24, 1024, 50257, 1024)}
METHODS = {  # class and options
    "ScapeAdamS 0.1": (compopt.ScapeAdamS, dict(density=0.1, density_warmup_steps=0)),
    "ScapeAdamS 0.01": (compopt.ScapeAdamS, dict(density=0.01, density_warmup_steps=0)),
    "ScapeAdamS 0.01, bf16": (
        compopt.ScapeAdamS,
        dict(density=0.01, density_warmup_steps=0, payload_dtype=torch.bfloat16),
    ),
    "SeparateAdam 16": (compopt.SeparateAdam, dict(ratio=16)),
    "RadiusAdamW 0.4": (compopt.RadiusAdamW, dict(density=0.4, warmup_steps=0)),
}
STEPS = 4  # of zeros; dense where there is no mask yet; two more


def gpt(layers: int, width: int, vocabulary: int, context: int) -> Iterator[torch.nn.Parameter]:
    """Parameters of GPT-2's shapes (weights tied), with gradients."""
    shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
        shapes += [(width, 4 * width), (width,)] + 4 * [(width,)]
    for shape in [*shapes, (width,), (width,)]:
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.zeros(shape)
        yield p


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    cli.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = cli.parse_args()
    rows = []
    for size in args.sizes:
        for name in args.methods:
            torch.manual_seed(0)
            params = list(gpt(*SIZES[size]))
            world = World(2)
            make, options = METHODS[name]
            optimizers = [make(params, process_group=comm, **options) for comm in world.comms]
            for step in range(STEPS):
                world.step(optimizers)
                for p in params if step == 0 else ():  # not before: the first step refuses equal gradients on all ranks
                    p.grad.normal_()
            dense, sent = 4 * sum(p.numel() for p in params), optimizers[0].stats.bytes_sent
            rows.append(
                {"parameters": dense // 4, "method": name, "bytes": sent, "times_fewer": round(dense / sent, 1)}
            )
            print(f"{size:>5}  {name:<24}{sent:>14,} bytes  {dense / sent:>7.1f} x fewer", flush=True)
            del params, optimizers, world
    if set(args.sizes) == set(SIZES) and set(args.methods) == set(METHODS):
        with (RESULTS / "bytes.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
