"""Which loss does a method reach after 20 tokens per parameter, as models grow, every row at its tuned rate?

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
Tables of losses: the mean over seeds and its range, the loss of an averaged end (the mean of the last tenth), ratios to
DDP + AdamW's, DDP + Muon's and DDP + NorMuon's last loss of the same size on as many ranks, bytes of the whole run in
percent of DDP's, the settings, and the numbers of settings and seeds that ran.

``seconds`` multiplies step times (_ladder_seconds.py; kept in results/time_to_loss-ladder.jsonl) with the steps of each
row's best run on seed 0. "Compute" is a step of the same optimizer without communication, while all ranks take one:
where ranks share a core, as four do on two cores, it takes longer than on machines of their own, and the network's part
is smaller. "s to loss" is until DDP + AdamW's last loss. Saves results/time_to_loss-SIZE.csv, and readme.png.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

import _ladder_seconds
import torch
from _ladder_ranks import SIZES
from _ladder_runs import (
    BASELINES,
    KEPT,
    MAIN,
    MOMENTA,
    OUTER_LRS,
    ROWS,
    Lines,
    Run,
    best_of,
    claimed,
    kept,
    list_missing,
    loss_of,
    start_of,
    train,
)
from _net import bits_per_second
from _table import RESULTS, color, drawing, make_parser, print_rows, write_rows


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
    cli = make_parser(__doc__, "--rows", ROWS, list(MAIN))
    cli.add_argument("what", choices=["tune", "run", "seconds"], nargs="?")
    cli.add_argument("--size", choices=SIZES, default="0.2M")
    cli.add_argument("--outer", action="store_true", help="tune the outer rate and momentum too")
    cli.add_argument("--lr", type=float)
    cli.add_argument("--outer-lr", type=float)
    cli.add_argument("--momentum", type=float, help="of the outer optimizer")
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--ranks", type=int, nargs="+", help="default: 4; to show, all that there are")
    cli.add_argument("--tokens", type=float, default=20, help="per parameter")
    cli.add_argument("--products", choices=["bfloat16", "float32"], help="default: what is faster here")
    cli.add_argument("--device", default="cpu")
    cli.add_argument("--data", help="a text to train on (default: the source of Python's standard library)")
    cli.add_argument("--minutes", type=float, default=math.inf, help="end after these, with a checkpoint")
    cli.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"], help="of `seconds`, as in tc")
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
    if KEPT.parent == RESULTS:
        show_in_8_bits(**others)
    if outer:
        show_outer(outer)
        write_rows(KEPT.with_name("ladder-outer.csv"), outer)


def show_in_8_bits(**others: Any) -> None:
    """Print the runs with residuals or gathers in int8, beside a SeparateAdam of the same code."""
    runs = kept() | kept(RESULTS / "residual_dtype.jsonl")
    print("\nResiduals and gathers in int8 (residual_dtype.jsonl)")
    show(
        [line for line in tabulate(runs, ranks=4, **others) if "SeparateAdam" in line["row"] or "FSDP2" in line["row"]]
    )


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
    draw_readme(RESULTS / "readme.png")


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


# Tables: every row at its best settings, size by size, for each number of ranks

NAMES = dict(zip(BASELINES, ("to_adamw", "to_muon", "to_normuon"), strict=True))


def tabulate(runs: Lines, **others: Any) -> list[dict[str, Any]]:
    """A line for each size and row that has finished runs on so many ranks, in the order of sizes and rows.

    Settings are the best of seed 0. A loss is the mean over the seeds that have run with these, a ratio the mean of
    the ratios to the baseline's run of the same seed on as many ranks, where there is one. Ranges are from the lowest
    to the highest seed.
    """
    table = []
    for size in SIZES:
        firsts = {name: _seeds(runs, size, name, others) for name in BASELINES}
        for row in list_rows(runs):
            if seeds := _seeds(runs, size, row, others):
                table.append(_line(runs, size, row, seeds, firsts, others))
    return table


def list_rows(runs: Lines) -> list[str]:
    """The names of rows, in order; last those of runs whose code is gone."""
    return list(dict.fromkeys([*ROWS, *(run.row for run in runs)]))


def _seeds(runs: Lines, size: str, row: str, others: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By seed, the runs with the best settings of seed 0."""
    best = best_of(runs, Run(row, size, 0.0, **others))
    if best is None or loss_of(runs[best]) == float("inf"):
        return {}
    return {run.seed: line for run, line in runs.items() if run._replace(seed=0) == best}


