"""What each method sends, keeps and computes: the one table of formulas, per step, averaged over
many steps.

tests/test_costmodel_bytes.py holds the bytes against ``optimizer.stats`` of the classes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._wire.quantise import ROW

# Gradients, payloads and optimizer state are fp32.
FLOAT = 4
# Bytes an element that torch.topk costs on a CPU: 18 to 32 passes.
TOP_K = 25 * FLOAT
# bytes an element that PyTorch's operators move for a sampled threshold: flags, words, positions
THRESHOLD = 60


@dataclass(frozen=True)
class Workload:
    """The parameters of one model.

    Args:
        parameters: how many.
        compressed: share of them in tensors that are compressed (at least 2-D and 4096 elements).
        side: the smaller side of those tensors, averaged by size. What a projection costs.
        perimeter: sum of (rows + columns) over those tensors. What low-rank factors cost.
        large: share of parameters in matrices that are not attention's. What TAGC compresses by
            default.
    """

    parameters: int
    compressed: float
    side: float
    perimeter: float
    large: float

    @classmethod
    def of_size(cls, parameters: int) -> Workload:
        """A transformer of so many parameters: 64 times as wide as deep, 12 width^2 a layer, two
        thirds in the MLP.
        """
        if parameters < 1:
            raise ValueError(f"parameters must be positive; got {parameters}.")
        width = max(8.0, (64 * parameters / 12) ** (1 / 3))
        return cls(parameters, 0.997, width, 16 * parameters / (12 * width), 2 / 3)

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Workload:
        """Read named parameters, `model.named_parameters()`; those not requiring gradients are left
        out.
        """
        named = [(name, p) for name, p in named if p.requires_grad]
        if not named:
            raise ValueError("No parameter requires a gradient: there is nothing to average.")
        total = sum(p.numel() for _, p in named)
        chosen = [(name, p) for name, p in named if p.ndim >= 2 and p.numel() >= 4096]
        size = sum(p.numel() for _, p in chosen)
        side = sum(p.numel() * min(p.shape[-1], p.numel() // p.shape[-1]) for _, p in chosen) / max(
            1, size
        )
        perimeter = sum(p.numel() // p.shape[-1] + p.shape[-1] for _, p in chosen)
        attention = ("attn", "attention", "qkv", "q_proj", "k_proj", "v_proj", "o_proj")
        large = sum(
            p.numel() for name, p in chosen if not any(word in name.lower() for word in attention)
        )
        return cls(total, size / total, side, float(perimeter), large / total)


@dataclass(frozen=True)
class Cost:
    """One method on one workload: amounts a step and a rank, for the whole model.

    Args:
        reduced: bytes handed to all-reduce.
        gathered: bytes every rank holds after gathers, or held before reduce-scatters, that the
            step waits for.
        hidden: such bytes that travel while the next forward and backward run.
        state: bytes of optimizer state.
        traffic: bytes moved in memory beyond a dense AdamW step; negative when there are fewer.
        flops: floating-point operations beyond it.
    """

    reduced: float
    gathered: float = 0.0
    hidden: float = 0.0
    state: float = 0.0
    traffic: float = 0.0
    flops: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes a rank hands to collectives in a step, averaged."""
        return self.reduced + self.gathered + self.hidden


def _dense(work: Workload, ranks: int, width: int = FLOAT) -> Cost:
    # A narrower message is written and read once more than the gradient.
    return Cost(
        width * work.parameters,
        state=8.0 * work.parameters,
        traffic=(FLOAT - width) * 3.0 * work.parameters,
    )


def _radius(work: Workload, ranks: int, density: float = 0.4, interval: int = 200) -> Cost:
    n, rest = work.parameters * work.compressed, work.parameters * (1 - work.compressed)
    resample = 1 / interval
    kept = density * (1 - resample) + resample
    # A sparse step reads gradient and residual, writes the residual, and gathers and scatters the
    # kept elements.
    sparse = 12 + 12 * density
    return Cost(
        reduced=FLOAT * (kept * n + rest),
        hidden=n / 8 * resample,
        state=8 * work.parameters + (4 + 1 / 8) * n,
        traffic=n * (sparse * (1 - resample) + TOP_K * resample),
    )


def _scape(work: Workload, ranks: int, density: float = 0.1) -> Cost:
    n, rest = work.parameters * work.compressed, work.parameters * (1 - work.compressed)
    mask = min(1 / 8, density * math.log2(math.e / density) / 8)
    # Against fused AdamW's 28 bytes: residual and decay 20, 40 a kept element, selection of a
    # rank's own part.
    traffic = 20 + 40 * density + THRESHOLD / ranks - 28
    return Cost(
        reduced=FLOAT * (density * n + rest),
        hidden=mask * n,
        state=(4 * density + 4 + 1 / 4) * n + 4 * rest,
        traffic=traffic * n,
    )


