"""TAGC and SEPARATE inside FSDP2 beside plain FSDP2, and under DDP: loss and memory of runs.

    python bench/fsdp.py                          # 800 steps of 0.86 M parameters on 2 ranks: ten minutes
    python bench/fsdp.py --ranks 4 --only "FSDP2, AdamW"
    python bench/fsdp.py --show                   # train nothing
    sudo python bench/links.py --rates 600mbit 1gbit 10gbit --methods none ddp fsdp fsdp-tagc-all --save links-fsdp

Every row is a run of its own on real processes, of examples/train_gpt.py's model, data and schedule, lr 2e-3, 15 % of
the steps dense. Held are bytes a parameter of all tensors there are on rank 0 after the last step: parameters, state,
what is owed, accumulators; not gradients, nor the buffers of DDP and FSDP. step_ms is of a compressed step of rank 0.
What crosses the network, and how long steps take over links, is bench/links.py's to say (last line above). Saves
results/fsdp.csv.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from _table import RESULTS, print_rows, read_rows, write_rows
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compopt

ROOT = Path(__file__).parent.parent
LR, DENSE, TIMED = 2e-3, 0.15, 20  # the last: steps at the end
EVERY_MATRIX = r"(qkv|out|up|down|head|bytes|positions)\.weight$"
SKETCH = dict(codec="sketch", sketch_ratio=10)
METHODS: dict[str, tuple[type, dict]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "TagcAdamW 0.0125": (compopt.TagcAdamW, dict(density=0.0125)),
    "TagcAdamW 0.0125, every matrix": (compopt.TagcAdamW, dict(density=0.0125, select=EVERY_MATRIX)),
    "TagcAdamW 0.0125, every matrix, sketch": (
        compopt.TagcAdamW, dict(density=0.0125, select=EVERY_MATRIX, **SKETCH)
    ),
    "SeparateAdam tracked 16, int8": (compopt.SeparateAdam, dict(rank=16)),
    "SeparateAdam 16": (compopt.SeparateAdam, dict(projection="gaussian", ratio=16)),
}  # fmt: skip
ROWS = [f"DDP, {name}" for name in ("AdamW", "TagcAdamW 0.0125", "SeparateAdam tracked 16, int8")]
ROWS += [f"FSDP2, {name}" for name in METHODS]
FIELDS = ["run", "ranks", "steps", "loss", "held", "step_ms"]


def work(row: str, steps: int, out: str) -> None:
    """One rank of one run."""
    sys.path.insert(0, str(ROOT / "examples"))
    import corpus
    import train_gpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    where, method = row.split(", ", 1)
    text, held_out = corpus.load(None)
    data = corpus.batches(text, 8, 64, seed=1 + rank)
    torch.manual_seed(0)
    results = {"run": row, "ranks": world, "steps": steps}
    before = storages()
    model, optimizer = build(train_gpt.GPT(4, 128, 4, 64), where, method, round(DENSE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    seconds = 0.0
    for step in range(steps):
        start = time.perf_counter()
        train(model, optimizer, schedule, data)
        seconds += (time.perf_counter() - start) * (steps - TIMED <= step)
    parameters = sum(p.numel() for p in model.parameters())
    after = storages()
    results["held"] = sum(after[at] for at in after.keys() - before.keys()) / parameters
    results["step_ms"] = 1e3 * seconds / TIMED
    with torch.no_grad():
        losses = [model(x, y) for x, y in islice(corpus.batches(held_out, 8, 64, seed=0), rank, 40, world)]
    loss = torch.stack(losses).mean()
    # before the group: DDP that holds it last joins gloo's thread with Python's lock, for which that thread may wait
    del model, optimizer, schedule
    dist.all_reduce(loss)
    results["loss"] = float(loss / world)
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def storages() -> dict[int, int]:
    """Bytes of all memory that Python's tensors have, by where it is."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in local)}


def build(model, where: str, method: str, dense: int):
    if where == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    matrices, scales = ([(n, p) for n, p in model.named_parameters() if (p.dim() >= 2) == m] for m in (True, False))
    groups = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    kind, options = METHODS[method]
    if kind is not torch.optim.AdamW:
        options = {"dense_steps": dense, **options}
    return wrapped, kind(groups, lr=LR, **options)


def train(model, optimizer, schedule, data) -> None:
    model(*next(data)).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def run(row: str, ranks: int, steps: int) -> dict:
    print(f"{row}, {ranks} ranks, {steps} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COMPOPT_QUIET": "1"}
        words = [__file__, "--worker", row, str(steps), out]
        subprocess.run([*launcher, *words], env=env, check=True, timeout=900 + 4 * steps)
        return json.loads(Path(out).read_text())


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--only", nargs="+", metavar="ROW", choices=ROWS, default=ROWS, help="rows; a wrong name lists them"
    )
    cli.add_argument("--ranks", type=int, default=2)
    cli.add_argument("--steps", type=int, default=800)
    cli.add_argument("--show", action="store_true", help="train nothing")
    cli.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.worker:
        row, steps, out = args.worker
        return work(row, int(steps), out)
    path = RESULTS / "fsdp.csv"
    for name in () if args.show else args.only:
        row = run(name, args.ranks, args.steps)
        digits = dict.fromkeys(("loss", "held", "step_ms"), 4)
        write_rows(path, [row], FIELDS, digits, keep=("run", "ranks", "steps"))
    columns = {"ranks": ("ranks", "5.0f"), "steps": ("steps", "5.0f"), "loss": ("loss", "8.4f")}
    columns |= {"held": ("held", "8.2f"), "step_ms": ("step ms", "8.1f")}
    rows = [{k: float(v) if k in columns else v for k, v in row.items()} for row in read_rows(path)]
    print_rows(rows, columns, "run", 48)


if __name__ == "__main__":
    main()
