"""The table of conformance: a new optimizer joins by adding a line to CASES.

``compressed`` makes the class do all it can do within a dozen steps (dense start, selection, sparse steps);
``lossless`` makes it drop nothing, and then it must equal ``reference`` on the averaged gradient.
The settings in which it works follow from the class: with sharded state if it has the option ``sharded``, inside FSDP2
if it has a reducer, and as the outer optimizer of local steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import compopt
from compopt._fsdp.fsdp_backward import ReducingOptimizer
from compopt._inside.wrapper import Wrapper

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from randomk import RandomK


def as_group_of_base(given: Any) -> Any:
    """Return a group with the name that ``compress`` has in a group of a base."""
    if not isinstance(given, dict) or "compress" not in given:
        return given
    others = {name: value for name, value in given.items() if name != "compress"}
    return {**others, "compopt_compress": given["compress"]}


@dataclass(frozen=True)
class Case:
    cls: type[torch.optim.Optimizer]
    compressed: dict[str, Any]
    lossless: dict[str, Any]
    reference: Callable[..., torch.optim.Optimizer]
    lr: float = 1e-2
    method: str = "adamw"  # which row of the toy problems' table it has to reach, and what it conserves
    problems: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # losses to reach instead, where the class differs
    bad: dict[str, list[Any]] = field(default_factory=dict)
    build: Callable[..., torch.optim.Optimizer] | None = None  # from params and options, where that is not ``cls``
    form: str = ""  # of a class that has several
    # with these every step averages gradients, where the class also takes steps of a rank's own
    averaging: dict[str, Any] = field(default_factory=dict)
    several: bool = False  # optimizers inside: one of them is given a new group
    draws: bool = False  # rounds by random bits: minus a gradient is not rounded to minus what the gradient is

    @property
    def name(self) -> str:
        return f"{self.cls.__name__}{self.form and ', '}{self.form}"

    @property
    def sharded(self) -> bool:
        """Return True if each rank keeps state of its own shard only."""
        return self.cls.sharded or self.compressed.get("sharded", False)

    @property
    def keeps_exactly(self) -> bool:
        """True if residuals are stored as computed."""
        return self.compressed.get("residual_dtype") is None

    @property
    def works_inside(self) -> bool:
        """True if it averages in place of FSDP2's reduce-scatter."""
        return issubclass(self.cls, ReducingOptimizer) and not (self.sends_updates or self.form == "sharded")

    @property
    def sends_updates(self) -> bool:
        """Return True if what is added to parameters is gathered, rounded, and not parameters."""
        return self.compressed.get("update_dtype") is not None

    @property
    def keeps_masters(self) -> bool:
        """Of parameters below float32: else the inner optimizer steps them, or they are refused."""
        return self.build is None and not self.sends_updates

    @property
    def new(self) -> Callable[..., torch.optim.Optimizer]:
        return self.build or self.cls

    def make(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        if issubclass(self.cls, Wrapper):
            params = [as_group_of_base(one) for one in params]
        return self.new(params, **{"lr": self.lr, **self.compressed, **options})

    def add_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        (optimizer.base.members[-1] if self.several else optimizer).add_param_group(group)


def around_adamw(params: Any, lr: float = 1e-3, weight_decay: float = 1e-2, maximize: bool = False, **options: Any):
    return compopt.Separate(torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, maximize=maximize), **options)


def projecting(projection: str, ratio: float = 8, rank: int = 4, **options: Any) -> dict[str, Any]:
    """Options of Separate: how much is left said as this projection has it, no start, nothing rounded."""
    size = {"rank": rank} if projection == "tracked" else {"ratio": ratio}
    return {"projection": projection, **size, "dense_steps": 0, "payload_dtype": None, **options}


GAUSSIAN = dict(projection="gaussian")
SCAPES = dict(betas=(0.9, 0.95), weight_decay=0.1)  # what AdamS's and SCAPE's authors train with


def averaging_adamw(params: Any, lr: float = 1e-3, weight_decay: float = 1e-2, maximize: bool = False, **options: Any):
    return compopt.Average(torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, maximize=maximize), **options)


def local_adamw(params: Any, fused: bool | None = None, **options: Any):
    known = {name: options.pop(name) for name in ("lr", "weight_decay", "maximize") if name in options}
    return compopt.LocalSteps(torch.optim.AdamW(params, fused=fused, **known), **options)


