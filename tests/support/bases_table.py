"""The bases that are tested, by package: how each is made, and what ``LocalSteps.consolidate_state()`` does with its
state. docs/bases.md has the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

MEAN, RANK_0, BOTH = "mean", "rank 0's", "mean; matrices rank 0's"


@dataclass(frozen=True)
class Row:
    """``averaged``: what is done with the state of a parameter. ``matrices``: options of a group of the matrices alone.
    ``named``: takes named parameters. ``tolerance``: how far from the base alone on averaged gradients.
    """

    package: str
    module: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    averaged: str = MEAN
    matrices: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    tolerance: float = 1e-6
    build: Callable[..., Any] | None = None

    @property
    def id(self) -> str:
        return f"{self.package} {self.name}"


def rows(package: str, names: str, module: str = "", lr: float = 1e-2, **common: Any) -> list[Row]:
    options = {"lr": lr, **common.pop("options", {})}
    return [Row(package, module or package, name, options, **common) for name in names.split()]


def muon_and_adamw(params: list[torch.nn.Parameter], **options: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


# ``rank`` is the base's own option in groups of the matrices
LOW_RANK = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}

ROWS = [
    *rows("torch", "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD", "torch.optim"),
    Row("torch", "torch.optim", "Adafactor", {"lr": 1e-2}, BOTH),
    Row("torch", "torch.optim", "Muon + AdamW", build=muon_and_adamw),
    *rows("torch-optimizer", "A2GradExp AccSGD AdaBelief AdaBound AdaMod AdamP AggMo DiffGrad", "torch_optimizer"),
    *rows("torch-optimizer", "LARS Lamb MADGRAD NovoGrad PID QHAdam QHM RAdam Ranger SGDP SGDW", "torch_optimizer"),
    *rows("torch-optimizer", "SWATS Yogi Apollo", "torch_optimizer"),
    Row("torch-optimizer", "torch_optimizer", "Adafactor", {"lr": 1e-2}, BOTH),
    Row("torch-optimizer", "torch_optimizer", "Shampoo", {"lr": 1e-2}, RANK_0, tolerance=1e-2),
    *rows("schedulefree", "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree"),
    *rows("prodigyopt", "Prodigy", lr=1.0),
    *rows("dadaptation", "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD", lr=1.0),
    *rows("lion-pytorch", "Lion", "lion_pytorch", lr=1e-3),
    *rows("adamp", "AdamP SGDP"),
    *rows("came-pytorch", "CAME", "came_pytorch", averaged=BOTH, options={"betas": (0.9, 0.999, 0.9999)}),
    *rows("adan-pytorch", "Adan", "adan_pytorch"),
    *rows("torch-optimi", "AdamW Adan Lion Ranger", "optimi"),
    Row("adam-mini", "adam_mini", "Adam_mini", {"lr": 1e-3, "dim": 16, "n_heads": 4}, named=True),
    *rows("bitsandbytes", "AdamW8bit Lion8bit PagedAdamW8bit", "bitsandbytes.optim", averaged=BOTH),
    *rows("bitsandbytes", "AdEMAMix8bit", "bitsandbytes.optim", averaged=RANK_0),
    *rows("bitsandbytes", "AdamW32bit", "bitsandbytes.optim"),
    *rows("torchao", "AdamW8bit AdamW4bit AdamWFp8", "torchao.optim", averaged=BOTH, options={"block_size": 64}),
    *rows("galore-torch", "GaLoreAdamW", "galore_torch", averaged=RANK_0, matrices=LOW_RANK),
    *rows(
        "apollo-torch", "APOLLOAdamW", "apollo_torch", averaged=RANK_0,
        matrices={**LOW_RANK, "proj": "random", "scale_type": "channel"},
    ),
    *rows("pytorch-optimizer", "ADOPT AdEMAMix Grams MARS Lamb StableAdamW ScheduleFreeAdamW", "pytorch_optimizer"),
    *rows("pytorch-optimizer", "SOAP SPlus ScalableShampoo Conda", "pytorch_optimizer", averaged=BOTH, tolerance=1e-4),
    Row("pytorch-optimizer", "pytorch_optimizer", "Kron", {"lr": 1e-3}, RANK_0, tolerance=1e-2),
    *rows("pytorch-optimizer", "Prodigy", "pytorch_optimizer", lr=1.0),
]  # fmt: skip

# refused by all wrappers when they are made; each is told in docs/bases.md
REFUSED = {
    "torch.optim": ["LBFGS", "SparseAdam"],
    "torch.distributed.optim": ["ZeroRedundancyOptimizer"],
    "torch_optimizer": ["Adahessian"],
    "schedulefree": ["AdamWScheduleFreeClosure", "SGDScheduleFreeClosure"],
    "pytorch_optimizer": [
        "SAM", "GSAM", "WSAM", "LookSAM", "BSAM", "FriendlySAM", "AdaHessian", "SophiaH", "AliG", "PCGrad", "LOMO",
        "AdaLOMO", "Magma", "DistributedMuon",
    ],
}  # fmt: skip
