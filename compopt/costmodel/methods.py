"""What each method sends, keeps and computes: the one table of formulas, per step, averaged over
many steps.

tests/test_costmodel_bytes.py holds the bytes against ``optimizer.stats`` of the classes themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._local import rounds
from .._wire.quantise import ROW
from .workload import Cost, Workload

# Gradients, payloads and optimizer state are fp32.
FLOAT = 4
# Bytes an element that torch.topk costs on a CPU: 18 to 32 passes.
TOP_K = 25 * FLOAT
# bytes an element that PyTorch's operators move for a sampled threshold: flags, words, positions
THRESHOLD = 60


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
        # Four products, and two orthonormal bases, which come at a twentieth of a product's speed.
        flops=8 * n * rank + 20 * 2 * rank**2 * work.perimeter,
    )


def _tagc(
    work: Workload,
    ranks: int,
    sparsity: float = 0.9875,
    width: int = FLOAT,
    updates: int | None = None,
) -> Cost:
    n, rest = work.parameters * work.large, work.parameters * (1 - work.large)
    # Independent choices: the worst case.
    union = 1 - sparsity**ranks
    back, more, rounding = float(width), 0.0, 0.0
    if updates is not None:
        # Codes and scales; what the owner owes: read and written. Codes of all are read, and added.
        back, more = updates / 8 + FLOAT / ROW, FLOAT / ranks
        rounding = 16 / ranks + 2 * back + 12
    # Payload and the rest are reduced to their owners, bitmaps go there and back, parameters are
    # gathered.
    return Cost(
        reduced=0.0,
        gathered=width * (union * n + rest) + 2 * n / 8 + back * work.parameters,
        state=(8 / ranks + more) * work.parameters + 4 * n,
        traffic=(16 + THRESHOLD + 12 * union) * n
        + (rounding - 28 * (1 - 1 / ranks)) * work.parameters,
    )


def _local_steps(
    work: Workload, ranks: int, every: int = 30, delay: int = 0, bits: int = 4
) -> Cost:
    n = work.parameters
    # Once a round: codes, and a scale for each row, of all parameters.
    return Cost(
        reduced=(bits / 8 + FLOAT / ROW) * n / every,
        # AdamW's moments; anchors, outer momentum, residual, and what moved while it is exchanged.
        state=(8 + 16) * n,
        # anchor - w and its norm 16, + residual 12, codes both ways 31, mean and residual 16,
        # Nesterov's momentum 44, new parameters 8.
        traffic=127 * n / every,
        every=every,
        delay=min(delay, every),
    )


def _powersgd(work: Workload, ranks: int, rank: int = 4) -> Cost:
    n, rest = work.parameters * work.compressed, work.parameters * (1 - work.compressed)
    return Cost(
        reduced=FLOAT * (rank * work.perimeter + rest),
        state=8 * work.parameters + 4 * n + FLOAT * rank * work.perimeter,
        traffic=40 * n,
        flops=6 * n * rank,
    )


MEASURED_ON = "a GPT of 0.9 M parameters, width 128, 800 to 1500 steps, one seed"
# Steps and ranks of the runs in which losses of local steps were measured.
RUN = 2000
LOCAL_RANKS = 4
# bench/results/frontier-512.csv
WIDE_LOCAL = (
    "At width 512 every=30 was 12 % above; in int2, with rounds that grow to the end, it was 6.7 % "
    "and every=140 8.2 % (1500 steps on 2 ranks, one seed each): try it on your model first."
)
LOCAL_ON = f"a GPT of 0.9 M parameters, width 128, {RUN} steps on {LOCAL_RANKS} ranks, three seeds"


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
        options: of the formula, in this row.
        growing: steps over which rounds grew from one step to their length.
        measured_on: what ``loss`` was measured on.
    """

    cost: Callable[..., Cost]
    line: str
    loss: float | None
    start: float = 0.15
    ours: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    growing: int = 0
    measured_on: str = MEASURED_ON

    def __call__(self, work: Workload, ranks: int, **options: Any) -> Cost:
        return self.cost(work, ranks, **{**self.options, **options})

    def after_start(self, work: Workload, ranks: int) -> list[tuple[float, Cost]]:
        """What follows the dense start of a run: shares of these steps, and the cost of a step.

        Where rounds grow, one for every length of a round in a run of ``RUN`` steps.
        """
        cost = self(work, ranks)
        if cost.every is None:
            return [(1.0, cost)]
        lengths = Counter(rounds_of_run(cost.every, self.growing, RUN))
        return [(n * k / RUN, self(work, ranks, every=k)) for k, n in lengths.items()]


def rounds_of_run(every: int, growing: int, steps: int) -> list[int]:
    """Lengths of the rounds of a run of so many steps; ``end_round()`` ends the last one."""
    options, lengths, since = {"every": every, "every_warmup_steps": growing}, [], 0
    while since < steps:
        lengths.append(min(rounds.round_length(options, since), steps - since))
        since += lengths[-1]
    return lengths


TRACKED = (
    'compopt.SeparateAdam(params, lr=..., projection="tracked", rank={}, payload_dtype="{}", '
    "warmup_steps=...)"
)
LOCAL = "compopt.LocalSteps(torch.optim.AdamW(params, lr=...), every={}{})"
LONG = ', every_warmup_steps=2000, outer_lr=1, payload_dtype="int2"'


def _row_of_rounds(every: int, loss: float, growing: int, said: str, **options: int) -> Method:
    """A row of local steps; ``said``: its options in Python."""
    line = LOCAL.format(every, said)
    options = {"every": every, **options}
    return Method(_local_steps, line, loss, 0.0, True, options, growing, LOCAL_ON)


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
    "tracked 32, int4": Method(
        _tracked, TRACKED.format(32, "int4"), 0.996, options={"rank": 32, "bits": 4}
    ),
    "tracked 8, int4": Method(
        _tracked, TRACKED.format(8, "int4"), 1.023, options={"rank": 8, "bits": 4}
    ),
    "tracked 4, int8": Method(_tracked, TRACKED.format(4, "int8"), 1.053, options={"rank": 4}),
    "LocalSteps 30": _row_of_rounds(30, 1.017, 800, ""),  # the class's defaults
    "LocalSteps 140, int2": _row_of_rounds(140, 1.041, 2000, LONG, bits=2),
    "TagcAdamW": Method(
        _tagc, "compopt.TagcAdamW(named_params, lr=..., sparsity=0.9875, warmup_steps=...)", 1.030
    ),
    "TagcAdamW, bf16": Method(
        _tagc,
        "compopt.TagcAdamW(named_params, lr=..., payload_dtype=torch.bfloat16, warmup_steps=...)",
        1.029,
        options={"width": 2},
    ),
    "TagcAdamW, int4": Method(
        _tagc,
        "compopt.TagcAdamW(named_params, lr=..., payload_dtype=torch.bfloat16, "
        'update_dtype="int4", warmup_steps=...)',
        1.028,
        options={"width": 2, "updates": 4},
    ),
    "DDP, bf16 hook": Method(
        _dense, "ddp.register_comm_hook(None, bf16_compress_hook)", None, 0.0, False, {"width": 2}
    ),
    "PowerSGD rank 4": Method(
        _powersgd, "ddp.register_comm_hook(state, powerSGD_hook)", 1.058, ours=False
    ),
}
"""What can be advised, by name. A new method is one formula and one line here."""
