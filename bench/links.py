"""Seconds of a step over a slow link, and the bytes that cross it: every method beside no communication and DDP.

    sudo .venv/bin/python bench/links.py                                   # the default table, under six minutes
    sudo .venv/bin/python bench/links.py --rates 100mbit --methods none ddp powersgd32 --ranks 4
    sudo .venv/bin/python bench/links.py --rates 100mbit --methods none local local-delay1 local-delay30 \
        local-fragments --rounds 4 --steps 59 --save rounds            # rounds of 30 local steps, two a block
    sudo .venv/bin/python bench/links.py --rates 100mbit 1gbit --round-trips 0 20 80 --methods none ddp adam local \
        --rounds 4 --steps 14 --batch 2 --save latency        # ms that a message and its answer take, 25 minutes

All methods of one rate share one set of processes and take turns, block by block, after an untimed step that absorbs
what the method before left in flight. A table a rate, in ms: the median step, the range of the middle half, the mean;
the slowest step over the median, which tells of rounds whether training stands still ("none" has slow steps too, of
which the machine is the cause); the median over that of no communication ("none") and of DDP; "exposed": what it takes
beyond none. Bytes are those on a rank's socket, and those that the optimizer counts. Saves results/links.csv and .png,
or the CSV that --save names.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _model import Batches, make_model
from _net import Links, bits_per_second, sent_bytes
from _table import RESULTS, drawing, make_parser, print_rows, write_rows
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

LEARNING_RATE = 3e-4
TRIAL = 32  # the same, for what first finds out whether compression pays
SETTLE = 4  # untimed steps before a method's first block: past its dense start and first selection
PINGS = 9  # whose median is the round trip that a run had
EVERY = 30  # steps of a round; blocks begin in the middle of one, so that its end is not in the step that opens them

Method = tuple[nn.Module, torch.optim.Optimizer]
Factory = Callable[[nn.Module, dist.ProcessGroup], Method]


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def alone(model: nn.Module, group: dist.ProcessGroup) -> Method:
    """Each rank trains by itself: what a step costs before any communication."""
    return model, fused_adamw(model)


def ddp(model: nn.Module, group: dist.ProcessGroup) -> Method:
    return DDP(model, process_group=group), fused_adamw(model)


def powersgd(rank: int) -> Factory:
    """PyTorch's PowerSGD hook at this matrix rank, with error feedback and warm start.

    One bucket: the hook starts its second and third all-reduce from callbacks, in gloo's threads, so that with several
    buckets the order of collectives differs between ranks and gloo pairs the wrong ones.
    """

    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        wrapped = DDP(model, process_group=group, bucket_cap_mb=4096)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped, fused_adamw(model)

    return make


def topk(density: float) -> Factory:
    """Naive top-k of examples/baselines.py: each rank gathers all positions and values, within backward's hooks."""

    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        sys.path.append(str(Path(__file__).parents[1] / "examples"))
        wrapped = DDP(model)  # it gathers over the default group
        importlib.import_module("baselines").TopK(wrapped, 0, density)
        return wrapped, fused_adamw(model)

    return make


def ours(name: str, **settings: object) -> Factory:
    """An optimizer of compopt under DDP, which it silences."""

    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        optimizer_class = getattr(importlib.import_module("compopt"), name)
        wrapped = DDP(model, process_group=group)
        return wrapped, optimizer_class(model.named_parameters(), lr=LEARNING_RATE, process_group=group, **settings)

    return make


def tracked(rank: int) -> Factory:
    """PowerSGD's factors as int8, around AdamS: rank 16 takes the bytes of rank 4 in float32."""

    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        compopt = importlib.import_module("compopt")
        base = compopt.AdamS(model.parameters(), lr=LEARNING_RATE)
        options = dict(projection="tracked", rank=rank, payload_dtype=torch.int8, dense_steps=1)
        return DDP(model, process_group=group), compopt.Separate(base, process_group=group, **options)

    return make


def fsdp(keep: bool, name: str = "TagcAdamW", low: bool = False, **settings: object) -> Factory:
    """FSDP2 over all ranks, a block at a time, with torch's AdamW, or with ours in its reduce-scatter.

    keep: parameters stay gathered from forward to backward. low: computed, gathered and reduced in bfloat16.
    """

    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        mesh = DeviceMesh.from_group(group, "cpu")
        options = dict(mesh=mesh, reshard_after_forward=not keep)
        if low:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if not settings:
            return model, fused_adamw(model)
        kind = getattr(importlib.import_module("compopt"), name)
        return model, kind(model.named_parameters(), lr=LEARNING_RATE, process_group=group, **settings)

    return make