def in_halves(params: Any, **options: Any) -> list[torch.optim.Optimizer]:
    """Two of AdamW, of every second tensor or group."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given[n::2]} for n in range(2)]
    halves = [groups[n::2] or [{"params": []}] for n in range(2)]
    return [torch.optim.AdamW(half, **options) for half in halves]


def split_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take from ``options`` those of the inner optimizers."""
    return {name: options.pop(name) for name in ("lr", "weight_decay", "maximize") if name in options}


def around_several(params: Any, **options: Any):
    return compopt.Separate(in_halves(params, **split_options(options)), **options)


def local_several(params: Any, **options: Any):
    return compopt.LocalSteps(in_halves(params, **split_options(options)), **options)


def is_matrix(name: str, p: torch.Tensor) -> bool:
    return p.ndim == 2 and p.shape[0] != 1  # which FSDP2's ranks cannot share


def negate_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.neg_()


def muon(params: Any, maximize: bool = False, **options: Any) -> compopt.MuonAdamW:
    optimizer = compopt.MuonAdamW(params, use_muon=is_matrix, normalize="rows", **options)
    if maximize:  # which Muon has not
        optimizer.register_step_pre_hook(negate_gradients)
    return optimizer


def averaging_muon(params: Any, **options: Any):
    return compopt.Average(muon(params, **split_options(options)), **options)


def adams(params: Any, **options: Any) -> torch.optim.Optimizer:
    return compopt.AdamS(params, **SCAPES | options)  # itself held against its equation in test_adams.py


ADAM_BAD = {"lr": [-1.0], "eps": [-1e-8], "betas": [(1.0, 0.9), (0.9, -0.1)], "weight_decay": [-0.1]}
COMMON_BAD = {"dense_steps": [-1], "max_grad_norm": [0.0, -1.0], "payload_dtype": [torch.int32, torch.float8_e4m3fn]}

CASES = [
    Case(
        compopt.RadiusAdamW,
        compressed=dict(density=0.4, interval=5, dense_steps=3),
        lossless=dict(density=1.0, interval=3, dense_steps=2),
        reference=torch.optim.AdamW,
        method="radius",
        problems=dict(density=0.4, interval=10),
        bad=ADAM_BAD | COMMON_BAD | {"density": [0.0, 1.5, -0.1], "interval": [0, -3, 2.5]},
    ),
    Case(
        compopt.AdamS,
        compressed=SCAPES | dict(payload_dtype="int8"),
        lossless=SCAPES | dict(payload_dtype=None),
        reference=adams,
        lr=1e-3,
        draws=True,
        bad=ADAM_BAD | {name: COMMON_BAD[name] for name in ("max_grad_norm", "payload_dtype")},
    ),
    Case(
        compopt.ScapeAdamS,
        compressed=SCAPES | dict(density=0.1, dense_steps=2, density_steps=2),
        lossless=SCAPES | dict(density=1.0),
        reference=adams,
        lr=1e-3,
        method="scape",
        problems=dict(betas=(0.9, 0.95), density=0.1, density_steps=0),
        limits={"quadratic": 0.1},  # its one matrix is dealt to the ranks in blocks; plain SGD ends at 0.58
        bad=ADAM_BAD | COMMON_BAD | {"density": [0.0, 1.5], "clip": ["maybe"]},
    ),
    Case(
        compopt.SeparateAdam,
        compressed=GAUSSIAN | dict(ratio=8, dense_steps=2),
        lossless=GAUSSIAN | dict(ratio=1),
        reference=torch.optim.AdamW,
        method="separate",
        problems=GAUSSIAN | dict(ratio=8),
        bad=ADAM_BAD | COMMON_BAD | {"ratio": [0.5], "ef_beta": [-0.5, 1.5], "projection": ["x"]},
    ),
    Case(
        compopt.TagcAdamW,
        compressed=dict(density=0.1, dense_steps=2),
        lossless=dict(density=1.0),
        reference=torch.optim.AdamW,
        bad=ADAM_BAD | COMMON_BAD | {"density": [0.0, 1.1], "codec": ["zip"], "sketch_ratio": [0.5], "select": ["("]},
    ),
    Case(
        compopt.Separate,
        compressed=GAUSSIAN | dict(ratio=8, dense_steps=2),
        lossless=GAUSSIAN | dict(ratio=1),
        reference=torch.optim.AdamW,
        method="separate",
        problems=GAUSSIAN | dict(ratio=8),
        build=around_adamw,
    ),
    Case(
        compopt.Average,
        compressed=dict(payload_dtype=torch.int8),
        lossless=dict(payload_dtype=None),
        reference=torch.optim.AdamW,
        build=averaging_adamw,
        draws=True,
        bad={name: COMMON_BAD[name] for name in ("max_grad_norm", "payload_dtype")},
    ),
    Case(
        compopt.LocalSteps,
        compressed=dict(dense_steps=10**6, payload_dtype=torch.int8),  # its averaged start; rounds are a form of it
        lossless=dict(dense_steps=10**6, payload_dtype=None),
        reference=torch.optim.AdamW,
        build=local_adamw,
        draws=True,
        bad={
            "every": [0, 2.5],
            "fragments": [0],
            "delay": [-1, 31],
            "outer_lr": [0.0],
            "outer_momentum": [1.0],
            "dense_steps": [-1],
            "growth_steps": [-1],
            "max_grad_norm": [0.0],
            "payload_dtype": [torch.int32],
        },
    ),
]