def _separate(work: Workload, ranks: int, ratio: int = 16) -> Cost:
    n, rest = work.parameters * work.compressed, work.parameters * (1 - work.compressed)
    # Projection, reconstruction of the mean and of the rank's own part: three products of 2 n
    # c/ratio each.
    return Cost(
        reduced=FLOAT * (n / ratio + rest),
        state=8 * work.parameters + 4 * n,
        # h = g + e, three reads or writes of h and hhat, e, ghat.
        traffic=40 * n,
        flops=6 * n * work.side / ratio,
    )


def _tracked(work: Workload, ranks: int, rank: int = 16, bits: int = 8) -> Cost:
    n, rest = work.parameters * work.compressed, work.parameters * (1 - work.compressed)
    # Codes, with a scale for each row: both factors of a matrix, and what is not compressed.
    return Cost(
        reduced=(bits / 8 + FLOAT / ROW) * (rank * work.perimeter + rest),
        state=8 * work.parameters + 4 * n + FLOAT * rank * work.perimeter / 2,
        # h = g + e twice, ghat, e and what rounding dropped.
        traffic=48 * n,
        flops=8 * n * rank
        # Four products, and two orthonormal bases.
        + 2 * rank**2 * work.perimeter,
    )


def _tagc(work: Workload, ranks: int, sparsity: float = 0.9875, width: int = FLOAT) -> Cost:
    n, rest = work.parameters * work.large, work.parameters * (1 - work.large)
    # Independent choices: the worst case.
    union = 1 - sparsity**ranks
    # Payload and the rest are reduced to their owners, bitmaps go there and back, parameters are
    # gathered.
    return Cost(
        reduced=0.0,
        gathered=width * (union * n + rest) + 2 * n / 8 + width * work.parameters,
        state=8 * work.parameters / ranks + 4 * n,
        traffic=(16 + THRESHOLD + 12 * union) * n - 28 * work.parameters * (1 - 1 / ranks),
    )


def _powersgd(work: Workload, ranks: int, rank: int = 4) -> Cost:
    n, rest = work.parameters * work.compressed, work.parameters * (1 - work.compressed)
    return Cost(
        reduced=FLOAT * (rank * work.perimeter + rest),
        state=8 * work.parameters + 4 * n + FLOAT * rank * work.perimeter,
        traffic=40 * n,
        flops=6 * n * rank,
    )


@dataclass(frozen=True)
class Method:
    """One row of the table; calling it with a workload, a number of ranks and options gives its
    `Cost`.

    Args:
        cost: the formula, and its options in this row.
        line: how the optimizer is made in Python.
        loss: final loss over dense AdamW's in the runs of bench/results (see `MEASURED_ON`); None:
            not measured.
        start: share of those runs' steps that were averaged dense first.
        ours: whether it is a class of this package.
    """

    cost: Callable[..., Cost]
    line: str
    loss: float | None
    start: float = 0.15
    ours: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, work: Workload, ranks: int, **options: Any) -> Cost:
        return self.cost(work, ranks, **{**self.options, **options})


MEASURED_ON = "a GPT of 0.9 M parameters, width 128, 800 to 1500 steps, one seed"
TRACKED = (
    'compopt.SeparateAdam(params, lr=..., projection="tracked", rank={}, payload_dtype="{}", '
    "warmup_steps=...)"
)
METHODS: dict[str, Method] = {
    "AdamW+DDP": Method(_dense, "torch.optim.AdamW(params, lr=...)", 1.0, start=0.0, ours=False),
    "RadiusAdamW": Method(
        _radius, "compopt.RadiusAdamW(params, lr=..., density=0.4, warmup_steps=...)", 1.039
    ),
    "ScapeAdamS": Method(
        _scape,
        "compopt.ScapeAdamS(params, lr=..., density=0.1, density_warmup_steps=0, warmup_steps=...)",
        1.167,
    ),
    "SeparateAdam": Method(
        _separate,
        'compopt.SeparateAdam(params, lr=..., projection="gaussian", ratio=16, warmup_steps=...)',
        1.142,
    ),
    "tracked 16, int8": Method(_tracked, TRACKED.format(16, "int8"), 1.008),
    "tracked 16, int4": Method(_tracked, TRACKED.format(16, "int4"), 1.012, options={"bits": 4}),
    "tracked 4, int8": Method(_tracked, TRACKED.format(4, "int8"), 1.053, options={"rank": 4}),
    "TagcAdamW": Method(
        _tagc, "compopt.TagcAdamW(named_params, lr=..., sparsity=0.9875, warmup_steps=...)", 1.030
    ),
    "TagcAdamW, bf16": Method(
        _tagc,
        "compopt.TagcAdamW(named_params, lr=..., payload_dtype=torch.bfloat16, warmup_steps=...)",
        1.029,
        options={"width": 2},
    ),
    "DDP, bf16 hook": Method(
        _dense, "ddp.register_comm_hook(None, bf16_compress_hook)", None, 0.0, False, {"width": 2}
    ),
    "PowerSGD rank 4": Method(
        _powersgd, "ddp.register_comm_hook(state, powerSGD_hook)", 1.058, ours=False
    ),
}
"""What can be advised, by name. A new method is one formula and one line here."""