def _line(runs: Lines, size: str, row: str, seeds: dict, firsts: dict, others: dict[str, Any]) -> dict[str, Any]:
    losses, first = {seed: loss_of(line) for seed, line in seeds.items()}, seeds[0]
    averaged = {seed: line.get("averaged_loss") for seed, line in seeds.items()}
    averaged = averaged if all(averaged.values()) else {}
    tuned = {name: first[name] for name in ("lr", "outer_lr", "momentum")}
    start = Run(row, size, 0.0, **others)
    ratios: dict[str, float | None] = {}
    for baseline, name in NAMES.items():
        common = sorted(losses.keys() & firsts[baseline].keys())
        for key, of_row in (name, losses), (f"averaged_{name}", averaged):
            values = [of_row[seed] / loss_of(firsts[baseline][seed]) for seed in common if of_row]
            ratios[key] = round(statistics.mean(values), 4) if values else None
            ratios[f"{key}_range"] = _range(values)
    return {
        "size": size,
        "row": row,
        "parameters": first["parameters"],
        "tokens_per_parameter": first["tokens"],
        "steps": first["steps"],
        "ranks": first["ranks"],
        "batch": f"{SIZES[size].batch} x {SIZES[size].context}",  # of a rank
        "loss": round(statistics.mean(losses.values()), 4),
        "averaged_loss": round(statistics.mean(averaged.values()), 4) if averaged else None,
        **ratios,
        "bytes_percent": round(100 * first["share"], 3),
        **tuned,
        "tried": sum(run._replace(**{name: getattr(start, name) for name in tuned}) == start for run in runs),
        "lr_at_an_edge": any(run.lr != first["lr"] for run in list_missing(runs, start, False)),
        "seeds": len(losses),
        "range": _range(losses.values()),
        "seconds": first["seconds"],
        "products": first["products"],
    }


def _range(values: Collection[float]) -> float | None:
    return round(max(values) - min(values), 4) if len(values) > 1 else None


def tabulate_outer(runs: Lines, **others: Any) -> list[dict[str, Any]]:
    """A line for each outer setting of each row that has been tried on the seed, at the best of its learning rates."""
    table = []
    for size, row in itertools.product(SIZES, list_rows(runs)):
        start = Run(row, size, 0.0, **others)
        best = best_of(runs, start)
        if best is None or best.momentum is None:
            continue
        for momentum, outer_lr in itertools.product(MOMENTA, OUTER_LRS):
            like = start._replace(momentum=momentum, outer_lr=outer_lr)
            rates = [run for run in runs if run._replace(lr=like.lr) == like]
            if not rates:
                continue
            run = min(rates, key=lambda run: loss_of(runs[run]))
            table.append(
                {
                    "size": size,
                    "row": row,
                    "ranks": run.ranks,
                    "momentum": momentum,
                    "outer_lr": outer_lr,
                    "lr": run.lr,
                    "rates": len(rates),
                    "loss": runs[run]["val_loss"],
                    "to_best": round(loss_of(runs[run]) / loss_of(runs[best]), 4),
                }
            )
    return table


HEADS = {"to_adamw": "x AdamW", "to_muon": "x Muon", "to_normuon": "x NorMuon"}
COLUMNS = {
    "loss": ("loss", "9.4f"),
    "range": ("range", "9.4f"),
    "averaged_loss": ("averaged", "9.4f"),
    **{f"{name}{what}": (head, "9.4f") for name in NAMES.values()
       for what, head in (("", HEADS[name]), ("_range", "range"))},
    "bytes_percent": ("bytes, %", "9.2f"),
    "rate": ("lr", ">9"),
    "outer_lr": ("outer lr", "9g"),
    "momentum": ("momentum", "9g"),
    "tried": ("runs", "5d"),
    "seeds": ("seeds", "5d"),
}  # fmt: skip
OUTER = {
    "size": ("size", ">7"),
    "ranks": ("ranks", "5d"),
    "momentum": ("momentum", "9g"),
    "outer_lr": ("outer lr", "9g"),
}
OUTER |= {"loss": ("loss", "9.4f"), "to_best": ("x best", "8.4f"), "lr": ("lr", "8g"), "rates": ("rates", "5d")}


def show(table: list[dict[str, Any]]) -> None:
    """Print a table for each size and number of ranks."""
    about = "{size}: {parameters:,} parameters, {tokens_per_parameter:g} tokens per parameter, {ranks} ranks, "
    about += "{steps} steps of {batch}, products in {products}"
    for size, ranks in dict.fromkeys((line["size"], line["ranks"]) for line in table):
        lines = [line for line in table if (line["size"], line["ranks"]) == (size, ranks)]
        print("\n" + about.format(**lines[0]))
        rates = [{"rate": f"{line['lr']:g}" + "*" * line["lr_at_an_edge"]} for line in lines]
        print_rows([line | rate for line, rate in zip(lines, rates, strict=True)], COLUMNS, "row", 52)
    print("\n*: a rate beside this one has not run: it is not tuned")


