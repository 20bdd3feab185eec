"""Seconds of the ladder's runs over links: measured step times x the steps of each kind, in their order.

All rows are timed on real ranks in one set of processes, in turns. A block of a row of local steps is one whole round,
its exchange included; a row with a dense start is timed from there on. Beside them each rank steps AdamW and Muon by
itself: what a step computes. Losses are those of results/ladder.jsonl. bench/ladder.py's command "seconds" calls this.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _ladder_ranks import SIZES
from _ladder_runs import BASELINES, DENSE, MAIN, ROWS, Lines, Local, best_of
from _net import bits_per_second
from _table import RESULTS, print_rows, write_rows
from links import Runner, interleave, over_links, warn_if_busy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compopt.local_steps.rounds import round_length

KEPT = RESULTS / "time_to_loss-ladder.jsonl"
RATE = "100mbit"  # of the picture of README.md
NOT_TIMED = ("DeMo 8", "SparseLoCo 15")  # _rivals.py exchanges tensor by tensor, which a real implementation would not
TIMED = [row for row in MAIN if row not in NOT_TIMED] + ["LocalSteps(NorMuon) 30, outer momentum 0.8"]
SETTLE = 3  # untimed steps before the first block: DDP has made its buckets, ranks have verified each other
LEARNING_RATE = 1e-3
ALONE = ", no communication"  # after the baseline whose optimizer steps
POWERSGD = "PowerSGD 4"  # timed as torch's hook, which sends the factors of all matrices at once


class Timing(NamedTuple):
    """The key of a measurement."""

    row: str
    size: str
    ranks: int
    rate: str
    products: str


Timings = Mapping[Timing, dict[str, Any]]


def kept() -> dict[Timing, dict[str, Any]]:
    """All measurements there are; of two of the same name, the later."""
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return {Timing(*(line[name] for name in Timing._fields)): line for line in lines}


def base_of(row: str) -> str:
    """The baseline whose optimizer the row has, or has inside."""
    return BASELINES[("Muon" in row) + ("NorMuon" in row)]


def list_kinds(row: str, steps: int) -> list[str]:
    """The kind of each step: "dense", "compressed", "local", or "exchanged": local, and an exchange after it."""
    if row in BASELINES:
        return ["dense"] * steps
    make, kinds = ROWS[row].make, []
    if not isinstance(make, Local):
        return (["dense"] * DENSE + ["compressed"] * steps)[:steps]
    while len(kinds) < steps:
        length = round_length({"every": make.every, "growth_steps": make.growth_of(steps)}, len(kinds))
        kinds += ["local"] * (min(length, steps - len(kinds)) - 1) + ["exchanged"]  # the last round ends with the run
    return kinds


def compose(line: dict[str, Any], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """The evaluations of a run, each with the seconds that the steps up to it take."""
    clock = [*accumulate(seconds[kind] for kind in list_kinds(line["row"], line["steps"]))]
    return [{**point, "seconds": clock[point["step"] - 1]} for point in line["evals"]]


def seconds_to(level: float, evals: list[dict[str, Any]]) -> float | None:
    """The seconds at which the validation loss first is at `level`, evaluations joined by lines; None: it never is."""
    for before, now in zip([None, *evals], evals, strict=False):
        if now["val_loss"] <= level:
            if before is None:
                return now["seconds"]
            share = (before["val_loss"] - level) / (before["val_loss"] - now["val_loss"])
            return before["seconds"] + share * (now["seconds"] - before["seconds"])
    return None


def tabulate(runs: Lines, timings: Timings, size: str, **others: Any) -> list[dict[str, Any]]:
    """The lines of all rates, the slowest first."""
    rates = {timing.rate for timing in timings if timing.size == size}
    speed = {rate: bits_per_second(rate) if rate.endswith("bit") else math.inf for rate in rates}
    return [line for rate in sorted(rates, key=speed.__getitem__) for line in _at(rate, runs, timings, size, others)]


def _at(rate: str, runs: Lines, timings: Timings, size: str, others: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each row that has run and was timed, the best of its runs on seed 0; none without DDP + AdamW."""
    table: list[dict[str, Any]] = []
    for row in TIMED:
        run = best_of(runs, ROWS[row].start(size, **others))
        timing = None if run is None else timings.get(Timing(row, size, run.ranks, rate, run.products))
        if run is not None and timing is not None and runs[run]["val_loss"] is not None:
            table.append(_line(runs[run], timing))
    if not table or table[0]["row"] != BASELINES[0]:
        return []
    level, last = table[0]["loss"], table[0]["run_seconds"]
    for line in table:
        line["seconds_to_adamw"] = seconds_to(level, line["evals"])
        line["to_adamw"] = None if line["seconds_to_adamw"] is None else line["seconds_to_adamw"] / last
    return table


