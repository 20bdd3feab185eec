"""Does compressing activations help? The tables of MCBench (MLSys 2024) on this machine, on four gloo ranks.

    sudo .venv/bin/python bench/mcbench.py time                      # Table 6: where a step's time goes, by compressor
    .venv/bin/python bench/mcbench.py quality                        # Tables 2 and 3: accuracy at tensor 2 x pipeline 2
    .venv/bin/python bench/mcbench.py pretraining                    # Table 5: compressors dropped for fine-tuning

Rows are compressors by the paper's names. `time`: ms of a rank's step, in all and of its parts (forward and backward
hold encode, decode and communication), and MB sent, for each grid of tensor x pipeline ranks. `quality` and
`pretraining`: accuracy in percent by task, the mean over seeds and their range. Saves results/mcbench-*.csv. Without
root the links are not shaped.
An accuracy is a float32 run of hundreds of steps: another number of threads or other vector instructions round
otherwise, and end up to a few points elsewhere. So a run has one thread, and a figure three seeds and their range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _encoder import (
    BATCH,
    MICRO_BATCHES,
    SMALL,
    Trainer,
    compressors,
    digit_accuracy,
    encoder,
    later_accuracy,
    pretrained,
    text_accuracy,
)
from _net import Links, sent_bytes
from _table import RESULTS, make_parser, print_rows, read_rows, write_rows
from torch.distributed.device_mesh import init_device_mesh

from compopt.activations import Compressor, MeshRanks

RANKS = 4
GRIDS = ["1x4", "2x2", "4x1"]  # tensor- times pipeline-parallel
COLUMNS = ["forward", "backward", "optimizer", "waiting", "total", "encode", "decode", "communication"]
TIMED = {"inputs": 16, "outputs": 10, "tokens": 64, "width": 256, "layers": 8, "heads": 8}
MICRO_BATCH = 4
STEPS = {"time": 5, "quality": 300, "pretraining": 300}
TASKS = ["digits", "parity", "text, scratch"]


class Clock:
    """Seconds by name. Encoding, decoding and communication do not count what they call of one another."""

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, call: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                selected = time.perf_counter() - start
                inner = self._inner.pop()
                nested = name in ("encode", "decode", "communication")
                self.total[name] += selected - inner if nested else selected
                self._inner[-1] += selected if nested else 0.0

        return wrapper


def instrument(trainer: Trainer, clock: Clock) -> None:
    """Let the clock time what this trainer does from now on."""
    for module in trainer.part.modules():
        if isinstance(module, Compressor):
            module.compress = clock.timed("encode", module.compress)
            module.decompress = clock.timed("decode", module.decompress)
    stage = trainer.stage
    stage.forward_one_chunk = clock.timed("forward", stage.forward_one_chunk)
    stage.backward_one_chunk = clock.timed("backward", stage.backward_one_chunk)
    trainer.optimizer.step = clock.timed("optimizer", trainer.optimizer.step)


def mesh_of(grid: str):
    tensor, pipeline = map(int, grid.split("x"))
    return init_device_mesh("cpu", (pipeline, tensor), mesh_dim_names=("pp", "tp"))


def time_rank(grid: str, labels: list[str], steps: int) -> None:
    """One rank of the timing: every compressor in turn, the median step of each; rank 0 prints the means over ranks."""
    mesh, made = mesh_of(grid), compressors(MICRO_BATCH * TIMED["tokens"], TIMED["width"])
    clock = Clock()
    for name in ("sum", "gather"):
        setattr(MeshRanks, name, clock.timed("communication", getattr(MeshRanks, name)))
    torch.manual_seed(0)
    x = torch.randn(MICRO_BATCH * MICRO_BATCHES, TIMED["tokens"], TIMED["inputs"])
    y = torch.randint(TIMED["outputs"], (len(x),))
    trainers, selected = {}, defaultdict(list)
    for label in labels:
        torch.manual_seed(0)
        trainers[label] = Trainer(encoder(**TIMED), mesh, made[label], MICRO_BATCH, F.cross_entropy, 1e-4)
        trainers[label].step(x, y)  # torch's pipelining finds out shapes
        instrument(trainers[label], clock)
    for _ in range(steps):  # compressors take turns, so that all meet the same minute of the machine
        for label, trainer in trainers.items():
            dist.barrier()
            clock.total.clear()
            before, start = sent_bytes(), time.perf_counter()
            trainer.step(x, y)
            total = time.perf_counter() - start
            local = {name: clock.total[name] for name in COLUMNS}
            waiting = total - local["forward"] - local["backward"] - local["optimizer"]
            sent = 0 if before is None else sent_bytes() - before
            selected[label].append({**local, "total": total, "waiting": waiting, "sent": sent})
    rows = {}
    for label in labels:
        middle = sorted(selected[label], key=lambda row: row["total"])[steps // 2]
        everyone: list = [None] * RANKS
        dist.all_gather_object(everyone, middle)
        rows[label] = {name: statistics.mean(row[name] for row in everyone) for name in [*COLUMNS, "sent"]}
    if dist.get_rank() == 0:
        print(json.dumps(rows))


# Tables


def quality(label: str, seed: int, steps: int, start: torch.nn.Sequential, tasks: list[str]) -> dict[str, float]:
    """Accuracy of one compressor on the tasks: two fine-tuned from `start`, one trained from nothing."""
    digit = compressors(BATCH * 16, SMALL["width"])
    text = compressors(BATCH * 32, SMALL["width"])[label]
    runs = {
        "digits": lambda: digit_accuracy(digit[label], seed, steps, start),
        "parity": lambda: digit_accuracy(digit[label], seed, steps, start, parity=True),
        "text, scratch": lambda: text_accuracy(text, seed, steps),
    }
    return {task: runs[task]() for task in tasks}


def ask_ranks(options: argparse.Namespace, rate: str | None, *words: str) -> dict:
    """Run this file on four ranks; the rank that has results prints them as its last line."""
    command = [sys.executable, __file__, options.what, "--labels", *options.labels, *words]
    with Links(RANKS, rate) as links:
        outputs = links.run([*command, "--steps", str(options.steps), "--rank"], timeout=540)
    return json.loads(next(text.strip().splitlines()[-1] for text in outputs if text.strip()))


def keep(name: str, rows: list[dict]) -> None:
    """Write rows; the first three columns name one: a new run replaces its own and leaves the others."""
    write_rows(RESULTS / f"mcbench-{name}.csv", rows, keep=list(rows[0])[:3])


def accuracy_row(compressor: str, task: str, seed: int, steps: int, accuracy: float) -> dict:
    return {"compressor": compressor, "task": task, "seed": seed, "steps": steps, "accuracy": f"{accuracy:.2f}"}


def print_times(options: argparse.Namespace) -> None:
    for grid in options.grids:
        rows = [
            {"grid": grid, "compressor": label, "rate": options.rate}
            | {f"{name}_ms": 1e3 * row[name] for name in COLUMNS}
            | {"MB_sent": row["sent"] / 1e6}
            for label, row in ask_ranks(options, options.rate, "--grids", grid).items()
        ]
        print(f"\ntensor x pipeline {grid}, {options.rate}, ms a step (means over {RANKS} ranks)")
        numbers = list(rows[0])[3:]
        print_rows(rows, {name: (name.removesuffix("_ms"), "10.2f") for name in numbers}, "compressor", 16)
        keep("time", [row | {name: f"{row[name]:.3f}" for name in numbers} for row in rows])


def print_quality(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for seed in options.seeds:
        start = pretrained(seed)
        for label in options.labels:
            results = quality(label, seed, options.steps, start, options.tasks)
            keep("quality", [accuracy_row(label, task, seed, options.steps, x) for task, x in results.items()])
    print_accuracies("quality", options.steps)


def print_pretraining(options: argparse.Namespace) -> None:
    """Table 5: pre-trained through compressors of the last half of the layers, then fine-tuned without any."""
    torch.set_num_threads(1)
    made = compressors(BATCH * 16, SMALL["width"])
    for seed in options.seeds:
        for label in options.labels:
            start = pretrained(seed, made[label])
            results = {(label, parity): later_accuracy(start, seed, options.steps, parity) for parity in (False, True)}
            if label == "A2":
                results["A2, kept", False] = later_accuracy(start, seed, options.steps, False, keep=True)
            if label == "w/o":
                torch.manual_seed(seed)
                nothing = encoder(4, 4, 16, **SMALL, pool=False)
                for parity in (False, True):
                    results["not pre-trained", parity] = later_accuracy(nothing, seed, options.steps, parity)
            tasks = {(name, "parity" if parity else "digits"): value for (name, parity), value in results.items()}
            keep("pretraining", [accuracy_row(*names, seed, options.steps, x) for names, x in tasks.items()])
    print_accuracies("pretraining", options.steps)


def print_accuracies(name: str, steps: int) -> None:
    """Means and ranges over seeds of all that stands in the file, also of earlier runs."""
    rows = [row for row in read_rows(RESULTS / f"mcbench-{name}.csv") if row["steps"] == str(steps)]
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        values[row["compressor"]][row["task"]].append(float(row["accuracy"]))
    table = [
        {"compressor": label}
        | {task: f"{statistics.mean(of):.1f} ({min(of):.1f}-{max(of):.1f})" for task, of in by_task.items()}
        for label, by_task in values.items()
    ]
    print("accuracy, %")
    print_rows(table, {task: (task, ">22") for task in dict.fromkeys(row["task"] for row in rows)}, "compressor", 22)


def main() -> None:
    parser = make_parser(__doc__, "--labels", list(compressors(1, 20)))
    parser.add_argument("what", choices=list(STEPS))
    parser.add_argument("--grids", nargs="+", default=GRIDS, choices=GRIDS, help="tensor x pipeline")
    parser.add_argument("--rate", default="1gbit", help="of each rank's link, for `time`")
    parser.add_argument("--steps", type=int, help="timed steps (5), or training steps (300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="for accuracies")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS, help="for `quality`")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # what this script starts itself with
    options = parser.parse_args()
    options.steps = options.steps or STEPS[options.what]
    if not options.rank:
        tables = {"time": print_times, "quality": print_quality, "pretraining": print_pretraining}
        tables[options.what](options)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    time_rank(options.grids[0], options.labels, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