def show_outer(table: list[dict[str, Any]]) -> None:
    """Print what outer settings ended at, each at the best of the learning rates it was tried with."""
    print("\nOuter settings, one seed; rates: learning rates tried with these")
    print_rows(table, OUTER, "row", 52)


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Loss over DDP + AdamW's and over DDP + Muon's, by size, of the ranks and batch of most lines: a line a method."""
    ((ranks, batch), _) = Counter((line["ranks"], line["batch"]) for line in table).most_common(1)[0]
    lines = [line for line in table if (line["ranks"], line["batch"]) == (ranks, batch)]
    ticks, labels = sorted({line["parameters"] / 1e6 for line in lines}), {}
    with drawing(path, 3, (18, 5)) as (figure, panels):
        for axis, (baseline, name) in zip(panels, NAMES.items(), strict=True):
            labels |= _draw_panel(axis, lines, baseline, name)
            axis.set(xlabel="million parameters", ylabel=f"validation loss / {baseline}'s", title=f"{ranks} ranks")
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
            axis.minorticks_off()
        texts = [f"{row}, {_share_of([line for line in lines if line['row'] == row])} % of the bytes" for row in labels]
        figure.legend(labels.values(), texts, loc="outside right upper", frameon=False, fontsize=8)


def _share_of(lines: list[dict[str, Any]]) -> str:
    shares = [line["bytes_percent"] for line in lines]
    return " to ".join(dict.fromkeys(f"{float(f'{share:.2g}'):g}" for share in (min(shares), max(shares))))


def _draw_panel(axis: Any, lines: list[dict[str, Any]], baseline: str, name: str) -> dict[str, Any]:
    """Draw the methods over one baseline. Returns a line of the plot for each."""
    labels = {}
    for number, row in enumerate(MAIN):
        points = [line for line in lines if line["row"] == row and line[name]]
        if row != baseline and points:
            (labels[row],) = axis.plot(
                [line["parameters"] / 1e6 for line in points],
                [line[name] for line in points],
                marker="o",
                color=color(number),
            )
    axis.axhline(1, color="black", linewidth=0.8)
    return labels


# The picture of README.md: loss over seconds at 100 Mbit/s, and over the bytes of a whole run

README_ROWS = {  # row: its label, and the label's offset in the right panel
    "DDP + AdamW": ("DDP + AdamW", (-75, -14)),
    "DDP + Muon": ("DDP + Muon", (-62, 6)),
    "PowerSGD 4": ("PowerSGD 4", (7, 2)),
    "SeparateAdam": ("SeparateAdam", (7, 4)),
    "LocalSteps(Muon) 30, int4, 800": ("LocalSteps(Muon)", (7, -12)),  # the defaults
}


def readme_lines() -> list[dict[str, Any]]:
    """The lines of four ranks at the largest size at which all of README_ROWS are timed."""
    runs, timings = kept(), _ladder_seconds.kept()
    for size, products in product(reversed(SIZES), ("bfloat16", "float32")):
        others = {"ranks": 4, "tokens": 20, "products": products}
        seconds = _ladder_seconds.tabulate(runs, timings, size, **others)
        lines = {line["row"]: line for line in seconds if line["rate"] == _ladder_seconds.RATE}
        if README_ROWS.keys() <= lines.keys():
            table = [line for line in tabulate(runs, **others) if line["size"] == size]
            return [line | {"evals": lines[line["row"]]["evals"]} for line in table if line["row"] in lines]
    raise LookupError(f"at no size have all of {', '.join(README_ROWS)} run and been timed")


def _draw_readme_panels(left: Any, right: Any, lines: list[dict[str, Any]]) -> None:
    """Draw loss over seconds, and the last loss, the mean over seeds, over the bytes of the run."""
    first = lines[0]
    for line in lines:
        if line["row"] not in README_ROWS:
            continue
        (label, offset), color = README_ROWS[line["row"]], _ladder_seconds.color_of(line["row"])
        points = [[point[key] for point in line["evals"]] for key in ("seconds", "val_loss")]
        left.plot(*points, color=color, label=label, linewidth=2)
        left.plot(points[0][-1], points[1][-1], "o", color=color)
        at = (line["bytes_percent"], line["to_adamw"])
        right.plot(*at, "o", color=color)
        right.annotate(label, at, offset, textcoords="offset points", fontsize=9, color=color)
    about = "{ranks} ranks, {:.2g} M parameters, {tokens_per_parameter:g} tokens per parameter"
    left.set(title=about.format(first["parameters"] / 1e6, **first), xlim=(0, None))
    left.set(ylim=(None, first["evals"][1]["val_loss"]))  # all fall alike before
    right.axhline(1, color="0.25", linestyle=":", linewidth=1)
    right.margins(x=0.2, y=0.15)


def draw_readme(path: Path) -> None:
    lines = readme_lines()
    with drawing(path, 2, (11, 4.4), dpi=110) as (_, (left, right)):
        right.set(title="The end of each run", xscale="log", xlabel="bytes of the whole run, % of DDP's in float32")
        right.set_ylabel("final loss / DDP + AdamW's")
        _draw_readme_panels(left, right, lines)
        left.set(xlabel="seconds over a link of 100 Mbit/s", ylabel="validation loss")
        left.legend(frameon=False, fontsize=9)
        right.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
        right.minorticks_off()


if __name__ == "__main__":
    main()