def local(delay: int = 0, fragments: int = 1) -> Factory:
    """Rounds of 30 steps from the first one on, exchanged in int4."""

    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        options = dict(delay=delay, fragments=fragments, growth_steps=0, process_group=group)
        compopt = importlib.import_module("compopt")
        return DDP(model, process_group=group), compopt.LocalSteps(fused_adamw(model), EVERY, **options)

    return make


SKETCH = dict(density=0.0125, codec="sketch", sketch_ratio=10)
EVERY_MATRIX = r"(qkv|out|up|down|head|token|position)\.weight$"  # the paper leaves queries, keys and values out
METHODS: dict[str, Factory] = {
    "none": alone,
    "ddp": ddp,
    "powersgd": powersgd(4),
    "powersgd32": powersgd(32),
    "topk": topk(0.01),
    "radius": ours("RadiusAdamW", density=0.4, interval=200, dense_steps=1),
    "scape": ours("ScapeAdamS", density=0.01, density_steps=0),
    "separate": ours("SeparateAdam", projection="gaussian", ratio=16),
    "adam": ours("SeparateAdam", dense_steps=1),
    "tagc0.0125": ours("TagcAdamW", density=0.0125),
    "tagc0.0125bf16": ours("TagcAdamW", density=0.0125, payload_dtype=torch.bfloat16),
    **{
        f"tagc0.0125{word}": ours("TagcAdamW", density=0.0125, payload_dtype=torch.bfloat16, update_dtype=word)
        for word in ("int8", "int4")
    },
    **{
        f"{name}-auto": ours(cls, when="auto", **settings)
        for name, cls, settings in (
            ("radius", "RadiusAdamW", dict(density=0.4, interval=200, dense_steps=1)),
            ("scape", "ScapeAdamS", dict(density=0.01, density_steps=0)),
            ("separate", "SeparateAdam", dict(projection="gaussian", ratio=16)),
            ("tagc", "TagcAdamW", {}),
        )
    },
    "fsdp": fsdp(False),
    "fsdp-keep": fsdp(True),
    "fsdp-tagc": fsdp(False, density=0.0125),
    "fsdp-tagc-all": fsdp(False, density=0.0125, select=EVERY_MATRIX),
    "fsdp-tagc-all-sketch": fsdp(False, **SKETCH, select=EVERY_MATRIX),
    "fsdp-separate": fsdp(False, "SeparateAdam", projection="gaussian", ratio=16),
    "fsdp-tracked": fsdp(False, "SeparateAdam", rank=16, dense_steps=1),
    "fsdp-keep-tracked": fsdp(True, "SeparateAdam", rank=16, dense_steps=1),
    "fsdp-tracked-int8": fsdp(False, "SeparateAdam", rank=16, dense_steps=1, gather_dtype="int8"),
    "fsdp-keep-tracked-int8": fsdp(True, "SeparateAdam", rank=16, dense_steps=1, gather_dtype="int8"),
    "fsdp-bf16": fsdp(False, low=True),
    "fsdp-keep-bf16": fsdp(True, low=True),
    "fsdp-bf16-tracked-int8": fsdp(False, "SeparateAdam", low=True, rank=16, dense_steps=1, gather_dtype="int8"),
    "fsdp-keep-bf16-tracked-int8": fsdp(True, "SeparateAdam", low=True, rank=16, dense_steps=1, gather_dtype="int8"),
    "fsdp-keep-tagc-all": fsdp(True, density=0.0125, select=EVERY_MATRIX),
    "tracked16": tracked(16),
    "local": local(),
    "local-delay1": local(1),
    "local-delay30": local(30),
    "local-fragments": local(1, 4),
}
DEFAULT_METHODS = ["none", "ddp", "powersgd", "radius", "scape", "separate"]
DEFAULT_RATES = ["unshaped", "10gbit", "1gbit", "100mbit"]


# Turns


