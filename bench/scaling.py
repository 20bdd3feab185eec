"""Bytes that a rank receives in a step and work that it does, as ranks grow to 4096 and parameters to 124 M.

    python bench/scaling.py                               # every row: an hour, 5 GB
    python bench/scaling.py --sizes 10M --methods "ScapeAdamS 0.01" --ranks 2 64
    python bench/scaling.py --show                        # measure nothing: tables and chart of what is there

Printed for each size and number of ranks: the bytes received over a dense exchange's, and ms of step(); then from how
many ranks on a method takes longer than dense gradients at a rate.

The package's own code on a fake process group (_fake_ranks.py): one rank steps on GPT-2's shapes with random gradients,
the others are made up, and what it gives its collectives is counted. An all-gather receives N - 1 messages, an
all-reduce (as a ring) 2 (N - 1) / N of one: columns "sent" and "received" say what crosses the rank's link each way;
"handed" is what the optimizer counts. Elements "examined" are those among which this rank selects; ms are step()'s
processor time on one thread, with what it takes to read the others' messages.

TAGC sends the union of what N ranks leave. How large that is was measured on real text (``unions``: one rank after the
other, up to 512 in the small model, first sparse step) and given to the other sizes; beyond 512 the figure of 512 is
used, as a lower bound. "PowerSGD" and "naive top-k" are formulas. A row whose step would take more than a minute is
left out. Rows are kept as they come, in results/scaling.csv; saves results/scaling.png too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from _fake_ranks import fake_ranks
from _model import GPT, Batches
from _table import RESULTS, color, drawing, make_parser, print_rows, read_rows, write_rows

import compopt
from compopt._state.masks import selection_size
from compopt._state.tensors import is_compressed
from compopt.scape.scape_masks import mask_partition_at

SIZES = {"1M": (4, 128, 256, 64), "10M": (8, 320, 256, 64), "124M": (12, 768, 50257, 1024)}  # layers, ...
RANKS = (2, 8, 64, 512, 4096)
STEPS = 4  # gradients are zeros in the first; the last is what is counted, and its time is the shorter of two
LONGEST = 60.0  # seconds that a step may take
TRAINED = 100  # steps of AdamW before unions are measured
Made = Callable[..., torch.optim.Optimizer]


def ours(cls: str, **options: object) -> Made:
    return lambda params, comm: getattr(compopt, cls)(params, process_group=comm, **options)


METHODS: dict[str, Made | None] = {
    "AdamS, dense": ours("AdamS"),
    "RadiusAdamW 0.4, sparse": ours("RadiusAdamW", density=0.4, interval=10**6, dense_steps=1),
    "RadiusAdamW 0.4, resample": ours("RadiusAdamW", density=0.4, interval=1, dense_steps=1),
    "RadiusAdamW 0.4, int8": ours("RadiusAdamW", density=0.4, interval=10**6, dense_steps=1, payload_dtype=torch.int8),
    "ScapeAdamS 0.1": ours("ScapeAdamS", density=0.1, density_steps=0),
    "ScapeAdamS 0.01": ours("ScapeAdamS", density=0.01, density_steps=0),
    "ScapeAdamS 0.01, sharded": ours("ScapeAdamS", density=0.01, density_steps=0, sharded=True),
    "SeparateAdam 16": ours("SeparateAdam", projection="gaussian", ratio=16),
    "SeparateAdam tracked 16, int8": ours("SeparateAdam", projection="tracked", rank=16, payload_dtype=torch.int8),
    "TagcAdamW 0.0125": ours("TagcAdamW"),
    "PowerSGD 4, formula": None,
    "naive top-k 0.01, formula": None,
}
KINDS = ("payload", "header", "masks", "gathered")  # of what is handed over; the last: updated parameters
COUNTED = ("handed", *KINDS, "sent", "received", "to_dense", "examined", "ms", "union")
FIELDS = ("method", "size", "parameters", "ranks", *COUNTED)


def gpt(layers: int, width: int, vocabulary: int, context: int) -> Iterator[torch.nn.Parameter]:
    """Parameters of GPT-2's shapes (weights tied), with gradients."""
    shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
        shapes += [(width, 4 * width), (width,)] + 4 * [(width,)]
    for shape in [*shapes, (width,), (width,)]:
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.zeros(shape)
        yield p


def parameters(size: str) -> list[tuple[str, torch.nn.Parameter]]:
    """GPT-2's shapes with zeros as gradients, named so that TAGC knows what belongs to the attention."""
    shapes = SIZES[size]
    layers = shapes[0]
    layer = [f"{name}.{kind}" for name in ("qkv", "out", "up", "down") for kind in ("weight", "bias")]
    layer += [f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]
    names = ["token", "position", *(f"{i}.{name}" for i in range(layers) for name in layer), "norm.weight", "norm.bias"]
    return list(zip(names, gpt(*shapes), strict=True))


