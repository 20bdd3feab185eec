"""Bytes that a rank hands over in one compressed step, at the sizes people train, beside a dense float32 gradient.

    python bench/bytes.py                      # GPT-2's shapes up to 355 M, one of 2 and one of 8 ranks: minutes, 6 GB
    python bench/bytes.py --sizes 124M --ranks 64

Nothing crosses a network: one rank runs on a fake process group (_fake_ranks.py), and selects, encodes and counts as always,
masks included. A rank sends its own part of a mask, so more ranks send less each. Saves results/bytes.csv.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import torch
from _fake_ranks import fake_ranks

import compopt

RESULTS = Path(__file__).parent / "results"
SIZES = {"10M": (8, 320, 256, 64), "124M": (12, 768, 50257, 1024), "355M": (24, 1024, 50257, 1024)}
METHODS = {  # class and options
    "ScapeAdamS 0.1": (compopt.ScapeAdamS, dict(density=0.1, density_warmup_steps=0)),
    "ScapeAdamS 0.01": (compopt.ScapeAdamS, dict(density=0.01, density_warmup_steps=0)),
    "ScapeAdamS 0.01, bf16": (
        compopt.ScapeAdamS,
        dict(density=0.01, density_warmup_steps=0, payload_dtype=torch.bfloat16),
    ),
    "SeparateAdam 16": (compopt.SeparateAdam, dict(projection="gaussian", ratio=16)),
    "RadiusAdamW 0.4": (compopt.RadiusAdamW, dict(density=0.4, warmup_steps=0)),
}
RANKS = (2, 8)
STEPS = 3  # of zeros; dense where there is no mask yet; one more


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


def measure(size: str, method: str, ranks: int) -> tuple[int, int]:
    """Bytes of the dense gradient, and of what one of so many ranks hands over in a compressed step."""
    torch.manual_seed(0)
    params = list(gpt(*SIZES[size]))
    make, options = METHODS[method]
    with fake_ranks(ranks) as comm:
        optimizer = make(params, process_group=comm, **options)
        comm.follow(optimizer)
        for _ in range(STEPS):
            optimizer.step()
            for p in params:
                p.grad.normal_()
    return 4 * sum(p.numel() for p in params), optimizer.stats.bytes_sent


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    cli.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        default=list(METHODS),
        help="methods; a wrong name lists them",
    )
    cli.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    args = cli.parse_args()
    rows = []
    for size in args.sizes:
        for name in args.methods:
            for ranks in args.ranks:
                dense, sent = measure(size, name, ranks)
                fewer = round(dense / sent, 1)
                rows.append({"parameters": dense // 4, "method": name, "ranks": ranks, "bytes": sent, "fewer": fewer})
                print(f"{size:>5}  {name:<24}{ranks:>4} ranks{sent:>14,} bytes  {fewer:>7.1f} x fewer", flush=True)
    if (set(args.sizes), set(args.methods), set(args.ranks)) == (set(SIZES), set(METHODS), set(RANKS)):
        with (RESULTS / "bytes.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