class Runner:
    """One method in one rank, and what its timed steps measured.

    Args:
        name: what its results are known by.
        model: called as model(inputs, targets), returns the loss.
        optimizer: steps on the model's gradients.
        batch: returns the next (inputs, targets).
        stats: has `phase` and `bytes_sent` of the last step; None takes the optimizer's own, if it has them.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Callable[[], tuple[Tensor, Tensor]],
        stats: object | None = None,
    ) -> None:
        self.name, self.model, self.optimizer, self.batch = name, model, optimizer, batch
        self.stats = stats
        self.seconds: list[float] = []
        self.cpu_seconds = 0.0  # of the timed steps, all threads
        self.counted: list[int] = []  # bytes that the method itself says it sent, where it says so
        self.phases: list[str] = []  # of the timed steps, likewise
        self.round_trip: float | None = None  # of a byte, before the first step
        self.sent: int | None = 0  # bytes of all timed steps on this rank's socket

    def step(self) -> None:
        self.model(*self.batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, steps: int) -> None:
        dist.barrier()
        self.step()
        before, cpu = sent_bytes(), time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            self.seconds.append(time.perf_counter() - start)
            stats = self.stats or getattr(self.optimizer, "stats", None)
            if stats is not None:
                self.counted.append(stats.bytes_sent)
                self.phases.append(stats.phase)
        after = sent_bytes()
        self.cpu_seconds += time.process_time() - cpu
        self.sent = None if before is None or after is None else self.sent + after - before

    def result(self) -> dict:
        steps = len(self.seconds)
        return {
            "method": self.name,
            "round_trip": self.round_trip,
            "seconds": self.seconds,
            "cpu_share": self.cpu_seconds / sum(self.seconds),
            "bytes": None if self.sent is None else self.sent / steps,
            "counted": self.counted,
            "phases": self.phases,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }


def interleave(runners: Sequence[Runner], rounds: int, steps: int) -> None:
    """In each rank, after init_process_group: time `rounds` blocks of `steps` steps of each runner, in turn.

    Rank 0 prints all ranks' results as JSON, a list of runners a rank, in its last line.
    """
    for _ in range(rounds):
        for runner in runners:
            runner.block(steps)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [runner.result() for runner in runners])
    if dist.get_rank() == 0:
        print(json.dumps(gathered))


def over_links(
    worker: Sequence[str],
    ranks: int,
    rate: str,
    burst: int | None = None,
    timeout: float = 1800,
    round_trip: float | None = None,
) -> tuple[str, list[tuple[dict, ...]]]:
    """Run a worker that ends in `interleave`, a process a rank, over links of this rate ("unshaped": no shaping).

    Returns:
        The rate, or "loopback" where links cannot be made; for each runner its results on all ranks.
    """
    with Links(ranks, None if rate == "unshaped" else rate, burst, round_trip) as links:
        shaped = links.private
        outputs = links.run(worker, timeout=timeout)
    gathered = json.loads(outputs[0].splitlines()[-1])
    return rate if shaped else "loopback", list(zip(*gathered, strict=True))


def measure_round_trip() -> float:
    """Seconds that a byte to the next rank and its answer take: the median of some. Called on all ranks."""
    rank, seconds, byte = dist.get_rank(), [], torch.zeros(1, dtype=torch.uint8)
    for _ in range(PINGS):
        start = time.perf_counter()
        if rank == 0:
            dist.send(byte, 1)
            dist.recv(byte, 1)
        elif rank == 1:
            dist.recv(byte, 0)
            dist.send(byte, 0)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def warn_if_busy(cpu_share: float) -> None:
    """Say so if steps without communication did not get their core to themselves."""
    if cpu_share < 0.9:
        print(f"Other work kept this machine busy: without communication a step got {cpu_share:.0%} of its core.")


def work(methods: list[str], rounds: int, steps: int, batch: int, small: bool) -> None:
    """One rank: build every method, settle it, time blocks in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches, runners, round_trip = Batches(dist.get_rank(), batch), [], measure_round_trip()
    for name in methods:
        runners.append(Runner(name, *METHODS[name](make_model(small=small), dist.new_group()), batches.next))
        settle = EVERY + EVERY // 2 if name.startswith("local") else TRIAL if name.endswith("-auto") else SETTLE
        runners[-1].round_trip = round_trip
        for _ in range(settle):
            runners[-1].step()
    interleave(runners, rounds, steps)
    del runners  # before the group: see docs/troubleshooting.md
    dist.destroy_process_group()


def summarise(rate: str, ranks: int, gathered: list[tuple[dict, ...]]) -> list[dict]:
    """One row per method: medians over all timed steps of all ranks, ratios within this run."""
    rows = []
    for results in gathered:
        seconds = [second for result in results for second in result["seconds"]]
        low, middle, high = statistics.quantiles(seconds, n=4)
        first = results[0]
        sent = None if first["bytes"] is None else statistics.mean(result["bytes"] for result in results)
        rows.append(
            {
                "rate": rate,
                "ranks": ranks,
                "round_trip_ms": 1e3 * first["round_trip"],
                "method": first["method"],
                "step_ms": 1e3 * middle,
                "iqr_ms": 1e3 * (high - low),
                "mean_ms": 1e3 * statistics.mean(seconds),
                "slowest_to_median": max(seconds) / middle,
                "socket_bytes": sent,
                "socket_bytes_per_parameter": None if sent is None else sent / first["parameters"],
                "counted_bytes": statistics.median(first["counted"]) if first["counted"] else None,
                "cpu_share": statistics.mean(result["cpu_share"] for result in results),
                "phase": "+".join(sorted(set(first["phases"]))),
            }
        )
    step = {row["method"]: row["step_ms"] for row in rows}
    for row in rows:
        row["to_none"] = row["step_ms"] / step["none"] if "none" in step else None
        row["to_ddp"] = row["step_ms"] / step["ddp"] if "ddp" in step else None
        row["exposed_ms"] = row["step_ms"] - step["none"] if "none" in step else None
    return rows