def _line(line: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    evals = compose(line, timing["seconds"])
    step = evals[-1]["seconds"] / line["steps"]
    return {
        "size": line["size"],
        "rate": timing["rate"],
        "row": line["row"],
        "parameters": line["parameters"],
        "tokens_per_parameter": line["tokens"],
        "ranks": line["ranks"],
        "steps": line["steps"],
        **{name: line[name] for name in ("lr", "outer_lr", "momentum")},
        "bytes_percent": 100 * line["share"],
        "loss": line["val_loss"],
        "step_ms": 1e3 * step,
        "compute_ms": 1e3 * timing["compute"],
        "compute_percent": 100 * timing["compute"] / step,
        "network_percent": 100 * (1 - timing["compute"] / step),
        "run_seconds": evals[-1]["seconds"],
        "evals": evals,
    }


# The table and the pictures

COLUMNS = {
    "bytes_percent": ("bytes, %", "8.2f"),
    "loss": ("loss", "8.3f"),
    "step_ms": ("step ms", "9.1f"),
    "compute_percent": ("compute %", "10.0f"),
    "network_percent": ("network %", "10.0f"),
    "run_seconds": ("s in all", "10.1f"),
    "seconds_to_adamw": ("s to loss", "10.1f"),
    "to_adamw": ("x DDP + AdamW", "14.3f"),
}
DIGITS = {"bytes_percent": 3, "step_ms": 2, "compute_ms": 2, "compute_percent": 1, "network_percent": 1}
DIGITS |= {"run_seconds": 1, "seconds_to_adamw": 1, "to_adamw": 4}


def show(table: list[dict[str, Any]]) -> None:
    """Print a table per rate. s to loss: until the row is at DDP + AdamW's last loss."""
    about = "{size}: {parameters:,} parameters, {tokens_per_parameter:g} tokens per parameter, {ranks} ranks, {rate}"
    for rate in dict.fromkeys(line["rate"] for line in table):
        lines = [line for line in table if line["rate"] == rate]
        print("\n" + about.format(**lines[0]))
        print_rows(lines, COLUMNS, "row", 32)
        for line in lines:
            if line["seconds_to_adamw"] is None:
                lowest = min(point["val_loss"] for point in line["evals"])
                print(f"{line['row']} never reaches {lines[0]['loss']:.3f}: its lowest loss is {lowest:.3f}.")
        if missing := [row for row in TIMED if row not in {line["row"] for line in lines}]:
            print(f"No finished run, or not timed: {', '.join(missing)}.")


def save(table: list[dict[str, Any]], path: Path) -> None:
    """Write the lines of all rates as CSV; where a loss is never reached its seconds are empty."""
    write_rows(path, table, [name for name in table[0] if name != "evals"], DIGITS)


COLORS = {  # how names begin
    "DDP + AdamW": "0.25",
    "DDP + Muon": "tab:purple",
    "DDP + NorMuon": "tab:pink",
    "LocalSteps(NorMuon)": "tab:red",
    "Separate(NorMuon)": "tab:brown",
    "LocalSteps(Muon)": "tab:green",
    "LocalSteps(AdamW)": "tab:olive",
    "Separate(Muon)": "tab:cyan",
    "SeparateAdam": "tab:blue",
    "PowerSGD": "tab:orange",
}


def color_of(row: str) -> str:
    return next(color for begins, color in COLORS.items() if row.startswith(begins))


# Step times


class InBfloat16(nn.Module):
    """A model whose matrix products are in bfloat16."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x, y)


def make_runner(job: str, size: str, products: str, steps: int, batch: Any) -> Runner:
    """A row on this rank, settled. Local steps have rounds as long as a block and the step that opens it."""
    row = job.removesuffix(ALONE)
    model = SIZES[size].make(0)
    params, make = dict(model.named_parameters()), ROWS[row].make
    module = InBfloat16(model) if products == "bfloat16" else model
    if job == row:  # torch's hook needs one bucket: with more, ranks pair wrong messages over gloo
        module = DistributedDataParallel(module, bucket_cap_mb=4096 if row == POWERSGD else None)
    if isinstance(make, Local):
        make = replace(make, every=steps + 1, growth=0)
    run, stats = ROWS[row].start(size)._replace(lr=LEARNING_RATE), None
    if row == POWERSGD:
        import baselines

        make = ROWS[BASELINES[0]].make
        stats = baselines.attach("powersgd", module, argparse.Namespace(dense_steps=DENSE))
    runner = Runner(job, module, make(run, 0, params, None), batch, stats)
    for _ in range(steps + 1 if isinstance(make, Local) else SETTLE):
        runner.step()
    return runner


def work(jobs: list[str], size: str, products: str, blocks: int, steps: int) -> None:
    """One rank: a runner a job, and their blocks in turn."""
    import corpus

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, _ = corpus.load()
    batches = corpus.batches(text, SIZES[size].batch, SIZES[size].context, seed=1 + dist.get_rank())
    runners = [make_runner(job, size, products, steps, functools.partial(next, batches)) for job in jobs]
    interleave(runners, blocks, steps)
    del runners  # before the group: DDP frees it with the GIL held, and hangs (docs/troubleshooting.md)
    dist.destroy_process_group()


def seconds_of_kinds(results: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """Of each kind of step: the median over blocks of the mean over the block's steps of all ranks."""
    blocks: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        phases = result["phases"] or ["dense"] * len(result["seconds"])
        for n, (second, phase) in enumerate(zip(result["seconds"], phases, strict=True)):
            kind = phase if phase in ("dense", "local", "exchanged") else "compressed"
            blocks[kind][n // steps].append(second)
    return {kind: statistics.median(map(statistics.mean, of.values())) for kind, of in blocks.items()}


def job_of(row: str) -> str:
    """Rows of local steps that differ only in the length of rounds are timed once, as the first of them."""
    make = ROWS[row].make
    if not isinstance(make, Local):
        return row
    alike = [name for name, other in ROWS.items() if isinstance(other.make, Local) and is_timed_alike(other.make, make)]
    return alike[0]


def is_timed_alike(a: Local, b: Local) -> bool:
    return a.inner is b.inner and a.payload_dtype == b.payload_dtype


def burst_of(rate: str) -> int | None:
    """Bytes let through ahead of the rate: a millisecond's, or 8 KiB. More would hide the exchange of a small model."""
    return None if rate == "unshaped" else max(8 * 1024, int(bits_per_second(rate) / 8 * 1e-3))


def measure(rows: Sequence[str], size: str, ranks: int, rate: str, products: str, blocks: int, steps: int) -> None:
    """Time the rows at this rate, and keep a line of each."""
    jobs = [base + ALONE for base in BASELINES] + list(dict.fromkeys(map(job_of, rows)))
    given = {"jobs": jobs, "size": size, "products": products, "blocks": blocks, "steps": steps}
    label, gathered = over_links([sys.executable, __file__, json.dumps(given)], ranks, rate, burst_of(rate))
    found = {results[0]["method"]: results for results in gathered}
    compute = {base: seconds_of_kinds(found[base + ALONE], steps)["dense"] for base in BASELINES}
    with KEPT.open("a") as file:
        for row in rows:
            results = found[job_of(row)]
            seconds = seconds_of_kinds(results, steps)
            if missing := set(list_kinds(row, 10 * DENSE)) - set(seconds):
                raise SystemExit(f"No timed step of {row!r} was {' or '.join(missing)}: ask for more --steps.")
            line = Timing(row, size, ranks, label, products)._asdict() | {
                "seconds": {kind: round(second, 6) for kind, second in seconds.items()},
                "compute": round(compute[base_of(row)], 6),
                "socket_bytes": results[0]["bytes"] and round(results[0]["bytes"]),  # of a timed step, rank 0's
                "blocks": blocks,
                "steps": steps,
            }
            file.write(json.dumps(line) + "\n")
    share = statistics.mean(result["cpu_share"] for result in gathered[0])
    warn_if_busy(share / min(1, (os.cpu_count() or 1) / ranks))
    if label != rate:
        raise SystemExit(f"The links were not shaped: kept as {label!r}.")


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
