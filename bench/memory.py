"""Memory that each optimizer holds, and takes on top during step(); counted where torch allocates it.

    python bench/memory.py                          # 10 M parameters as one of 2 ranks, all rows: a few minutes
    python bench/memory.py --ranks 8 --only "ScapeAdamS 0.01, sharded"
    python bench/memory.py --show                   # measure nothing: the table of what is there

Every row is a process of its own that builds one optimizer and steps it under torch's profiler, which notes each
allocation and release. Gradients are there before. The other ranks are made up (_fake_ranks.py): no message takes time,
but what one rank has in memory is there: messages, masks on their way, what is gathered. Bytes a parameter of:

    saved    what optimizer.state holds, as it is while training; of LocalSteps also anchors and the outer optimizer's
    beside   what else stays after a compressed step: decoded positions, messages, scratch memory, masks on their way
    peak     what a compressed step takes on top and gives back
    most     all of that at the worst moment: the dense start, a step that resamples, or a compressed one
    host     how much of "saved" is in host memory on a machine with a GPU (offload="residual"); here everything is

Not counted: parameters, gradients and DDP's buckets, 4 each, whatever the optimizer. Of torch's PowerSGD hook only what
it keeps is counted (it works in gloo's threads, which the profiler does not see). Saves results/memory.csv.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from _fake_ranks import fake_ranks
from _model import Batches, make_model
from _table import RESULTS, make_parser, print_rows, read_rows, write_rows
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import compopt

STEPS = 8  # zeros as gradients in the first; the last is compressed, and so is the one before it
DENSE = dict(dense_steps=1)  # steps; RadiusAdamW then resamples in step 1, 3 and 6
RADIUS = dict(density=0.4, interval=3, **DENSE)
LEFT_BY_OTHERS = 0.0125  # of TAGC, by each other rank, where no two leave the same


def ours(cls: str, **options: object) -> Callable:
    return lambda params, comm: getattr(compopt, cls)(params, process_group=comm, **options)


def scape(density: float, **options: object) -> Callable:
    return ours("ScapeAdamS", density=density, density_steps=0, **DENSE, **options)


def adamw(params: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in params], fused=True)


def local(inner: torch.optim.Optimizer, comm: object, **options: object) -> torch.optim.Optimizer:
    return compopt.LocalSteps(inner, every=2, growth_steps=0, process_group=comm, **options)


POWERSGD = "PowerSGD rank 4, AdamW"
ROWS: dict[str, Callable] = {
    "AdamW, fused (torch)": lambda params, comm: torch.optim.AdamW([p for _, p in params], fused=True),
    POWERSGD: None,
    "AdamS": ours("AdamS"),
    "RadiusAdamW 0.4": ours("RadiusAdamW", **RADIUS),
    "RadiusAdamW 0.4, offload": ours("RadiusAdamW", offload="residual", **RADIUS),
    "RadiusAdamW 0.4, int8": ours("RadiusAdamW", payload_dtype=torch.int8, **RADIUS),
    "ScapeAdamS 0.1": scape(0.1),
    "ScapeAdamS 0.1, offload": scape(0.1, offload="residual"),
    "ScapeAdamS 0.1, sharded": scape(0.1, sharded=True),
    "ScapeAdamS 0.01": scape(0.01),
    "ScapeAdamS 0.01, offload": scape(0.01, offload="residual"),
    "ScapeAdamS 0.01, sharded": scape(0.01, sharded=True),
    "SeparateAdam 16": ours("SeparateAdam", projection="gaussian", ratio=16, **DENSE),
    "SeparateAdam 16, adaptive": ours(
        "SeparateAdam", projection="gaussian", ratio=16, adaptive=True, adapt_interval=3, **DENSE
    ),
    "SeparateAdam tracked 16": ours("SeparateAdam", projection="tracked", rank=16, payload_dtype=None, **DENSE),
    "SeparateAdam tracked 16, int8": ours(
        "SeparateAdam", projection="tracked", rank=16, payload_dtype=torch.int8, **DENSE
    ),
    "SeparateAdam tracked 16, int8, residual int8": ours("SeparateAdam", rank=16, residual_dtype="int8", **DENSE),
    "RadiusAdamW 0.4, residual int8": ours("RadiusAdamW", residual_dtype="int8", **RADIUS),
    "TagcAdamW 0.0125": ours("TagcAdamW", **DENSE),
    "Average, AdamW": lambda params, comm: compopt.Average(adamw(params), process_group=comm),
    "Average, AdamW, int8": lambda params, comm: compopt.Average(
        adamw(params), payload_dtype="int8", process_group=comm
    ),
    "Separate, AdamW": lambda params, comm: compopt.Separate(adamw(params), process_group=comm, **DENSE),
    "LocalSteps, AdamW": lambda params, comm: local(adamw(params), comm),
    "LocalSteps, AdamW, delay 1": lambda params, comm: local(adamw(params), comm, delay=1),
    "LocalSteps, MuonAdamW": lambda params, comm: local(compopt.MuonAdamW(params), comm),
}
PARTS = ("saved", "beside", "peak", "most", "host")


class Allocations:
    """Bytes that torch allocates on the CPU less those it gives back, over time, while it is entered.

    ``mark(name)`` wraps a span; afterwards ``before[name]`` is what was held when it began, ``most[name]`` the most
    that was in it, ``held`` what was left at the end: all from the moment of entering on.
    """

    def __enter__(self) -> Allocations:
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self._profiler.__enter__()
        return self

    def mark(self, name: str) -> torch.autograd.profiler.record_function:
        return torch.autograd.profiler.record_function(f"span {name}")

    def __exit__(self, *error: object) -> None:
        self._profiler.__exit__(None, None, None)
        events = self._profiler.kineto_results.events()
        spans = [(e.name()[5:], e.start_ns(), e.end_ns()) for e in events if e.name().startswith("span ")]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        self.before, self.most = {name: 0 for name, *_ in spans}, {}
        self.held = 0
        for at, change in changes:
            self.held += change
            for name, start, end in spans:
                if at < start:
                    self.before[name] = self.held
                elif at <= end:
                    self.most[name] = max(self.most.get(name, 0), self.held)
        self.most = {name: self.most.get(name, before) for name, before in self.before.items()}


def bytes_in(tensors: Iterable[torch.Tensor]) -> int:
    """Of all storages of these, each once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def saved_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that a state dict holds, in the form in which memory keeps them."""
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if torch.is_tensor(t)]
    if isinstance(optimizer, compopt.LocalSteps) and optimizer._anchors is not None:
        anchors = optimizer._anchors
        parts = [saved_tensors(one) for one in (optimizer.base, anchors.outer)]
        parts.append([flat for b in anchors.buckets for flat in (b.flat_anchors, b.flat["residual"])])
        return [t for part in parts for t in part]
    return tensors


def measure(name: str, ranks: int) -> dict:
    torch.set_num_threads(1)
    if name == POWERSGD:
        return powersgd(name)
    model = make_model()
    params = list(model.named_parameters())
    for _, p in params:
        p.grad = torch.zeros_like(p)
    with fake_ranks(ranks, 1 - (1 - LEFT_BY_OTHERS) ** (ranks - 1)) as comm, Allocations() as results:
        optimizer = ROWS[name](params, comm)
        if isinstance(optimizer, compopt._engine.optimizer.CompressedOptimizer):
            comm.follow(optimizer)
        for step in range(STEPS):
            with results.mark(str(step)):
                optimizer.step()
            for _, p in params:
                p.grad.normal_(std=1e-2)
        saved = bytes_in(saved_tensors(optimizer))
        offloaded = [b.flat["residual"] for b in optimizer._buckets] if getattr(optimizer, "offload", None) else []
    last = str(STEPS - 1)
    held, most = results.before[last], max(results.most.values())
    sizes = (saved, held - saved, results.most[last] - held, most, bytes_in(offloaded))
    n = sum(p.numel() for _, p in params)
    return {"optimizer": name, "ranks": ranks, "parameters": n, **dict(zip(PARTS, (x / n for x in sizes), strict=True))}


def powersgd(name: str) -> dict:
    """Return what torch's hook keeps: a bucket's error, and two factors a matrix, beside AdamW's state."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=4096)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    batches = Batches(0)
    for _ in range(4):
        ddp(*batches.next()).backward()
    n = sum(p.numel() for p in model.parameters())
    kept = [*state.error_dict.values(), *state.p_memory_dict.values(), *state.q_memory_dict.values()]
    dist.destroy_process_group()
    time.sleep(0.1)  # a gloo thread lets go of a collective's tensors a moment later, and aborts a process that ends
    return {"optimizer": name, "ranks": 1, "parameters": n, "saved": 8.0, "beside": bytes_in(kept) / n, "host": 0.0}


