"""Draws of the fuzz: tensors of odd shapes and layouts, dtypes, options; and a run of simulated ranks on them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from conformance import through_a_file
from conservation import everywhere
from hypothesis import strategies as st
from sim import World
from table import Case
from torch import Tensor, nn

import compopt

LOW = (torch.bfloat16, torch.float16)
# Beside what the code counts in: 4,096 elements to be compressed, 16,384 to be looked at by a threshold.
LARGE = [(64, 64), (63, 65), (17, 241), (4097,), (128, 128), (127, 129), (5, 3277)]
SMALL = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 17]), max_size=3).map(tuple)
LAYOUTS = ["plain", "plain", "transposed", "strided"]
ABSENT = ["never", "never", "on some ranks", "everywhere at times", "always"]
OPTIONS: dict[str, list[Any]] = {  # of the classes that know them
    "density": [0.2, 0.03, 0.5, 0.9, 1.0],
    "interval": [3, 2, 1],
    "codec": ["compact", "sketch"],
    "sketch_ratio": [2, 10],
    "update_dtype": [None, None, "int8", "int4", "int2"],
    "dense_steps": [1, 0, 2],
    "density_steps": [1, 0],
    "ratio": [2, 7.5, 16, 1],
    "projection": ["gaussian", "tracked"],
    "rank": [1, 4],
    "reset_interval": ["auto", None, 3],
    "adaptive": [False, False, True],
    "adapt_interval": [2],
    "offload": [None, None, "residual"],
}
ROUNDS: dict[str, list[Any]] = {  # of local steps
    "every": [3, 2, 1, 6],
    "dense_steps": [1, 0, 2],
    "growth_steps": [0, 4],
    "fragments": [1, 2],
    "delay": [0, 1],
    "outer_lr": [0.7, 1.0, "auto"],
    "average_anchors": [None, 0.1],
    "outer_momentum": [0.9, 0.6, 0.0],
}
COMMON: dict[str, list[Any]] = {"weight_decay": [0.01, 0.1], "maximize": [False, False, True]}  # of the reference too
REFUSED = (  # what a class may say to what is drawn
    "is not for TagcAdamW: its payload must be exact",
    "is for float32 parameters, to which updates can be added",
    "payload_dtype must be None or a floating-point dtype where state is sharded",
    "adaptive must be False with projection='tracked'",
)


@dataclass(frozen=True)
class Example:
    case: Case
    dtype: torch.dtype
    payload: torch.dtype | str | None
    backend: str
    ranks: int
    groups: list[dict[str, Any]]  # each with the shapes and the layouts of its tensors
    options: dict[str, Any]
    absent: str
    values: str  # of gradients
    steps: int
    saved_at: int  # the step before which all is saved and loaded
    consolidated: bool
    bucket_bytes: int
    seed: int


@st.composite
def examples(draw, case: Case, lossless: bool) -> Example:
    tensors = st.lists(st.tuples(SMALL, st.sampled_from(LAYOUTS)), min_size=1, max_size=4)
    group = st.fixed_dictionaries({"tensors": tensors, "compress": st.sampled_from([True, True, None, False])})
    groups = draw(st.lists(group, min_size=1, max_size=2))
    if draw(st.integers(0, 5)) == 0:
        groups[0]["tensors"].append((draw(st.sampled_from(LARGE)), draw(st.sampled_from(LAYOUTS))))
    known = inspect.signature(case.cls).parameters
    if case.cls is compopt.LocalSteps:
        rest = COMMON if lossless or not case.averaging else ROUNDS | COMMON
    else:
        rest = COMMON if lossless else OPTIONS | COMMON
    options = {name: draw(st.sampled_from(values)) for name, values in rest.items() if name in known or name in COMMON}
    if "every" in options:
        options["delay"] = min(options["delay"], options["every"] // options["fragments"])
    if case.form == "Muon":
        options["maximize"] = False  # which Muon has not
    if "projection" in options:  # says which of the two is refused
        options["ratio" if options["projection"] == "tracked" else "rank"] = None
    payloads = [None, None, torch.bfloat16, torch.float16, "int8", "int4"] if "payload_dtype" in known else [None]
    if case.cls in (compopt.Average, compopt.LocalSteps):
        payloads.append("int2")
    values = ["normal", "normal", "of one size", "mostly zeros"]
    if "every" in options:
        del values[-1]  # ranks that move alike for a round, by decay alone, are taken for averaged by DDP
    low = LOW[:1] if case.build else LOW  # torch's AdamW itself divides 0 by 0 in float16, where its eps is 0
    return Example(
        case,
        draw(st.sampled_from([torch.float32, torch.float32, *low])),
        draw(st.sampled_from(payloads)),
        draw(st.sampled_from(["auto", "auto", "torch"])),
        draw(st.integers(1, 3)),
        groups,
        {**(case.lossless if lossless else {}), **options},
        draw(st.sampled_from(ABSENT)),
        "of one size" if lossless else draw(st.sampled_from(values)),
        steps=draw(st.integers(4, 6)),
        saved_at=draw(st.sampled_from([0, 0, 2, 3, 4])),
        consolidated=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from([8 * 2**20, 200])),
        seed=draw(st.integers(0, 99)),
    )


def to_param_shape(x: Tensor, layout: str) -> Tensor:
    """The same numbers, in other memory."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.dim():
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0, dtype=x.dtype)
        view = wide[..., 1::2]
        return view.copy_(x)
    return x