# Other forms of the classes, and docs/writing.md's, which take the tests of conformance only.
FORMS = [
    Case(
        RandomK,
        compressed=dict(density=0.1, dense_steps=2),
        lossless=dict(density=1.0),
        reference=torch.optim.AdamW,
        bad=ADAM_BAD | COMMON_BAD | {"density": [0.0, 1.5, -0.1]},
    ),
    Case(
        compopt.TagcAdamW,
        compressed=dict(density=0.1, dense_steps=2, update_dtype="int4"),
        lossless=dict(density=1.0, update_dtype=None),
        reference=torch.optim.AdamW,
        bad={"update_dtype": ["int16", torch.bfloat16]},
        draws=True,
        form="updates",
    ),
    Case(
        compopt.LocalSteps,
        compressed=dict(every=3, dense_steps=2, growth_steps=2, payload_dtype=torch.int8),
        lossless=dict(dense_steps=100, payload_dtype=None),
        reference=torch.optim.AdamW,
        build=local_adamw,
        draws=True,
        averaging=dict(dense_steps=100),
        form="rounds",
    ),
    # several optimizers inside
    Case(
        compopt.Separate,
        compressed=GAUSSIAN | dict(ratio=8, dense_steps=2),
        lossless=GAUSSIAN | dict(ratio=1),
        reference=torch.optim.AdamW,
        method="separate",
        build=around_several,
        several=True,
        form="several",
    ),
    Case(
        compopt.Average,
        compressed=dict(payload_dtype=torch.int8),
        lossless=dict(payload_dtype=None),
        reference=muon,
        build=averaging_muon,
        draws=True,
        form="Muon",
    ),
    Case(
        compopt.LocalSteps,
        compressed=dict(every=3, dense_steps=2, growth_steps=2, payload_dtype=torch.int8),
        lossless=dict(dense_steps=100, payload_dtype=None),
        reference=torch.optim.AdamW,
        build=local_several,
        several=True,
        draws=True,
        averaging=dict(dense_steps=100),
        form="rounds, several",
    ),
]


def shard(case: Case) -> Case:
    """The form of a class in which each rank keeps the state of its own shard only."""
    options = {name: {**getattr(case, name), "sharded": True} for name in ("compressed", "lossless")}
    return replace(case, form="sharded", bad={}, **options)


def in_int8(case: Case, **options: Any) -> Case:
    """The form of a class whose residuals are stored in 8 bits."""
    compressed = {**case.compressed, "residual_dtype": "int8", **options}
    lossless = {**case.lossless, "residual_dtype": "int8"}
    return replace(case, form="residual in int8", bad={}, compressed=compressed, lossless=lossless)


# Test files that look at residuals take these beside the others; test_int8_residuals.py has tracked columns, and the
# other classes.
INT8 = [
    in_int8(case)
    for case in CASES + FORMS
    if case.name in ("RadiusAdamW", "SeparateAdam", "TagcAdamW", "LocalSteps, rounds")
]
FORMS += [shard(case) for case in CASES + FORMS if "sharded" in inspect.signature(case.cls).parameters]

# Made of what the others have: docs/writing.md's example, and several optimizers inside. Tests of settings, of saving,
# of equal replicas and of what is lossless take these too.
DERIVED = [case for case in FORMS if case.cls is RandomK or case.form == "Muon" or case.form.endswith("several")]
FORMS = [case for case in FORMS if case not in DERIVED]

by_name = {case.name: case for case in CASES}