# What the ranks of TAGC leave between them


@lru_cache
def unions(ranks: int) -> float:
    """Share of the compressed elements at which at least one of so many ranks leaves something, on real text."""
    torch.manual_seed(0)
    model = GPT(layers=4, width=128, heads=4)
    first, batches = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True), Batches(rank=0)
    for _ in range(TRAINED):
        first.zero_grad()
        model(*batches.next()).backward()
        first.step()
    with fake_ranks(ranks) as comm:
        optimizer = METHODS["TagcAdamW 0.0125"](list(model.named_parameters()), comm)
        results = [torch.zeros(bucket.shards.mask_bytes, dtype=torch.uint8) for bucket in optimizer._buckets]
        for rank in range(ranks):
            model.zero_grad()
            model(*Batches(rank).next()).backward()
            for bits, bucket in zip(results, optimizer._buckets, strict=True):
                if len(bits):
                    with torch.no_grad():
                        bits |= next(optimizer.algorithm(bucket)).tensor  # what it asks the ranks for first: their or
        lengths = [sum(bucket.compressed_lengths) for bucket in optimizer._buckets]
    counts = [int(sum((bits >> n & 1).sum() for n in range(8))) for bits in results]
    return sum(counts) / sum(lengths)


def union_at(size: str, ranks: int) -> float:
    """Return what was measured in the small model, the first time now; of 512 ranks for more than that."""
    ranks = min(ranks, 512)
    row = None if size == "1M" else saved_rows().get(("TagcAdamW 0.0125", "1M", ranks))
    return float(row["union"]) if row else unions(ranks)


def of_others(union: float, own: float) -> float:
    """Share at which others leave something, where this rank's ``own`` is independent of it."""
    return 1 - (1 - union) / (1 - own)


# Measuring


def measure(method: str, size: str, ranks: int, limit: float) -> dict | None:
    """One row; None where a step takes more than ``limit`` seconds."""
    torch.manual_seed(0)
    params = parameters(size)
    union = union_at(size, ranks) if method.startswith("Tagc") else None
    with fake_ranks(ranks, of_others(union, 0.0125) if union else 0.0) as comm:
        optimizer = METHODS[method](params, comm)
        comm.follow(optimizer)
        seconds = []
        for _ in range(STEPS):
            comm.reset()
            before, start = comm.bytes_sent, time.process_time()
            optimizer.step()
            seconds.append(time.process_time() - start)
            if min(seconds) > limit:
                return None
            for _, p in params:
                p.grad.normal_(std=1e-2)
        row = {kind: round(comm.handed[kind]) for kind in KINDS}
        row |= {"handed": comm.bytes_sent - before, "examined": examined(method, optimizer, ranks)}
        row |= {"sent": round(comm.sent.total()), "received": round(comm.received.total())}
    n = sum(p.numel() for _, p in params)
    row |= {"parameters": n, "ms": round(1000 * min(seconds[-2:]), 1), "union": union and round(union, 4)}
    return row


def examined(method: str, optimizer: torch.optim.Optimizer, ranks: int) -> int:
    """Elements among which rank 0 selects in the last step."""
    compressed = sum(sum(bucket.compressed_lengths) for bucket in optimizer._buckets)
    if method.startswith("Scape"):
        partitions = [mask_partition_at(bucket, bucket.group["step"] + 1, ranks) for bucket in optimizer._buckets]
        return sum(piece.stop - piece.start for one in partitions if one for piece in one.by_rank[0].slices)
    return compressed if method.startswith("Tagc") or method.endswith("resample") else 0


def formula(method: str, size: str, ranks: int) -> dict:
    """Bytes of what has no code here: an all-reduce of PowerSGD's factors, or of top-k a gather of 8 k bytes."""
    params = [p for _, p in parameters(size)]
    matrices = [p for p in params if is_compressed(p, {})]
    n, large = sum(p.numel() for p in params), sum(p.numel() for p in matrices)
    dense, ring = 4 * (n - large), 2 * (ranks - 1) / ranks
    if method.startswith("PowerSGD"):
        handed, crosses = (size := 4 * sum(4 * sum(p.shape) for p in matrices)), ring * size
    else:
        handed = 8 * sum(selection_size(0.01, p.numel()) for p in matrices)
        crosses = (ranks - 1) * handed
    row = dict.fromkeys(("sent", "received"), round(crosses + ring * dense))
    row |= {"handed": handed + dense, "payload": handed + dense, "parameters": n}
    return row | {"examined": 0 if method.startswith("PowerSGD") else large}


# Showing


def saved_rows() -> dict[tuple[str, str, int], dict]:
    return {(row["method"], row["size"], int(row["ranks"])): row for row in read_rows(RESULTS / "scaling.csv")}


