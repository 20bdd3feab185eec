"""TAGC and SEPARATE inside FSDP2 beside plain FSDP2, and under DDP: loss and memory of runs, where a step's time goes.

    python bench/fsdp.py                          # 800 steps of 0.86 M parameters on 2 ranks: ten minutes
    python bench/fsdp.py --ranks 4 --only "FSDP2, AdamW"
    python bench/fsdp.py --show                   # train nothing
    sudo python bench/links.py --rates 600mbit 1gbit 10gbit --methods none ddp fsdp fsdp-tagc-all --save links-fsdp

Every row is a run of its own on real processes, of examples/train_gpt.py's model, data and schedule, lr 2e-3, 15 % of
the steps dense. Held are bytes a parameter of all tensors there are on rank 0 after the last step: parameters, state,
what is owed, accumulators; not gradients, nor the buffers of DDP and FSDP. The last columns are milliseconds of a
compressed step of rank 0: all of it, TAGC's choosing what to send, its messages and accumulators, waiting. What crosses
the network, and how long steps take over links, is bench/links.py's to say (last line above). Saves results/fsdp.csv.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import gc
import json
import math
import os
import pstats
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compopt

ROOT, RESULTS = Path(__file__).parent.parent, Path(__file__).parent / "results"
LR, DENSE, PROFILED = 2e-3, 0.15, 20  # the last: steps that are profiled
EVERY_MATRIX = r"(qkv|out|up|down|head|bytes|positions)\.weight$"
SKETCH = dict(codec="sketch", sketch_ratio=10)
METHODS: dict[str, tuple[type, dict]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "TagcAdamW 0.9875": (compopt.TagcAdamW, dict(sparsity=0.9875)),
    "TagcAdamW 0.9875, every matrix": (compopt.TagcAdamW, dict(sparsity=0.9875, select=EVERY_MATRIX)),
    "TagcAdamW 0.9875, every matrix, sketch": (
        compopt.TagcAdamW, dict(sparsity=0.9875, select=EVERY_MATRIX, **SKETCH)
    ),
    "SeparateAdam tracked 16, int8": (compopt.SeparateAdam, dict(rank=16)),
    "SeparateAdam 16": (compopt.SeparateAdam, dict(projection="gaussian", ratio=16)),
}  # fmt: skip
ROWS = [f"DDP, {name}" for name in ("AdamW", "TagcAdamW 0.9875", "SeparateAdam tracked 16, int8")]
ROWS += [f"FSDP2, {name}" for name in METHODS]
TIMES = {  # functions of compopt, by file and name, whose time is a column's
    "choose_ms": {("sparsify.py", "largest_of_shards")},
    "message_ms": {
        ("parcels.py", "add_up"), ("sending.py", "message"), ("sending.py", "decode"), ("sending.py", "hold_back"),
        ("parcels.py", "commit"), ("rows.py", "pack"), ("rows.py", "hold_back"), ("rows.py", "decode"),
    },
    "wait_ms": {("pending.py", "wait")},
}  # fmt: skip
FIELDS = ["run", "ranks", "steps", "loss", "held", "step_ms", *TIMES]


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
    profile, seconds = cProfile.Profile(), 0.0
    for step in range(steps):
        profiled = steps - PROFILED <= step
        start = time.perf_counter()
        profile.enable() if profiled else None
        train(model, optimizer, schedule, data)
        profile.disable()
        seconds += (time.perf_counter() - start) * profiled
    parameters = sum(p.numel() for p in model.parameters())
    after = storages()
    results["held"] = sum(after[at] for at in after.keys() - before.keys()) / parameters
    results |= {"step_ms": 1e3 * seconds / PROFILED, **times(profile)}
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
        options = {"warmup_steps": dense, **options}
    return wrapped, kind(groups, lr=LR, **options)


def train(model, optimizer, schedule, data) -> None:
    model(*next(data)).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def times(profile: cProfile.Profile) -> dict[str, float]:
    """Milliseconds of a step, of what TIMES names."""
    results = dict.fromkeys(TIMES, 0.0)
    for (file, _, name), (*_, cumulative, _) in pstats.Stats(profile).stats.items():
        for column, functions in TIMES.items():
            if "compopt" in file and (Path(file).name, name) in functions:
                results[column] += 1e3 * cumulative / PROFILED
    return results


def run(row: str, ranks: int, steps: int) -> dict:
    print(f"{row}, {ranks} ranks, {steps} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COMPOPT_QUIET": "1"}
        words = [__file__, "--worker", row, str(steps), out]
        subprocess.run([*launcher, *words], env=env, check=True, timeout=900 + 4 * steps)
        return json.loads(Path(out).read_text())


def kept() -> list[dict]:
    path = RESULTS / "fsdp.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


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
    rows = {(r["run"], int(r["ranks"]), int(r["steps"])): r for r in kept()}
    for name in () if args.show else args.only:
        results = run(name, args.ranks, args.steps)
        rows[name, args.ranks, args.steps] = {k: round(v, 4) if isinstance(v, float) else v for k, v in results.items()}
        with (RESULTS / "fsdp.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows, key=lambda key: (key[1:], ROWS.index(key[0]))))
    print(f"{'run':<48}" + "".join(f"{name:>11}" for name in FIELDS[1:]))
    for row in kept():
        print(f"{row['run']:<48}" + "".join(f"{row[name]:>11}" for name in FIELDS[1:]))


if __name__ == "__main__":
    main()