COLUMNS = {
    "step_ms": ("step ms", "8.0f"),
    "iqr_ms": ("IQR ms", "8.0f"),
    "mean_ms": ("mean ms", "8.0f"),
    "slowest_to_median": ("slowest x", "8.2f"),
    "to_none": ("x none", "8.2f"),
    "to_ddp": ("x ddp", "8.2f"),
    "exposed_ms": ("exposed ms", "12.0f"),
    "socket_bytes": ("socket B/step", "15,.0f"),
    "socket_bytes_per_parameter": ("B/parameter", "13.3f"),
    "counted_bytes": ("own count B", "13,.0f"),
    "phase": ("phase", ">18"),
}


def show(rows: list[dict]) -> None:
    print(f"\n{rows[0]['rate']}, {rows[0]['ranks']} ranks, a round trip of {rows[0]['round_trip_ms']:.2f} ms")
    print_rows(rows, COLUMNS, "method", 28)
    if rows[0]["method"] == "none":
        warn_if_busy(rows[0]["cpu_share"])


def save(rows: list[dict], name: str) -> None:
    write_rows(RESULTS / f"{name}.csv", rows)
    if name == "links":  # the picture of docs/measured.md
        plot(rows, RESULTS / "links.png")


def plot(rows: list[dict], path: Path) -> None:
    """A panel a rate, a bar a method: step time, labelled with its ratio to no communication."""
    rates, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("rate", "method"))
    size = (1.5 + 2.6 * len(rates), 1 + 0.26 * len(methods))
    with drawing(path, len(rates), size, sharey=True) as (figure, panels):
        for panel, rate in zip(panels, rates, strict=True):
            mine = [row for row in rows if row["rate"] == rate]
            colours = ["#9a9a9a" if row["method"] == "none" else "#3b6ea8" for row in mine]
            bars = panel.barh([row["method"] for row in mine], [row["step_ms"] for row in mine], color=colours)
            labels = ["" if row["to_none"] is None else f"{row['to_none']:.2f}x" for row in mine]
            panel.bar_label(bars, labels, fontsize=8, padding=2)
            panel.set_title(rate, fontsize=10)
            panel.set_xlabel("step time, ms")
            panel.margins(x=0.2)
        panels[0].invert_yaxis()
        figure.suptitle(f"{rows[0]['ranks']} ranks: step time, and its ratio to no communication", fontsize=11)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, "--methods", METHODS, DEFAULT_METHODS)
    parser.add_argument("--rates", nargs="+", default=DEFAULT_RATES, help="'unshaped', or as tc writes it: 100mbit")
    trips = "ms that frames are held, there and back, by a process in place of a bridge"
    parser.add_argument("--round-trips", nargs="+", type=float, default=[None], metavar="MS", help=trips)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="blocks per method")
    parser.add_argument("--steps", type=int, default=2, help="timed steps per block")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 bytes a rank and step")
    small = "a model of 0.14 M parameters, whose bytes take no time: what is left is latency"
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--save", default="links", metavar="NAME", help="name of the CSV in results/")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1 or options.rounds * options.steps < 2:
        parser.error("--rounds and --steps must be at least 1, with at least 2 timed steps in all.")
    for rate in options.rates:
        if rate != "unshaped":
            bits_per_second(rate)
    return options


def main() -> None:
    options = arguments()
    if options.worker:
        work(options.methods, options.rounds, options.steps, options.batch, options.small)
        return
    worker = [sys.executable, __file__, "--worker", "--methods", *options.methods]
    worker += ["--rounds", str(options.rounds), "--steps", str(options.steps), "--batch", str(options.batch)]
    worker += ["--small"] * options.small
    rows: list[dict] = []
    for rate, trip in itertools.product(options.rates, options.round_trips):
        seconds = None if trip is None else trip / 1e3
        label, gathered = over_links(worker, options.ranks, rate, round_trip=seconds)
        measured = summarise(label, options.ranks, gathered)
        show(measured)
        rows += measured
        if label == "loopback":
            break  # the other rates would measure loopback again
    save(rows, options.save)


if __name__ == "__main__":
    main()
