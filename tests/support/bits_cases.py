"""The cases of check_same_bits.py. Names of compopt's classes are text here: this imports neither tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]

# Beside what the code counts in: 4,096 elements to be compressed, 16,384 for a threshold, 2**17 for
# threads. A group of its own makes a second bucket.
SMALL: Shapes = {
    "one": (1,),
    "below.weight": (63, 65),
    "just.weight": (64, 64),
    "odd.weight": (17, 241),
    "deep.weight": (66, 7, 9),
    "turned.weight": (61, 70),  # not contiguous, see ``turned``
    "bias": (33,),
}
LARGE: Shapes = SMALL | {"table.weight": (280, 250)}
TOLD: Shapes = {"told.weight": (96, 33), "vector": (4095,)}  # to be compressed
LONG: Shapes = TOLD | {"long": (131_073,)}
# Of what is projected the matrices grow with the longest side.
PROJECTED: Shapes = {"told.weight": (96, 33)}
PROJECTED_LARGE: Shapes = PROJECTED | {"square.weight": (363, 361)}
# In Triton's interpreter every 1024 elements count.
TINY: list[Shapes] = [{"one": (1,), "bias": (33,)}, {"told.weight": (9, 131)}]


@dataclass(frozen=True)
class Form:
    """A class with options that show all it does within some steps."""

    cls: str
    options: dict[str, Any]
    says: str = ""
    base: str = ""  # of Separate: the optimizer that it wraps
    payloads: tuple[str, ...] = ("int8", "int4", "bfloat16")

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.cls, self.says]))

    @property
    def projects(self) -> bool:
        return self.cls.startswith("Separate")


RADIUS = dict(density=0.3, interval=4, dense_steps=3)
ADAMS = dict(betas=(0.9, 0.95), weight_decay=0.1)  # the defaults of earlier commits
SCAPE = ADAMS | dict(density=0.05, dense_steps=2, density_steps=5)
PROJECT = dict(projection="gaussian", ratio=8, dense_steps=2, reset_interval=8)
TRACK = dict(projection="tracked", rank=3, dense_steps=2, reset_interval=8, payload_dtype=None)
TAGC = dict(density=0.1, dense_steps=2)
ROUNDS = dict(every=3, growth_steps=4)
FRAGMENTS = dict(every=4, fragments=2, delay=1, dense_steps=2, growth_steps=0)

FORMS = [
    Form("RadiusAdamW", RADIUS),
    Form("RadiusAdamW", RADIUS | dict(offload="residual"), "offloaded"),
    Form("ScapeAdamS", SCAPE, "delayed"),
    Form("ScapeAdamS", SCAPE | dict(offload="residual"), "offloaded"),
    Form("ScapeAdamS", SCAPE | dict(offload="all"), "all offloaded"),
    Form("ScapeAdamS", SCAPE | dict(sharded=True), "sharded", payloads=("bfloat16",)),
    Form("AdamS", ADAMS),
    Form("Separate", PROJECT, "over SGD", base="SGD"),
    Form("Separate", PROJECT, "over AdamW", base="AdamW"),
    Form("Separate", TRACK, "over AdamS", base="AdamS"),
    Form("SeparateAdam", PROJECT, "gaussian"),
    Form("SeparateAdam", TRACK, "tracked"),
    Form("SeparateAdam", PROJECT | dict(adaptive=True, adapt_interval=5, ef_beta=0.9), "adaptive"),
    Form("TagcAdamW", TAGC, "compact", payloads=("bfloat16",)),
    Form("TagcAdamW", TAGC | dict(codec="sketch", sketch_ratio=4), "sketch", payloads=("bfloat16",)),
    Form("LocalSteps", ROUNDS, "of AdamW", base="AdamW"),
    Form("LocalSteps", ROUNDS | dict(residual_dtype="int8", outer_lr="auto"), "of SGD", base="SGD"),
    Form("LocalSteps", FRAGMENTS, "delayed", base="AdamW"),
]


@dataclass(frozen=True)
class Case:
    form: Form
    backend: str
    precision: str  # "float32", "bfloat16", or a payload narrower than float32 parameters
    ranks: int
    groups: list[Shapes]
    steps: int = 30

    @property
    def name(self) -> str:
        return f"{self.form.name}, {self.backend}, {self.precision}, {self.ranks} ranks"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    @property
    def payload(self) -> torch.dtype | None:
        return getattr(torch, self.precision.removeprefix("payload "), None) if self.sends else None

    @property
    def sends(self) -> bool:
        return self.precision.startswith("payload")

    # What happens to it besides

    @property
    def clips(self) -> bool:
        return self.ranks == 2 or self.sends

    @property
    def maximizes(self) -> bool:
        return self.ranks == 3 and not self.form.base

    @property
    def overlaps(self) -> bool:
        """Buckets start in backward, as DistributedDataParallel's hook lets them."""
        return self.ranks > 1 and not self.sends

    @property
    def looks(self) -> bool:
        """The state dict is read after every step, which makes the state what it means."""
        return self.ranks == 1 and not self.sends

    @property
    def own_checkpoints(self) -> bool:
        """Each rank loads what it saved itself, not consolidated."""
        return self.ranks == 1 or (self.ranks == 2 and self.precision == "payload bfloat16")

    @property
    def ranks_after(self) -> int:
        """Ranks that go on from the checkpoint."""
        return 2 if self.ranks == 3 else self.ranks


def cases() -> list[Case]:
    """Every form on every backend in every precision, at 1, 2 and 3 ranks.

    Less of what is slow: Triton's interpreter takes a hundred times as long as anything else.
    """
    return [
        Case(form, backend, precision, ranks, groups_for(form, precision, ranks))
        for form in FORMS
        for backend in ("torch", "native")
        for precision in precisions(form)
        for ranks in ((2,) if precision == "payload bfloat16" else (1, 2, 3))
    ] + [
        Case(form, "triton", precision, 2, TINY, steps=10)
        for form in FORMS
        for precision in precisions(form)
        if precision != "payload bfloat16"
    ]


def precisions(form: Form) -> list[str]:
    return ["float32", "bfloat16", *(f"payload {name}" for name in form.payloads)]


def groups_for(form: Form, precision: str, ranks: int) -> list[Shapes]:
    if ranks != 2 or precision == "payload bfloat16":
        return [SMALL, PROJECTED if form.projects else TOLD]
    if form.projects:
        return [LARGE, PROJECTED_LARGE]
    return [LARGE, LONG if precision == "float32" else TOLD]


def chosen(pattern: str) -> list[Case]:
    return [case for case in cases() if re.search(pattern, case.name)]
