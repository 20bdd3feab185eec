"""The table of conformance: a new optimizer joins by adding a line to CASES.

``compressed`` makes the class do all it can do within a dozen steps (dense start, selection, sparse steps);
``lossless`` makes it drop nothing, and then it must equal ``reference`` on the averaged gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import compopt


@dataclass(frozen=True)
class Case:
    cls: type[torch.optim.Optimizer]
    compressed: dict[str, Any]
    lossless: dict[str, Any]
    reference: Callable[..., torch.optim.Optimizer]
    lr: float = 1e-2
    method: str = "adamw"  # which row of the toy problems' table it has to reach, with these options
    problems: dict[str, Any] = field(default_factory=dict)
    bad: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.cls.__name__

    def make(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return self.cls(params, **{"lr": self.lr, **self.compressed, **options})


ADAM_BAD = {"lr": [-1.0], "eps": [-1e-8], "betas": [(1.0, 0.9), (0.9, -0.1)], "weight_decay": [-0.1]}
COMMON_BAD = {"warmup_steps": [-1], "max_grad_norm": [0.0, -1.0], "payload_dtype": [torch.int32]}

CASES = [
    Case(
        compopt.RadiusAdamW,
        compressed=dict(density=0.4, interval=5, warmup_steps=3),
        lossless=dict(density=1.0, interval=3, warmup_steps=2),
        reference=torch.optim.AdamW,
        method="radius",
        problems=dict(density=0.4, interval=10),
        bad=ADAM_BAD | COMMON_BAD | {"density": [0.0, 1.5, -0.1], "interval": [0, -3, 2.5], "residual_scale": [-1.0]},
    ),
]  # fmt: skip

by_name = {case.name: case for case in CASES}