COLUMNS = {"ranks": ("ranks", "5.0f"), **{part: (part, "8.2f") for part in PARTS}}


def save(rows: Iterable[dict]) -> None:
    order = list(ROWS)
    rows = sorted(rows, key=lambda row: (order.index(row["optimizer"]), int(row["ranks"])))
    write_rows(RESULTS / "memory.csv", rows, ["optimizer", "ranks", "parameters", *PARTS])


def main() -> None:
    cli = make_parser(__doc__, "--only", ROWS)
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="more than the first: of sharded state only")
    cli.add_argument("--show", action="store_true", help="measure nothing")
    args = cli.parse_args()
    rows = {(row["optimizer"], int(row["ranks"])): row for row in read_rows(RESULTS / "memory.csv")}
    jobs = [(n, r) for n in args.only for r in args.ranks
            if r == args.ranks[0] or "sharded" in n or n.startswith("Tagc")]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in () if args.show else (pool.apply(measure, job) for job in jobs):
            row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print(f"{row['optimizer']}, {row['ranks']} ranks", flush=True)
            rows[row["optimizer"], row["ranks"]] = row
            save(rows.values())
    numbers = [{k: float(v) if k in COLUMNS and v else v for k, v in row.items()} for row in rows.values()]
    print_rows(numbers, COLUMNS, "optimizer", 46)


if __name__ == "__main__":
    main()
