"""Seconds and bytes of a step over a shaped link in a framework's own training, optimizer beside optimizer.

    sudo /path/of/an/environment/bin/python bench/front_doors.py litgpt       # also: torchtitan, trainer

Two ranks, each in a network namespace, run the framework once for each optimizer. A hook of torch notes the time and
the bytes of the rank's socket after every step; after the counted steps the process ends. Means over them, of rank 0,
and the machine's load, since other work makes steps longer. Adds rows to results/front_doors.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _net import Links, sent_bytes
from _table import RESULTS, print_rows, write_rows
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from frameworks import IN_PLACE, write_titan_assets

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests/frameworks/scripts"
# (steps before, counted steps): past a dense start, and of local steps one round and one more
STEPS = {"adamw": (2, 6), "adamw_replicas": (2, 6), "separate": (5, 15), "local": (30, 30)}
OPTIONS = {"SAVE_NOTHING": "1", "SEPARATE": '{"dense_steps": 2}', "LOCAL": '{"every": 30, "growth_steps": 0}'}
SIZES = dict(n_layer=8, n_embd=320, n_head=5, block_size=64, vocab_size=256, padded_vocab_size=256)
LITGPT = dict(
    model_name="tiny",
    model_config=dict(**SIZES, name="tiny", norm_class_name="RMSNorm", bias=False, intermediate_size=1280),
    precision="32-true",
    data="train_litgpt.Repeats",
    devices=2,
    logger_name="csv",
    optimizer=dict(class_path="train_litgpt.make", init_args=dict(lr=3e-4)),
    train=dict(save_interval=10**6, log_interval=10**3, global_batch_size=4, micro_batch_size=2, max_tokens=10**8),
    eval=dict(interval=10**6, max_iters=1, initial_validation=False, final_validation=False),
)
COLUMNS = {
    "seconds": ("s", "7.3f"),
    "times": ("x first", "6.3f"),
    "sent_mb": ("MB", "8.3f"),
    "share": ("% bytes", "7.2f"),
    "steps": ("steps", "5d"),
    "load": ("load", "6.1f"),
}


def run_timed(settle: int, steps: int, script: str, arguments: list[str]) -> None:
    """Run a script as Python would, and end the process after ``steps`` steps of its outermost optimizer."""
    notes: dict[int, list[tuple[float, int]]] = {}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = notes.setdefault(id(optimizer), [])
        mine.append((time.perf_counter(), sent_bytes() or 0))
        if len(mine) > settle + steps and is_outermost(optimizer):
            (start, before), (end, after) = mine[settle], mine[-1]
            means = dict(seconds=(end - start) / steps, sent_mb=(after - before) / steps / 1e6)
            print("TIMED", json.dumps(means), flush=True)
            time.sleep(2)  # the other rank may still wait for this one
            os._exit(0)

    register_optimizer_step_post_hook(note)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def is_outermost(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no step() of an optimizer of compopt is running around this one's."""
    frame, around = sys._getframe(2), 0
    while frame is not None:
        me = frame.f_locals.get("self")
        is_ours = type(me).__module__.startswith("compopt.")
        around += is_ours and me is not optimizer and frame.f_code.co_name == "step"
        frame = frame.f_back
    return not around


def prepare(framework: str, optimizer: str) -> list[str]:
    """Write the framework's files into this folder, and return its script with its arguments."""
    if framework == "trainer":
        return [str(ROOT / "bench/_trainer.py")]
    if framework == "litgpt":
        Path("tiny.yaml").write_text(json.dumps(LITGPT))
        return [str(SCRIPTS / "train_litgpt.py"), "pretrain", "--config", "tiny.yaml"]
    if not Path("assets").exists():
        write_titan_assets(Path())
    return [
        str(SCRIPTS / "train_titan.py"),
        "--training.steps",
        "1000",
        "--module",
        "titan_configs",
        "--config",
        optimizer,
    ]


def measure(framework: str, optimizer: str, rate: str) -> dict[str, Any]:
    """Run one optimizer in a new network; return its row."""
    before, counted = STEPS[optimizer]
    own = ["--timed", str(before), str(counted), *prepare(framework, optimizer)]
    paths = [str(ROOT), str(ROOT / "tests/support"), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    env = dict(TORCHELASTIC_RUN_ID="bench", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RESTART_COUNT="0")
    env |= dict(OPTIMIZER=optimizer, DUMP=f"out_{optimizer}", PYTHONPATH=os.pathsep.join(paths), **OPTIONS, **IN_PLACE)
    with Links(2, rate) as links:
        [text, _] = links.run([sys.executable, __file__, *own], env=env)
    [line] = [line.partition("TIMED ")[2] for line in text.splitlines() if "TIMED {" in line]
    row = dict(framework=framework, rate=rate, optimizer=optimizer, steps=counted, load=os.getloadavg()[0])
    return row | json.loads(line)


def main() -> None:
    if sys.argv[1:2] == ["--timed"]:
        return run_timed(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("framework", choices=["litgpt", "torchtitan", "trainer"])
    cli.add_argument("--rate", default="100mbit")
    cli.add_argument("--optimizers", nargs="+", choices=STEPS, default=["adamw", "separate", "local"])
    options = cli.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for optimizer in options.optimizers:
            rows.append(row := measure(options.framework, optimizer, options.rate))
            row["times"] = row["seconds"] / rows[0]["seconds"]
            row["share"] = 100 * row["sent_mb"] / rows[0]["sent_mb"] if rows[0]["sent_mb"] else None
            print(row, flush=True)
    print_rows(rows, COLUMNS, "optimizer")
    digits = dict(seconds=4, times=4, sent_mb=4, share=3, load=1)
    write_rows(RESULTS / "front_doors.csv", rows, digits=digits, keep=("framework", "rate", "optimizer"))


if __name__ == "__main__":
    main()
