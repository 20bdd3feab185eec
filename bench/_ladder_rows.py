"""The rows of the ladder: what each trains with, and where the search for its settings begins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import _rivals
import torch
from _ladder_model import StackedGPT
from _ladder_ranks import (
    AlikeLockstep,
    Lockstep,
    OneReplica,
    Ranks,
    RoundedLockstep,
    RoundedReplica,
    Threads,
    Views,
    WithAveragedMomentum,
    WithoutFeedback,
)

import compopt

ADAMW = dict(betas=(0.9, 0.95), weight_decay=0.1)  # of every row
DENSE = 10  # steps, averaged whole at the start of PowerSGD, and of SeparateAdam by default
MOMENTA, OUTER_LRS = (0.0, 0.3, 0.6, 0.9), (0.7, 1.0)


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
    """How a method is made and stepped. ``momentum`` is None where there is no outer optimizer."""

    make: Make
    ranks: type[Ranks]
    lr: float  # to begin with
    momentum: float | None = None

    def start(self, size: str, **others: Any) -> Run:
        """The run the search begins with."""
        outer_lr = None if self.momentum is None else 1.0
        return Run(next(n for n, row in ROWS.items() if row is self), size, self.lr, outer_lr, self.momentum, **others)

    def replicas(self, ranks: int) -> int:
        return 1 if issubclass(self.ranks, OneReplica) else ranks

    def build(self, run: Run, steps: int, model: StackedGPT) -> Ranks:
        return self.ranks(model, lambda views, group: self.make(run, steps, views, group), run.ranks)


def adamw(run: Run, steps: int, views: Views, group: Any = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(views.values(), run.lr, fused=True, **ADAMW)


def muon(run: Run, steps: int, views: Views, group: Any = None, momentum: float = 0.95) -> torch.optim.Optimizer:
    """Muon on the matrices of the blocks; AdamW on embeddings, head and vectors."""
    groups = [{"params": list(views.items()), "fused": True}]
    return compopt.MuonAdamW(groups, run.lr, momentum=momentum, **ADAMW)


def separate_adam(run: Run, steps: int, views: Views, group: Any, **options: Any) -> torch.optim.Optimizer:
    return compopt.SeparateAdam(views.values(), run.lr, process_group=group, **options, **ADAMW)


def separate_muon(
    run: Run, steps: int, views: Views, group: Any, rank: int = 16, payload_dtype: str = "int8"
) -> torch.optim.Optimizer:
    inner = muon(run, steps, views)
    return compopt.Separate(inner, projection="tracked", rank=rank, payload_dtype=payload_dtype, process_group=group)


@dataclass(frozen=True)
class Local:
    """Local steps, whose rounds grow over ``growth`` steps (None: the whole run)."""

    inner: Make
    every: int
    growth: int | None = None
    payload_dtype: str = "int2"

    def growth_of(self, steps: int) -> int:
        return steps if self.growth is None else self.growth

    def __call__(self, run: Run, steps: int, views: Views, group: Any) -> torch.optim.Optimizer:
        return compopt.LocalSteps(
            self.inner(run, steps, views),
            self.every,
            payload_dtype=self.payload_dtype,
            outer_lr=run.outer_lr,
            outer_momentum=run.momentum,
            growth_steps=self.growth_of(steps),
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


def vary_default(ranks: type[Ranks] = Lockstep, **changes: Any) -> Row:
    """LocalSteps(Muon) at its defaults, less these."""
    return Row(Local(**dict(inner=muon, every=30, growth=800, payload_dtype="int4") | changes), ranks, 8e-3, 0.6)


BASELINES = ("DDP + AdamW", "DDP + Muon")
MAIN = {
    "DDP + AdamW": Row(adamw, OneReplica, 8e-3),
    "DDP + Muon": Row(muon, OneReplica, 8e-3),
    "LocalSteps(Muon) 30": Row(Local(muon, 30), Lockstep, 8e-3, 0.3),
    "LocalSteps(Muon) 140": Row(Local(muon, 140), Lockstep, 8e-3, 0.6),
    "Separate(Muon) 16": Row(separate_muon, AlikeLockstep, 8e-3),
    "SeparateAdam": Row(separate_adam, Lockstep, 8e-3),
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
    "SeparateAdam, residual in int8": Row(functools.partial(separate_adam, residual_dtype="int8"), Lockstep, 4e-3),
    "LocalSteps(Muon) 8, int2, 800": vary_default(every=8, payload_dtype="int2"),
    "LocalSteps(Muon) 16, int4, 800": vary_default(every=16),
    "LocalSteps(Muon) 30, int4": vary_default(growth=None),
    "LocalSteps(Muon) 30, float32, 800": vary_default(payload_dtype="float32"),
    "LocalSteps(Muon) 30, int4, 800, no feedback": vary_default(WithoutFeedback),
    "LocalSteps(Muon) 30, int4, 800, momentum averaged": vary_default(WithAveragedMomentum),
    "LocalSteps(Muon) 1, float32": vary_default(every=1, payload_dtype="float32"),
    "Separate(Muon) 16, int4": Row(functools.partial(separate_muon, payload_dtype="int4"), AlikeLockstep, 8e-3),
    "Separate(Muon) 8, int4": Row(functools.partial(separate_muon, rank=8, payload_dtype="int4"), AlikeLockstep, 8e-3),
    "Separate(Muon) 4, int4": Row(functools.partial(separate_muon, rank=4, payload_dtype="int4"), AlikeLockstep, 8e-3),
}
for momentum in (0.8, 0.85, 0.9, 0.98):  # of Muon, where the rows above have 0.95
    inner = functools.partial(muon, momentum=momentum)
    VARIANTS[f"LocalSteps(Muon) 30, int4, 800, inner momentum {momentum}"] = vary_default(inner=inner)
VARIANTS["FSDP2 + AdamW, gathers in int8"] = Row(adamw, RoundedReplica, 8e-3)
VARIANTS["FSDP2 + SeparateAdam, gathers and residual in int8"] = Row(
    functools.partial(separate_adam, residual_dtype="int8"), RoundedLockstep, 4e-3
)
VARIANTS["DDP + Muon, momentum 0.9"] = Row(functools.partial(muon, momentum=0.9), OneReplica, 8e-3)
ROWS = MAIN | VARIANTS
