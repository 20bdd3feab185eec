"""Predictions of the advice for whole runs of the demo's length, beside runs of that length.

    .venv/bin/python bench/predicted_runs.py              # 400 steps of four runs on two ranks, over the loopback

The demo's GPT (examples/train_gpt.py). In one pair of processes: compopt.probe's measurement, then blocks of steps in
turns, without communication (DDP's no_sync), under DDP with AdamW, with SeparateAdam and with LocalSteps, both at their
defaults. A run's seconds are compared as a ratio to steps without communication of the same blocks, since other work
slows the machine for all of them alike; and twice, by the clock and in processor time, probe and steps alike. On a busy
machine the clock also counts how long a rank that is waited for waits for a core. Bytes are those that the optimizers
count. A prediction knows the probe's file, the step without communication and the length of the run. Prints a table,
and saves results/predicted_runs.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "examples"))

import corpus  # noqa: E402
import train_gpt  # noqa: E402

import compopt  # noqa: E402
from compopt.costmodel import Workload, advise  # noqa: E402
from compopt.planning.network_probe import measure_network  # noqa: E402

RANKS, STEPS, BLOCK, PARAMETERS = 2, 400, 20, 861_312
ALONE, DENSE = "without communication", "AdamW+DDP"
OPTIMIZERS = {
    ALONE: lambda ps: torch.optim.AdamW(ps, 2e-3, fused=True),
    DENSE: lambda ps: torch.optim.AdamW(ps, 2e-3, fused=True),
    "SeparateAdam": lambda ps: compopt.SeparateAdam(ps, 2e-3),
    "LocalSteps": lambda ps: compopt.LocalSteps(torch.optim.AdamW(ps, 2e-3, fused=True)),
}


CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}


class Run:
    """One training, its seconds by step and the bytes that its optimizer has handed to collectives."""

    def __init__(self, name: str, rank: int):
        torch.manual_seed(0)
        model = train_gpt.GPT(layers=4, width=128, heads=4, context=64)
        self.name, self.nbytes = name, 0
        self.seconds: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
        self.model = DistributedDataParallel(model)
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.batches = corpus.batches(corpus.load(None)[0], 8, 64, seed=1 + rank)
        self.dense_bytes = 4 * PARAMETERS if name == DENSE else 0

    def step(self, is_last: bool) -> None:
        begin = {clock: read() for clock, read in CLOCKS.items()}
        with self.model.no_sync() if self.name == ALONE else contextlib.nullcontext():
            self.model(*next(self.batches)).backward()
        self.optimizer.step()
        if is_last and hasattr(self.optimizer, "end_round"):
            self.optimizer.end_round()
        self.optimizer.zero_grad()
        for clock, read in CLOCKS.items():
            self.seconds[clock].append(read() - begin[clock])
        stats = getattr(self.optimizer, "stats", None)
        self.nbytes += stats.bytes_sent if stats else self.dense_bytes


def probe_by(clock: str) -> dict:
    """compopt.probe's measurement, by one of the clocks."""
    with mock.patch("compopt.planning.measurement.time.perf_counter", CLOCKS[clock]):
        return measure_network()


def train(steps: int, out: str) -> None:
    """One rank: the probe, then all runs in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    probed = {clock: probe_by(clock) for clock in CLOCKS}
    runs = [Run(name, dist.get_rank()) for name in OPTIMIZERS]
    for number, block in enumerate(range(0, steps, BLOCK)):
        for run in runs[number % len(runs) :] + runs[: number % len(runs)]:
            dist.barrier()
            for step in range(block, min(block + BLOCK, steps)):
                run.step(step == steps - 1)
    if dist.get_rank() == 0:
        result = {run.name: {"seconds": run.seconds, "bytes": run.nbytes} for run in runs}
        Path(out).write_text(json.dumps({"probed": probed, "runs": result}))
    dist.destroy_process_group()


def measure(steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "out.json"))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*launcher, __file__, "--worker", out, "--steps", str(steps)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        return json.loads(Path(out).read_text())


def relative_seconds(seconds: list[float], single: list[float]) -> float:
    """Steps of a run without communication that take as long as this run: the blocks' ratios, added up."""
    total = 0.0
    for block in range(0, len(seconds), BLOCK):
        total += sum(seconds[block : block + BLOCK]) / statistics.median(single[block : block + BLOCK])
    return total


def compare(measured: dict, steps: int) -> list[dict]:
    work = Workload.of(train_gpt.GPT(layers=4, width=128, heads=4, context=64).named_parameters())
    names = ("link_bits_per_s", "latency_s", "local", "interference")
    rows = []
    for clock, probed in measured["probed"].items():
        runs = {name: run["seconds"][clock] for name, run in measured["runs"].items()}
        results = {name: tuple(v) if isinstance(v := probed[name], list) else v for name in names}
        step_s = statistics.median(runs[ALONE])
        advice = advise(work, ranks=RANKS, step_s=step_s, device="cpu", steps=steps, **results)
        for row in advice.rows:
            if row.method in runs:
                ratio = relative_seconds(runs[row.method], runs[ALONE]) / relative_seconds(runs[ALONE], runs[ALONE])
                rows.append(
                    {
                        "method": row.method,
                        "by": clock,
                        "predicted_bytes": round(row.run_bytes * steps * 4 * work.parameters),
                        "measured_bytes": measured["runs"][row.method]["bytes"],
                        "predicted_ratio": round(row.run_s / (steps * step_s), 4),
                        "measured_ratio": round(ratio, 4),
                        "step_ms": round(1e3 * step_s, 1),
                    }
                )
    return rows


def show(rows: list[dict]) -> None:
    heads = f"{'method':<14}{'bytes, predicted':>18}{'measured':>13}{'off':>8}   "
    print(f"{heads}{'seconds by':<12}{'predicted':>10}{'measured':>10}{'off':>8}")
    for row in rows:
        nbytes, ratio = (row[f"predicted_{of}"] / row[f"measured_{of}"] - 1 for of in ("bytes", "ratio"))
        sizes = f"{row['predicted_bytes']:>18,}{row['measured_bytes']:>13,}{nbytes:>+8.1%}   "
        times = f"{row['predicted_ratio']:>10.3f}{row['measured_ratio']:>10.3f}{ratio:>+8.1%}"
        print(f"{row['method']:<14}{sizes}{row['by']:<12}{times}")
    steps = " and ".join(f"{ms} ms" for ms in dict.fromkeys(row["step_ms"] for row in rows))
    print(f"Seconds: in times {ALONE}, whose step took {steps}.")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=STEPS)
    cli.add_argument("--worker", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.worker:
        train(args.steps, args.worker)
        return
    rows = compare(measure(args.steps), args.steps)
    show(rows)
    with (RESULTS / "predicted_runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