def save(rows: dict[tuple[str, str, int], dict]) -> None:
    order = [(m, s, n) for s in SIZES for m in METHODS for n in RANKS]
    write_rows(RESULTS / "scaling.csv", [rows[key] for key in sorted(rows, key=order.index)], FIELDS)


def show(rows: dict[tuple[str, str, int], dict], size: str) -> None:
    """For every number of ranks, received bytes as a share of the dense exchange's, and ms."""
    there = {n: {m: rows[m, size, n] for m in METHODS if (m, size, n) in rows} for n in RANKS}
    columns = {f"to_dense {n}": (f"x dense, {n}", "14.2f") for n in RANKS} | {
        f"ms {n}": (f"ms, {n}", "10.0f") for n in RANKS
    }
    table = [
        {"method": method, **{f"{key} {n}": float(row[method][key]) for n, row in there.items()
         for key in ("to_dense", "ms") if method in row and row[method][key]}}
        for method in METHODS
    ]  # fmt: skip
    print(f"\n{size}")
    print_rows(table, columns, "method", 32)


def slower(row: dict, dense: dict, rate: float) -> bool:
    """Return True if step() and its traffic at ``rate`` bit/s, one after the other, take longer; without latency."""
    bytes_more = float(row["received"]) - float(dense["received"])
    ms_more = float(row["ms"]) - float(dense["ms"]) if row.get("ms") else 0.0  # a formula's: bytes alone
    return ms_more / 1000 + 8 * bytes_more / rate > 0


def show_what_pays(rows: dict[tuple[str, str, int], dict], size: str) -> None:
    """For every rate, the smallest number of ranks at which a method takes longer than dense gradients."""
    rates, table = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}, []
    for method in list(METHODS)[1:]:
        pairs = {n: (rows.get((method, size, n)), rows.get(("AdamS, dense", size, n))) for n in RANKS}
        there = {n: pair for n, pair in pairs.items() if all(pair)}
        first = {name: next((n for n, pair in there.items() if slower(*pair, rate)), None)
                 for name, rate in rates.items()}  # fmt: skip
        table.append({"slower than dense from ranks": method, **first})
    print_rows(table, {name: (name, "14d") for name in rates}, "slower than dense from ranks", 32)


def plot(rows: dict[tuple[str, str, int], dict], size: str) -> None:
    """Left the bytes a rank receives over the number of ranks, right the time of its step."""
    keys = {"received": (1e6, "MB received a step"), "ms": (1, "ms of processor in step()")}
    with drawing(RESULTS / "scaling.png", 2, (12, 5)) as (figure, panels):
        for axis, (key, (unit, label)) in zip(panels, keys.items(), strict=True):
            for number, method in enumerate(METHODS):
                points = [(n, float(row[key]) / unit) for n in RANKS
                          if (row := rows.get((method, size, n))) and row.get(key)]  # fmt: skip
                style = dict(color=color(number), linestyle=":" if METHODS[method] is None else "-")
                if points:
                    axis.plot(*zip(*points, strict=True), "o", markersize=3, label=method, **style)
            axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
            axis.set_xticks(RANKS, RANKS)
            axis.minorticks_off()
        panels[0].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3)
        figure.suptitle(f"{size} parameters, one rank of N", fontsize=10)


def row_of(method: str, size: str, ranks: int) -> dict | None:
    """One row, measured or by formula; None where a step takes too long, or took so with fewer ranks."""
    gc.collect()  # an optimizer and its parameters refer to each other: what the row before built is still there
    if METHODS[method] is None:
        row = formula(method, size, ranks)
    else:
        fewer = saved_rows().get((method, size, ranks // 8))
        if ranks > 64 and (not fewer or float(fewer["ms"]) * 4 > 1000 * LONGEST):
            return None
        row = measure(method, size, ranks, LONGEST)
    if row:
        row["to_dense"] = round(row["received"] / (2 * (ranks - 1) / ranks * 4 * row["parameters"]), 4)
    return row and {"method": method, "size": size, "ranks": ranks, **row}


def main() -> None:
    cli = make_parser(__doc__, "--methods", METHODS)
    cli.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    cli.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS))
    cli.add_argument("--show", action="store_true", help="measure nothing")
    args = cli.parse_args()
    torch.set_num_threads(1)
    wanted = [(m, s, n) for s in args.sizes for m in args.methods for n in sorted(args.ranks)]
    for method, size, ranks in () if args.show else wanted:
        row = row_of(method, size, ranks)
        if row is None:
            print(f"{size}, {method}, {ranks} ranks: left out, a step would take more than a minute", flush=True)
            continue
        save(saved_rows() | {(method, size, ranks): row})
        print(f"{size}, {method}, {ranks} ranks: {row['received']:,} bytes received, {row.get('ms')} ms", flush=True)
    rows = saved_rows()
    for size in SIZES:
        show(rows, size)
        show_what_pays(rows, size)
    plot(rows, "10M")


if __name__ == "__main__":
    main()
