"""The ladder's rows, their runs, trained with a checkpoint and kept a line each, and the search for their settings.

A run is claimed by one process at a time. The search goes on until no neighbour of the best is untried.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import _rivals
import torch
from _ladder_ranks import (
    AVERAGED_SHARE,
    SIZES,
    AlikeLockstep,
    Lockstep,
    OneReplica,
    Ranks,
    StackedGPT,
    Text,
    Threads,
    Views,
    validate,
)

import compopt

ADAMW = dict(betas=(0.9, 0.95), weight_decay=0.1)  # of every row
DENSE = 10  # steps, averaged whole at the start of PowerSGD, and of SeparateAdam by default
MOMENTA, OUTER_LRS = (0.0, 0.3, 0.6, 0.8, 0.9), (0.7, 1.0)


class Run(NamedTuple):
    """The key of a run. ``tokens`` are per parameter; outer settings are those of local steps."""

    row: str
    size: str
    lr: float
    outer_lr: float | None = None
    momentum: float | None = None
    seed: int = 0
    ranks: int = 4
    tokens: float = 20
    products: str = "bfloat16"


Make = Callable[[Run, int, Views, Any], torch.optim.Optimizer]  # of a run, its steps, a replica, its ranks


@dataclass(frozen=True)
class Row:
    """The making and stepping of a method. ``momentum`` is None where there is no outer optimizer."""

    make: Make
    ranks: type[Ranks]
    lr: float  # to begin with
    momentum: float | None = None

    def start(self, size: str, **others: Any) -> Run:
        """The run the search begins with."""
        has_rate = self.momentum is not None and getattr(self.make, "outer_lr", None) is None
        outer_lr = 1.0 if has_rate else None
        return Run(next(n for n, row in ROWS.items() if row is self), size, self.lr, outer_lr, self.momentum, **others)

    def replicas(self, ranks: int) -> int:
        return 1 if issubclass(self.ranks, OneReplica) else ranks

    def build(self, run: Run, steps: int, model: StackedGPT) -> Ranks:
        return self.ranks(model, lambda views, group: self.make(run, steps, views, group), run.ranks)


def adamw(run: Run, steps: int, views: Views, group: Any = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(views.values(), run.lr, fused=True, **ADAMW)


def muon(run: Run, steps: int, views: Views, group: Any = None, **options: Any) -> torch.optim.Optimizer:
    """Muon on the matrices of the blocks; AdamW on embeddings, head and vectors."""
    groups = [{"params": list(views.items()), "fused": True}]
    return compopt.MuonAdamW(groups, run.lr, **options, **ADAMW)


# NorMuon, with the momentum that was better than 0.95 in DDP and in local steps alike.
normuon = functools.partial(muon, momentum=0.9, normalize="rows")


def of_class(cls: str, dense_share: float = 0.0, **options: Any) -> Make:
    """A class of compopt by its name; ``dense_share`` of its steps are dense, 0: as many as it has by default."""

    def make(run: Run, steps: int, views: Views, group: Any) -> torch.optim.Optimizer:
        start = {"dense_steps": round(dense_share * steps)} if dense_share else {}
        return getattr(compopt, cls)(views.items(), run.lr, process_group=group, **ADAMW, **start, **options)

    return make


def separate_muon(
    run: Run, steps: int, views: Views, group: Any, make: Make = muon, rank: int = 16, **options: Any
) -> torch.optim.Optimizer:
    inner = make(run, steps, views, None)
    return compopt.Separate(inner, projection="tracked", rank=rank, process_group=group, **options)


@dataclass(frozen=True)
class Local:
    """Local steps, whose rounds grow over ``growth`` steps (None: the whole run)."""

    inner: Make
    every: int
    growth: int | None = None
    payload_dtype: str = "int2"
    outer_lr: str | None = None  # None: the run's

    def growth_of(self, steps: int) -> int:
        return steps if self.growth is None else self.growth

    def __call__(self, run: Run, steps: int, views: Views, group: Any) -> torch.optim.Optimizer:
        return compopt.LocalSteps(
            self.inner(run, steps, views),
            self.every,
            payload_dtype=self.payload_dtype,
            outer_lr=self.outer_lr or run.outer_lr,
            outer_momentum=run.momentum,
            growth_steps=self.growth_of(steps),
            average_anchors=AVERAGED_SHARE,
            process_group=group,
        )


def power_sgd(run: Run, steps: int, views: Views, group: Any) -> torch.optim.Optimizer:
    return _rivals.PowerSGD([*views.values()], run.lr, rank=4, group=group, dense=DENSE, **ADAMW)


def demo(run: Run, steps: int, views: Views, group: Any) -> torch.optim.Optimizer:
    options = dict(k=8, over_senders=True, weight_decay=ADAMW["weight_decay"])
    return _rivals.DeMo([*views.values()], run.lr, group=group, **options)


def sparse_loco(run: Run, steps: int, views: Views, group: Any) -> torch.optim.Optimizer:
    """Without a dense start, as in the paper: at 0.2 M ten dense steps would send five times what all rounds do. The
    first round is shorter by what is left over, so that the last one ends with the run.
    """
    options = dict(every=15, first=steps % 15 or 15, over_senders=True)
    return _rivals.SparseLoCo([*views.values()], run.lr, group=group, **options, **ADAMW)


def vary_default(**changes: Any) -> Row:
    """LocalSteps(Muon) at its defaults, less these."""
    return Row(Local(**dict(inner=muon, every=30, growth=800, payload_dtype="int4") | changes), Lockstep, 8e-3, 0.6)


BASELINES = ("DDP + AdamW", "DDP + Muon", "DDP + NorMuon")
MAIN = {
    "DDP + AdamW": Row(adamw, OneReplica, 8e-3),
    "DDP + Muon": Row(muon, OneReplica, 8e-3),
    "DDP + NorMuon": Row(normuon, OneReplica, 8e-3),
    "LocalSteps(NorMuon) 30": Row(Local(normuon, 30, 800, "int4", "auto"), Lockstep, 8e-3, 0.6),
    "LocalSteps(NorMuon) 140": Row(Local(normuon, 140, outer_lr="auto"), Lockstep, 4e-3, 0.6),
    "Separate(NorMuon) 16": Row(functools.partial(separate_muon, make=normuon), AlikeLockstep, 8e-3),
    "LocalSteps(Muon) 30": Row(Local(muon, 30), Lockstep, 8e-3, 0.3),
    "LocalSteps(Muon) 140": Row(Local(muon, 140), Lockstep, 8e-3, 0.6),
    "Separate(Muon) 16": Row(separate_muon, AlikeLockstep, 8e-3),
    "SeparateAdam": Row(of_class("SeparateAdam"), Lockstep, 8e-3),
    "LocalSteps(Muon) 30, short start": Row(Local(muon, 30, 100), Lockstep, 8e-3, 0.3),
    "LocalSteps(Muon) 30, int4, 800": Row(Local(muon, 30, 800, "int4"), Lockstep, 8e-3, 0.3),
    "LocalSteps(AdamW) 30": Row(Local(adamw, 30), Lockstep, 8e-3, 0.6),
    "LocalSteps(AdamW) 30, int4, 800": Row(Local(adamw, 30, 800, "int4"), Lockstep, 4e-3, 0.6),
    "LocalSteps(AdamW) 140": Row(Local(adamw, 140), Lockstep, 4e-3, 0.6),
    "PowerSGD 4": Row(power_sgd, Threads, 8e-3),
    "DeMo 8": Row(demo, Threads, 1e-3),
    "SparseLoCo 15": Row(sparse_loco, Threads, 4e-3),
}
VARIANTS = {  # of LocalSteps(Muon) at its defaults, "30, int4, 800", and of Separate(Muon)
    "SeparateAdam, residual in int8": Row(of_class("SeparateAdam", residual_dtype="int8"), Lockstep, 4e-3),
    "LocalSteps(Muon) 8, int2, 800": vary_default(every=8, payload_dtype="int2"),
    "LocalSteps(Muon) 16, int4, 800": vary_default(every=16),
    "LocalSteps(Muon) 30, int4": vary_default(growth=None),
    "LocalSteps(Muon) 30, float32, 800": vary_default(payload_dtype="float32"),
    "LocalSteps(Muon) 1, float32": vary_default(every=1, payload_dtype="float32"),
    "Separate(Muon) 16, int4": Row(functools.partial(separate_muon, payload_dtype="int4"), AlikeLockstep, 8e-3),
    "Separate(Muon) 8, int4": Row(functools.partial(separate_muon, rank=8, payload_dtype="int4"), AlikeLockstep, 8e-3),
    "Separate(Muon) 4, int4": Row(functools.partial(separate_muon, rank=4, payload_dtype="int4"), AlikeLockstep, 8e-3),
}
for rank, dtype in {32: "int8", 24: "int8", 16: "float32"}.items():
    make = functools.partial(separate_muon, rank=rank, payload_dtype=dtype, make=normuon)
    VARIANTS[f"Separate(NorMuon) {rank}, {dtype}"] = Row(make, AlikeLockstep, 8e-3)
for momentum in (0.8, 0.95):  # of NorMuon, where the rows above have 0.9
    make = functools.partial(separate_muon, make=functools.partial(normuon, momentum=momentum))
    VARIANTS[f"Separate(NorMuon) 16, momentum {momentum}"] = Row(make, AlikeLockstep, 4e-3)
make = functools.partial(separate_muon, make=normuon, ef_beta=0.05)
VARIANTS["Separate(NorMuon) 16, ef_beta 0.05"] = Row(make, AlikeLockstep, 4e-3)
for momentum in (0.8, 0.85, 0.9, 0.98):  # of Muon, where the rows above have 0.95
    inner = functools.partial(muon, momentum=momentum)
    VARIANTS[f"LocalSteps(Muon) 30, int4, 800, inner momentum {momentum}"] = vary_default(inner=inner)
VARIANTS["LocalSteps(Muon) 30, int4, 800, auto"] = vary_default(outer_lr="auto")
VARIANTS["LocalSteps(NorMuon) 30, a fixed outer rate"] = vary_default(inner=normuon)
VARIANTS["LocalSteps(Muon) 30, outer momentum 0.8"] = replace(vary_default(), lr=4e-3, momentum=0.8)
VARIANTS["LocalSteps(NorMuon) 30, outer momentum 0.8"] = replace(vary_default(inner=normuon), lr=4e-3, momentum=0.8)
VARIANTS["LocalSteps(NorMuon) 30, inner momentum 0.95"] = replace(
    vary_default(inner=functools.partial(normuon, momentum=0.95)), lr=4e-3, momentum=0.8
)
VARIANTS["LocalSteps(NorMuon) 30, outer momentum 0.8, auto"] = replace(
    vary_default(inner=normuon, outer_lr="auto"), lr=4e-3, momentum=0.8
)
VARIANTS["DDP + NorMuon, momentum 0.95"] = Row(functools.partial(normuon, momentum=0.95), OneReplica, 8e-3)
for name, inner in {"Muon": muon, "NorMuon": normuon}.items():
    changes = dict(every=1, payload_dtype="float32", outer_lr="auto")
    VARIANTS[f"LocalSteps({name}) 1, float32, auto"] = replace(vary_default(inner=inner, **changes), momentum=0.0)
VARIANTS["DDP + Muon, momentum 0.9"] = Row(functools.partial(muon, momentum=0.9), OneReplica, 8e-3)
ROWS = MAIN | VARIANTS


# Runs

HERE = Path(__file__).parent
OTHER = os.environ.get("COMPOPT_LADDER")  # a folder for runs that are not to be kept with the others
KEPT = Path(OTHER or HERE / "results") / "ladder.jsonl"
UNFINISHED = Path(OTHER or HERE.parent / "runs") / "ladder"
WARMUP, EVALS, SAVE_EVERY = 40, 10, 120  # steps in which the rate rises; of a run; seconds between checkpoints


def count_steps(run: Run, parameters: int) -> int:
    size = SIZES[run.size]
    return round(run.tokens * parameters / (run.ranks * size.batch * size.context))


def scheduled(lr: float, step: int, steps: int) -> float:
    """A rise over 40 steps, and a cosine down to a tenth."""
    return lr * min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


class Training:
    """A run under way; ``save`` and ``load`` continue it to the bit."""

    def __init__(self, run: Run, device: str = "cpu", data: str | None = None, dtype: torch.dtype = torch.float32):
        self.run, self.device, row = run, torch.device(device), ROWS[run.row]
        model = SIZES[run.size].make(run.seed).to(self.device, dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.steps = count_steps(run, self.parameters)
        self.text, self.source = Text(SIZES[run.size], run.ranks, run.seed, data), data or "standard library"
        products = None if run.products == str(dtype).removeprefix("torch.") else getattr(torch, run.products)
        self.replicas = row.replicas(run.ranks)
        self.model = StackedGPT(model, self.replicas, products)
        self.ranks = row.build(run, self.steps, self.model)
        self.step, self.seconds, self.losses, self.evals = 0, 0.0, [], []

    def advance(self) -> None:
        """Take a step, and an evaluation where one is due."""
        begin = time.perf_counter()
        x, y = (part.to(self.device) for part in self.text.next())
        shape = (self.replicas, -1, x.shape[-1])
        losses = self.model.backward(x.reshape(shape), y.reshape(shape))
        self.ranks.step(scheduled(self.run.lr, self.step, self.steps))
        self.step += 1
        if self.step == self.steps:
            self.ranks.finish()
        self.losses.append(math.fsum(losses) / len(losses))
        self.seconds += time.perf_counter() - begin
        if self.step * EVALS // self.steps > (self.step - 1) * EVALS // self.steps:
            mean, self.losses = math.fsum(self.losses) / len(self.losses), []
            loss = validate(self.model, self.text, self.device)
            self.evals.append({"step": self.step, "train_loss": round(mean, 5), "val_loss": round(loss, 5)})

    @property
    def is_over(self) -> bool:
        """At its end, or diverged."""
        return self.step == self.steps or (self.losses[-1:] != [] and not math.isfinite(self.losses[-1]))

    def save(self, path: Path) -> None:
        names = ("step", "seconds", "losses", "evals")
        saved = {name: getattr(self, name) for name in names} | {"ranks": self.ranks.state_dict()}
        torch.save(saved, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=False, map_location=self.device)
        self.ranks.load_state_dict(saved.pop("ranks"))
        self.__dict__ |= saved
        for _ in range(self.step):
            self.text.next()

    def line(self) -> dict[str, Any]:
        """Return what is kept of the run."""
        dense = 4 * self.parameters * max(1, self.step)
        finished = self.step == self.steps and math.isfinite(self.evals[-1]["val_loss"])
        with self.ranks.use_average() as is_kept:
            averaged = validate(self.model, self.text, self.device) if is_kept and finished else None
        return self.run._asdict() | {
            "parameters": self.parameters,
            "steps": self.steps,
            "val_loss": self.evals[-1]["val_loss"] if finished else None,
            "averaged_loss": averaged and round(averaged, 5),  # of the mean of the run's end
            "bytes": self.ranks.bytes_sent,
            "share": round(self.ranks.bytes_sent / dense, 6),
            "seconds": round(self.seconds, 1),
            "device": self.device.type,
            "text": Path(self.source).name,
            "evals": self.evals,
        }


def slug(run: Run) -> str:
    return re.sub(r"[^\w.]+", "-", "_".join(map(str, run)))


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[bool]:
    """True if the run is this process's while the context lasts: a lock that ends with the process."""
    UNFINISHED.mkdir(parents=True, exist_ok=True)
    with (UNFINISHED / f"{slug(run)}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield run not in kept()


def kept(path: Path | None = None) -> dict[Run, dict[str, Any]]:
    """All runs there are; of two of the same name, the later."""
    path = path or KEPT
    lines = path.read_text().splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    return {Run(*(line[name] for name in Run._fields)): line for line in runs}


def keep(line: dict[str, Any]) -> None:
    with KEPT.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def train(run: Run, device: str, data: str | None, until: float = math.inf) -> bool:
    """Train a run, or go on with it, and keep its line. False if the time ``until`` which to train was over before."""
    warnings.simplefilter("ignore")
    training, path = Training(run, device, data), UNFINISHED / f"{slug(run)}.pt"
    if path.exists():
        training.load(path)
    print(f"{time.strftime('%H:%M:%S')} {describe(run)}, {training.steps} steps", flush=True)
    saved_at = time.time()
    while not training.is_over:
        training.advance()
        is_over_time = time.time() > until
        if is_over_time or time.time() - saved_at > SAVE_EVERY:
            training.save(path)
            saved_at = time.time()
        if is_over_time and not training.is_over:
            return False
    line = training.line()
    keep(line)
    path.unlink(missing_ok=True)
    print(f"    {line['val_loss']}, {line['share']:.2%} of the bytes, {line['seconds']:.0f} s", flush=True)
    return True


def describe(run: Run) -> str:
    rate = "auto" if run.outer_lr is None else f"{run.outer_lr:g}"
    outer = "" if run.momentum is None else f", outer lr {rate}, momentum {run.momentum:g}"
    return f"{run.size}: {run.row}, lr {run.lr:g}{outer}, seed {run.seed}, {run.ranks} ranks, {run.products}"


# The search

Lines = Mapping[Run, dict[str, Any]]  # finished runs, and the line that is kept of each


def loss_of(line: dict[str, Any]) -> float:
    """Infinite where the run has diverged."""
    return math.inf if line["val_loss"] is None else line["val_loss"]


def best_of(runs: Lines, like: Run) -> Run | None:
    """The best run of the row, among those that differ from ``like`` in what is tuned."""
    tuned = {"lr": like.lr, "outer_lr": like.outer_lr, "momentum": like.momentum}
    alike = [run for run in runs if run._replace(**tuned) == like]
    return min(alike, key=lambda run: loss_of(runs[run]), default=None)


def neighbours(run: Run, outer: bool) -> Iterator[Run]:
    """Twice and half its rate; with ``outer`` the momenta beside its own, and the other outer rates."""
    yield run._replace(lr=run.lr * 2)
    yield run._replace(lr=run.lr / 2)
    if outer and run.momentum is not None:
        at = MOMENTA.index(run.momentum)
        yield from (run._replace(momentum=momentum) for momentum in MOMENTA[max(0, at - 1) : at + 2])
        yield from (run._replace(outer_lr=rate) for rate in OUTER_LRS)


def list_missing(runs: Lines, start: Run, outer: bool) -> list[Run]:
    """The runs to do next: the start, then what is missing around the best. Empty: the best is at no edge."""
    best = best_of(runs, start)
    if best is None:
        return [start]
    return [run for run in neighbours(best, outer) if run not in runs]


def start_of(row: str, size: str, runs: Lines, **others: Any) -> Run:
    """The best of the next smaller size that has runs of the row, else the row's own start."""
    start = ROWS[row].start(size, **others)
    names = list(SIZES)
    for smaller in reversed(names[: names.index(size)]):
        if best := best_of(runs, start._replace(size=smaller)):
            return best._replace(size=size)
    return start
