"""The scaling ladder: loss after 20 tokens per parameter at several sizes of a model, every row at its tuned rate.

    python bench/ladder.py tune --size 0.2M                        # learning rates, row by row
    python bench/ladder.py tune --size 0.2M --outer                # and the outer rate and momentum of local steps
    python bench/ladder.py run --size 0.4M --rows "DDP + AdamW" --lr 4e-3 --seed 1
    python bench/ladder.py tune --rows "DDP + AdamW" "LocalSteps(Muon) 30" --ranks 2 8
    python bench/ladder.py --show                                  # train nothing: tables, ladder*.csv, ladder.png
    sudo .venv/bin/python bench/ladder.py seconds --size 0.2M      # step times of the rows over shaped links: an hour
    python bench/ladder.py seconds --show                          # time nothing: seconds to DDP + AdamW's last loss

The ranks, four or ``--ranks``, are of one process (_ladder_ranks.py) and train a GPT on Python source, 8 x 64 bytes a
rank and step. Finished runs are lines of results/ladder.jsonl. An unfinished one goes on from its checkpoint in
runs/ladder. Processes side by side share the work: a run belongs to the one that holds its lock. Sizes of 3M, 35M and
124M are for ``--device cuda``, in batches of 32 x 256 bytes, with a text of their own (``--data``); only 3M has run.
Ratios are to DDP of the same size on as many ranks: those have the same steps.

``seconds`` multiplies step times (_ladder_seconds.py; kept in results/time_to_loss-ladder.jsonl) with the steps of each
row's best run on seed 0. "Compute" is a step of the same optimizer without communication, while all ranks take one:
where ranks share a core, as four do on two cores, it takes longer than on machines of their own, and the network's part
is smaller. Losses of local steps within the run are those of one replica. Saves results/time_to_loss-SIZE.csv and .png,
and readme.png, the picture of README.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import time
from typing import Any

import _ladder_seconds
import torch
from _ladder_model import SIZES
from _ladder_rows import MAIN, ROWS
from _ladder_runs import KEPT, best_of, claimed, kept, list_missing, start_of, train
from _ladder_tables import draw, show, show_outer, tabulate, tabulate_outer
from _net import bits_per_second
from _table import RESULTS, write_rows


def tune(args: argparse.Namespace, others: dict[str, Any], until: float) -> None:
    """A run of each row in turn, until no row's best has an untried neighbour that is nobody else's."""
    rows = list(args.rows)
    while rows:
        for row in list(rows):
            for run in list_missing(kept(), start_of(row, args.size, kept(), **others), args.outer):
                with claimed(run) as is_mine:
                    if is_mine and not train(run, args.device, args.data, until):
                        return
                if is_mine:
                    break
            else:
                rows.remove(row)


def run_all(args: argparse.Namespace, others: dict[str, Any], until: float) -> None:
    """The rows named, at the settings given, else at their best of this size or the next smaller."""
    for row in args.rows:
        start = start_of(row, args.size, kept(), **others | {"seed": 0})
        start = best_of(kept(), start) or start
        given = {"lr": args.lr, "outer_lr": args.outer_lr, "momentum": args.momentum}
        if start.momentum is None:
            given = {"lr": args.lr}
        run = start._replace(**{name: value for name, value in given.items() if value is not None})
        run = run._replace(seed=others["seed"])
        with claimed(run) as is_mine:
            if is_mine and not train(run, args.device, args.data, until):
                return


def choose_products(device: str) -> str:
    """The dtype of matrix products that is faster on the device."""
    is_fast = device != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if is_fast else "float32"


def parse() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=["tune", "run", "seconds"], nargs="?")
    cli.add_argument("--size", choices=SIZES, default="0.2M")
    cli.add_argument("--rows", nargs="+", choices=ROWS, default=list(MAIN), metavar="ROW", help=", ".join(ROWS))
    cli.add_argument("--outer", action="store_true", help="tune the outer rate and momentum too")
    cli.add_argument("--lr", type=float)
    cli.add_argument("--outer-lr", type=float)
    cli.add_argument("--momentum", type=float, help="of the outer optimizer")
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--ranks", type=int, nargs="+", help="default: 4; to show, all that there are")
    cli.add_argument("--tokens", type=float, default=20, help="per parameter")
    cli.add_argument("--products", choices=["bfloat16", "float32"], default=None, help="default: what is faster here")
    cli.add_argument("--device", default="cpu")
    cli.add_argument("--data", help="a text to train on (default: the source of Python's standard library)")
    cli.add_argument("--minutes", type=float, default=math.inf, help="end after these, with a checkpoint")
    cli.add_argument(
        "--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"], help="of `seconds`, as tc writes them"
    )
    cli.add_argument("--blocks", type=int, default=3, help="of timed steps, for each row")
    cli.add_argument("--steps", type=int, default=14, help="timed steps of a block; a round has one more")
    cli.add_argument("--show", action="store_true", help="train and time nothing")
    return cli.parse_args()


def show_all(counts: list[int] | None, others: dict[str, Any]) -> None:
    """Show and save the tables and the plot of these numbers of ranks, by default of all."""
    runs = kept()
    counts = counts or sorted({run.ranks for run in runs})
    table = [line for ranks in counts for line in tabulate(runs, ranks=ranks, **others)]
    outer = [line for ranks in counts for line in tabulate_outer(runs, ranks=ranks, **others)]
    if not table:
        print("no run of this kind has finished")
        return
    show(table)
    write_rows(KEPT.with_suffix(".csv"), table)
    draw(table, KEPT.with_suffix(".png"))
    if outer:
        show_outer(outer)
        write_rows(KEPT.with_name("ladder-outer.csv"), outer)


def show_seconds(args: argparse.Namespace, products: str) -> None:
    """Time what is asked for, then show and save the tables and pictures of all rates."""
    ranks = (args.ranks or [4])[0]
    for rate in args.rates:
        bits_per_second(rate)
    for rate in () if args.show else args.rates:
        print(f"{time.strftime('%H:%M:%S')} {args.size}, {ranks} ranks, {rate}, {products}", flush=True)
        rows = [row for row in args.rows if row in _ladder_seconds.TIMED]
        _ladder_seconds.measure(rows, args.size, ranks, rate, products, args.blocks, args.steps)
    others = {"ranks": ranks, "tokens": args.tokens, "products": products}
    lines = _ladder_seconds.tabulate(kept(), _ladder_seconds.kept(), args.size, **others)
    if not lines:
        raise SystemExit(f"No rate has DDP + AdamW of {args.size} timed, or no such run has finished.")
    _ladder_seconds.show(lines)
    _ladder_seconds.save(lines, RESULTS / f"time_to_loss-{args.size}.csv")
    _ladder_seconds.draw(lines, RESULTS / f"time_to_loss-{args.size}.png")
    _ladder_seconds.draw_readme(RESULTS / "readme.png")


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    is_shown = args.show or not args.what  # what is kept has products in bfloat16
    products = args.products or ("bfloat16" if is_shown else choose_products(args.device))
    others = {"seed": args.seed, "tokens": args.tokens, "products": products}
    if args.what == "seconds":
        show_seconds(args, products)
        return
    if is_shown:
        show_all(args.ranks, others | {"seed": 0})
        return
    until = time.time() + 60 * args.minutes
    for ranks in args.ranks or [4]:
        {"tune": tune, "run": run_all}[args.what](args, others | {"ranks": ranks}, until)


if __name__ == "__main__":
    main()
