"""Bytes a parameter that SeparateAdam holds inside FSDP2 on real gloo ranks, and takes on top until step().

    python bench/fsdp_memory.py --ranks 2 8      # a minute or two

A GPT of 0.86 M parameters, ``fully_shard`` on each block, rank 16. Held are the tensors of optimizer.state on rank 0.
Pending are the residuals that backward has made and step() commits. Saves results/fsdp_memory.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

import compopt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_gpt

RESULTS = Path(__file__).parent / "results" / "fsdp_memory.csv"
FIELDS = ["residual", "ranks", "held", "moments", "residuals", "bases", "pending"]


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def work(rank: int, ranks: int, file: str, dtype: str | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = train_gpt.GPT(4, 128, 4, 64)
    numel = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = compopt.SeparateAdam(model.parameters(), lr=1e-3, rank=16, dense_steps=1, residual_dtype=dtype)
    for _ in range(3):
        x = torch.randint(256, (1, 64))
        model(x, x).backward()
        pending = [one.next_residual.nbytes for one in optimizer.fsdp_backward.pending_residuals.values()]
        optimizer.step()
        optimizer.zero_grad()
    sizes: dict[str, int] = {}
    for entry in optimizer.state.values():
        for name, value in entry.items():
            if torch.is_tensor(value):
                sizes[name] = sizes.get(name, 0) + local(value).nbytes
    if rank == 0:
        moments = sizes["exp_avg"] + sizes["exp_avg_sq"]
        row = [sum(sizes.values()), moments, sizes["residual"], sizes["basis"], sum(pending)]
        values = [dtype or "float32", ranks, *(round(one / numel, 3) for one in row)]
        with RESULTS.open("a", newline="") as out:
            csv.writer(out).writerow(values)
        print(dict(zip(FIELDS, values, strict=True)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    args = cli.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "COMPOPT_QUIET": "1"}
    RESULTS.write_text(",".join(FIELDS) + "\n")
    for ranks in args.ranks:
        for dtype in (None, "int8"):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(work, (ranks, str(Path(folder, "rendezvous")), dtype), nprocs=ranks)


if __name__ == "__main__":
    main()