class Run:
    """Simulated ranks that train on an example's random gradients."""

    def __init__(self, example: Example):
        self.example = example
        self.start(World(example.ranks))

    def start(self, world: World) -> None:
        self.world = world
        self.optimizers = [self.make(comm) for comm in world.comms]

    def make(self, comm: object) -> torch.optim.Optimizer:
        example = self.example
        optimizer = example.case.make(
            [{"params": self.parameters(g, n), "compress": g["compress"]} for n, g in enumerate(example.groups)],
            process_group=comm,
            **{**example.options, **({"payload_dtype": example.payload} if example.payload else {})},
        )
        optimizer.simulate = True  # one rank steps as many would
        return optimizer

    def parameters(self, group: dict[str, Any], number: int) -> list[nn.Parameter]:
        draw = torch.Generator().manual_seed(100 * self.example.seed + number)
        return [
            nn.Parameter(to_param_shape(torch.randn(shape, generator=draw).to(self.example.dtype), layout))
            for shape, layout in group["tensors"]
        ]

    def backward(self, step: int) -> None:
        for rank, optimizer in enumerate(self.optimizers):
            draw = torch.Generator().manual_seed(10_000 * step + 100 * rank + self.example.seed)
            signs = torch.Generator().manual_seed(10_000 * step + self.example.seed)
            for n, p in enumerate(everywhere(optimizer)):
                g = self.gradient(p, draw, signs) * 10.0 ** (n % 4 - 2)
                p.grad = None if self.is_absent(n, rank, step) else to_param_shape(g.to(p.dtype), LAYOUTS[step % 4])

    def gradient(self, p: Tensor, draw: torch.Generator, signs: torch.Generator) -> Tensor:
        if self.example.values == "of one size":  # and of one sign on all ranks: nothing cancels
            size = 1 + torch.rand(p.shape, generator=draw)
            return torch.where(torch.rand(p.shape, generator=signs) < 0.5, size, -size)
        x = torch.randn(p.shape, generator=draw)
        return x if self.example.values == "normal" else x.mul_(torch.rand(p.shape, generator=draw) < 0.05)

    def is_absent(self, n: int, rank: int, step: int) -> bool:
        match self.example.absent:
            case "on some ranks":
                return (n + rank + step) % 3 == 0
            case "everywhere at times":
                return (n + step) % 3 == 0
            case "always":
                return n == 0
        return False

    def step(self) -> None:
        self.world.step(self.optimizers)
        assert all(optimizer.stats.phase != "skipped" for optimizer in self.optimizers), self.optimizers[0].stats.reason

    def replicas(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*map(everywhere, self.optimizers), strict=True)

    def resumed(self, consolidated: bool) -> Run:
        """Another run that goes on from what this one has saved."""
        if consolidated:
            self.world.consolidate(self.optimizers)
        other = copy.copy(self)
        other.start(World(self.example.ranks))
        for old, new in zip(self.optimizers, other.optimizers, strict=True):
            with torch.no_grad():
                for p, q in zip(everywhere(new), everywhere(old), strict=True):
                    p.copy_(q)
            new.load_state_dict(through_a_file((self.optimizers[0] if consolidated else old).state_dict()))
        return other
