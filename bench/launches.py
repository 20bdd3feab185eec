"""The calls of one steady step on an accelerator, counted without one: launches, waits of the host, uploads, bytes.

    python bench/launches.py                    # all rows, 354.8 M parameters in GPT-2 medium's shapes; under a minute
    python bench/launches.py --only "SCAPE .01" --places

Tensors have no memory and kernels are not run (see _counting_device.py), so this shows what is asked, not how long it
takes: no figure here was measured on a GPU. ``launches`` are dispatched operators and Triton kernels; an operator
counts once, though some (topk, qr) are several kernels. ``waits`` are numbers that the host waits for. ``bytes`` are
what operators read and write of the device's memory, a parameter, without collectives; fused AdamW's are 28, and
``ms`` is what they take at 3.35 TB/s. ``host`` is the processor's time for such a step with launches stubbed, and
over that of torch's fused AdamW treated alike, in turns: medians of several. Ranks are 8, the others made up; TAGC's
row is counted at a 256th of the size. Saves results/launches.csv.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _counting_device import DEVICE, Counts, counting_device
from _fake_ranks import fake_ranks
from _table import RESULTS, print_rows, write_rows

import compopt

HERE = Path(__file__).parent
STEPS = 5  # timed
RANKS, BANDWIDTH, FUSED = 8, 3.35e12, 28  # bytes a second of an H100, and bytes a parameter of fused AdamW
Params = list[torch.nn.Parameter]


def gpt2(width: int = 1024, layers: int = 24, words: int = 50257, places: int = 1024) -> Params:
    """Parameters in GPT-2's shapes, without memory; 354.8 M of them by default, as GPT-2 medium."""
    shapes: list[tuple[int, ...]] = [(words, width), (places, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes += [(width,), (width,)]
    params = [torch.nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def muon(params: Params) -> torch.optim.Optimizer:
    """Muon on the matrices of the layers, AdamW on the embeddings and vectors."""
    groups = [
        {"params": params[2:], "use_muon": lambda name, p: p.ndim == 2},
        {"params": params[:2], "use_muon": False},
    ]
    return compopt.MuonAdamW(groups)


LOCAL = dict(growth_steps=0, dense_steps=0, payload_dtype="int4")
Make = Callable[[Params], Any]
# name: back end, optimizer, steps before the one that is counted
ROWS: dict[str, tuple[str, Make, int]] = {
    "AdamS": ("triton", lambda p: compopt.AdamS(p), 2),
    "Radius .4, sparse": ("triton", lambda p: compopt.RadiusAdamW(p, density=0.4, dense_steps=1, interval=1000), 3),
    "Radius .4, int8": (
        "triton",
        lambda p: compopt.RadiusAdamW(p, density=0.4, dense_steps=1, interval=1000, payload_dtype="int8"),
        3,
    ),
    "SCAPE .01": ("triton", lambda p: compopt.ScapeAdamS(p, density=0.01, dense_steps=0, density_steps=0), 3),
    "Separate 16": (
        "triton",
        lambda p: compopt.SeparateAdam(p, projection="gaussian", ratio=16, dense_steps=0),
        2,
    ),
    "tracked 16, int8": ("triton", lambda p: compopt.SeparateAdam(p, dense_steps=0), 3),
    "Average, int8": ("triton", lambda p: compopt.Average(adamw(p), payload_dtype="int8"), 2),
    "LocalSteps, between": ("triton", lambda p: compopt.LocalSteps(adamw(p), every=100, **LOCAL), 2),
    "LocalSteps, exchange": ("triton", lambda p: compopt.LocalSteps(adamw(p), every=1, **LOCAL), 2),
    "MuonAdamW": ("triton", muon, 2),
}


def count(name: str, params: Params) -> tuple[dict[str, Any], Counts]:
    """One row of the table, without the host's time."""
    backend, make, before = ROWS[name]
    with fake_ranks(RANKS), counting_device(backend), Counts() as counts:
        optimizer = make(params)
        for _ in range(before):
            optimizer.step()
        counts.clear()
        optimizer.step()
        asked = (counts.launches, counts.waits, counts.uploads, counts.collectives, counts.moved)
        session = getattr(optimizer, "_session", None)  # MuonAdamW alone has none
        return row_of(name, params, 0 if session is None else len(session.buckets), *asked), counts


def row_of(
    name: str, params: Params, buckets: int, launches: int, waits: int, uploads: int, collectives: int, moved: int
) -> dict[str, Any]:
    each = moved / sum(p.numel() for p in params)
    return {
        "row": name,
        "buckets": buckets,
        "launches": launches,
        "waits": waits,
        "uploads": uploads,
        "collectives": collectives,
        "bytes": round(each, 1),
        "ms": round(1e3 * each * 354_823_168 / BANDWIDTH, 2),
        "to_adamw": round(each / FUSED, 2),
    }


def host(name: str, params: Params) -> tuple[float, float]:
    """Milliseconds of a step of this row, launches stubbed, and what it is over that of torch's AdamW: medians.

    Steps of both in turns, for the machine's neighbours are seen in both.
    """
    backend, make, before = ROWS[name]
    times: list[list[float]] = [[], []]
    with fake_ranks(RANKS), counting_device(backend, addresses=False):
        with Counts():
            optimizers = make(params), adamw(params)
            for _ in range(before):
                for optimizer in optimizers:
                    optimizer.step()
        gc.collect()
        for _ in range(STEPS):
            for optimizer, local in zip(optimizers, times, strict=True):
                start = time.thread_time()
                optimizer.step()
                local.append(time.thread_time() - start)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return round(1e3 * statistics.median(times[0]), 1), round(ratio, 2)


def tagc(width: int, layers: int, words: int) -> dict[str, Any]:
    """TagcAdamW's row: what it asks for follows from values, so they are computed, on a device in Python.

    At a 256th of the size, in as many tensors and buckets. For a process of its own, which keeps that device.
    """
    sys.path.insert(0, str(HERE.parent / "tests/support"))
    import fake_device

    from compopt._state import buckets

    device = fake_device.register()
    buckets.DEVICE_BUCKET_BYTES //= 256
    os.environ["COMPOPT_BACKEND"] = "torch"
    with fake_device.Device(counts=True) as counts, fake_ranks(RANKS, left_by_others=0.08) as comm:
        params = [torch.nn.Parameter(torch.randn(p.shape).to(device)) for p in gpt2(width, layers, words, 64)]
        optimizer = compopt.TagcAdamW(params, process_group=comm, dense_steps=0)
        comm.follow(optimizer)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape).to(device)
            counts.accesses, counts.launches, counts.uploads, counts.moved = Counter(), Counter(), Counter(), 0
            before = comm.calls
            optimizer.step()
        asked = (counts.launches.total(), counts.accesses.total(), counts.uploads.total(), comm.calls - before)
        return row_of("TAGC .9875", params, len(optimizer._session.buckets), *asked, counts.moved)


COLUMNS = {name: (name, "5d") for name in ("buckets", "launches", "waits", "uploads", "collectives")}
COLUMNS |= {"bytes": ("bytes", "7.1f"), "ms": ("ms", "7.2f"), "to_adamw": ("x AdamW", "7.2f")}
COLUMNS |= {"host_ms": ("host ms", "7.1f"), "host_to_adamw": ("x AdamW", "7.2f")}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--only", nargs="+", metavar="ROW", choices=ROWS, default=list(ROWS), help="rows; a wrong name lists them"
    )
    cli.add_argument("--places", action="store_true", help="show which places in compopt ask for most")
    cli.add_argument("--tagc", nargs=3, type=int, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.tagc:
        print(json.dumps(tagc(*args.tagc)))
        return
    torch.set_num_threads(1)
    params, rows = gpt2(), []
    print(f"{sum(p.numel() for p in params):,} parameters; host: {torch.backends.cpu.get_cpu_capability()}")
    for name in args.only:
        row, counts = count(name, params)
        row["host_ms"], row["host_to_adamw"] = host(name, params)
        rows.append(row)
        for place, n in counts.at.most_common(12) if args.places else ():
            print(f"{n:>14} {place}")
    if args.only == list(ROWS):
        rows.append(apart(64, 24, 50257 // 16))
    print_rows(rows, COLUMNS, "row", 22)
    if args.only == list(ROWS):
        write_rows(RESULTS / "launches.csv", rows)


def apart(width: int, layers: int, words: int) -> dict[str, Any]:
    """``tagc`` in a process of its own."""
    command = [sys.executable, __file__, "--tagc", str(width), str(layers), str(words)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
