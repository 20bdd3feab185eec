"""Step times of the ladder's rows on real ranks, over shaped links: all rows in one set of processes, in turns.

A block of a row of local steps is one whole round, its exchange included. A row with a dense start is timed from there
on. Beside them each rank steps AdamW and Muon by itself: what a step computes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from _ladder_clock import KEPT, Timing, base_of, list_kinds
from _ladder_model import SIZES
from _ladder_rows import BASELINES, DENSE, ROWS, Local
from _net import bits_per_second
from _turns import Runner, over_links, take_turns, warn_if_busy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SETTLE = 3  # untimed steps before the first block: DDP has made its buckets, ranks have verified each other
LEARNING_RATE = 1e-3
ALONE = ", no communication"  # after the baseline whose optimizer steps
POWERSGD = "PowerSGD 4"  # timed as torch's hook, which sends the factors of all matrices at once


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
        stats = baselines.attach("powersgd", module, argparse.Namespace(warmup=DENSE))
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
    take_turns(runners, blocks, steps)
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
