"""Costs of the methods: bytes, state and computation of a step, one formula and one row each.

tests/planning/test_costmodel.py compares bytes and state with the classes themselves.

``prediction`` runs every row of it, and ``candidates`` takes its settings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from .._wire.payload import ROW as VALUES_PER_SCALE
from ..local_steps import rounds
from ..local_steps.fragment_sync import ANNOUNCEMENT_BYTES
from .hardware import QR_SLOWDOWN, TOP_K_PASSES
from .workload import Workload

# Bytes of a number: gradients, payloads and optimizer state are float32.
FLOAT = 4
# Bytes an element: of a parameter and its gradient, and of AdamW's two moments.
WEIGHTS = MOMENTS = 2 * FLOAT
# Bytes an element that fused AdamW moves: it reads w, g, m and v, and writes w, m and v.
ADAMW_TRAFFIC = 7 * FLOAT
# Bytes an element of messages and scratch memory beside the state, at the worst moment of a step:
# bench/memory.py counted them on CPUs.
RADIUS_PEAK, SCAPE_PEAK, GAUSSIAN_PEAK, TRACKED_PEAK, LOCAL_PEAK = 6.1, 9.5, 4.7, 10.0, 3.1
# Bytes an element that a sampled threshold moves in PyTorch's operators: flags, words, positions.
THRESHOLD = 60


@dataclass(frozen=True)
class Cost:
    """One method on one workload: amounts a step and a rank, for the whole model.

    Args:
        reduced: bytes handed to all-reduce.
        gathered: bytes that every rank holds after gathers, or held before reduce-scatters.
        hidden: such bytes that travel during the next forward and backward.
        state: bytes of optimizer state.
        peak: bytes beside it at the worst moment of a step, of messages and scratch memory.
        save: bytes of an all-reduce that loads the network as much as ``consolidate_state()``.
        traffic: bytes moved in memory beyond a dense AdamW step; negative when there are fewer.
        flops: floating-point operations beyond it.
        every: steps of a round, after whose last everything goes out at once; None: it goes out in
            every step, from backward on.
        delay: steps of computation that hide a round's exchange.
        quantized: bytes of quantized means. They count like ``reduced``, but ranks of a machine
            cannot add them up before they leave it.
        after_commit: bytes gathered when the step is applied, which no computation hides.
        exchanges: of one bucket in a step, collectives that follow one another.
        host: bytes moved to, from and in host memory.
        calls: seconds of Python and of operators' calls, whatever the sizes, beyond AdamW's.
    """

    reduced: float
    gathered: float = 0.0
    hidden: float = 0.0
    state: float = 0.0
    peak: float = 0.0
    save: float = 0.0
    traffic: float = 0.0
    flops: float = 0.0
    every: int | None = None
    delay: int = 0
    quantized: float = 0.0
    after_commit: float = 0.0
    exchanges: int = 1
    host: float = 0.0
    calls: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that a rank hands to collectives in a step, as a mean."""
        return self.reduced + self.quantized + self.gathered + self.after_commit + self.hidden

    @property
    def as_all_reduced(self) -> float:
        """Bytes of an all-reduce that loads the network as much. It sends each value twice, a
        gather or a reduce-scatter once.
        """
        all_reduced = self.reduced + self.quantized
        return all_reduced + (self.sent - all_reduced) / 2


def call_seconds(work: Workload, step: float, tensor: float) -> float:
    """Seconds of calls from milliseconds a step and a tensor, as one core took them."""
    return (step + tensor * work.tensors) / 1e3


def code_bytes(bits: int) -> float:
    """Bytes of a quantized value with its share of a scale."""
    return bits / 8 + FLOAT / VALUES_PER_SCALE


# Formulas: a workload, a number of ranks and the method's options to a Cost.


def dense_cost(work: Workload, ranks: int, width: int = FLOAT) -> Cost:
    # A narrower message is written and read once more than the gradient.
    return Cost(
        width * work.parameters,
        state=MOMENTS * work.parameters,
        traffic=(FLOAT - width) * 3.0 * work.parameters,
    )


def quantized_start_cost(work: Workload, ranks: int, bits: int = 8) -> Cost:
    """A dense step of SeparateAdam with a quantized payload."""
    n = work.parameters
    # h = g + e, codes both ways, mean and residual.
    return Cost(
        0.0,
        quantized=code_bytes(bits) * n,
        state=(MOMENTS + FLOAT) * n,
        traffic=48.0 * n,
        calls=call_seconds(work, 4.0, 0.05),
    )


def radius_cost(work: Workload, ranks: int, density: float = 0.4, interval: int = 200) -> Cost:
    n, rest = work.split(work.compressed)
    resample = 1 / interval
    kept = density * (1 - resample) + resample
    # A sparse step reads gradient and residual, writes the residual, and gathers and scatters the
    # kept elements.
    sparse = 12 + 12 * density
    return Cost(
        reduced=FLOAT * (kept * n + rest),
        hidden=n / 8 * resample,
        state=MOMENTS * work.parameters + (FLOAT + 1 / 8) * n,
        peak=RADIUS_PEAK * work.parameters,
        save=FLOAT * n,
        traffic=n * (sparse * (1 - resample) + TOP_K_PASSES * FLOAT * resample),
        calls=call_seconds(work, 2.0, 0.03),
    )


def scape_cost(work: Workload, ranks: int, density: float = 0.1) -> Cost:
    n, rest = work.split(work.compressed)
    mask = min(1 / 8, density * math.log2(math.e / density) / 8)
    # In place of AdamW's: residual and decay 20, 40 a kept element, selection of a rank's part.
    traffic = 20 + 40 * density + THRESHOLD / ranks - ADAMW_TRAFFIC
    return Cost(
        reduced=FLOAT * (density * n + rest),
        hidden=mask * n,
        state=(FLOAT * density + FLOAT + 1 / 4) * n + FLOAT * rest,
        peak=SCAPE_PEAK * work.parameters,
        save=FLOAT * n,
        traffic=traffic * n,
        calls=call_seconds(work, 3.5, 0.06),
    )


def gaussian_cost(work: Workload, ranks: int, ratio: int = 16) -> Cost:
    n = work.parameters * work.compressed
    projected, values, products = work.count_random(ratio)
    # Projection, reconstruction of the mean and of the rank's own part: three products.
    return Cost(
        reduced=FLOAT * (values + work.parameters - projected),
        state=MOMENTS * work.parameters + FLOAT * n,
        peak=GAUSSIAN_PEAK * work.parameters,
        save=FLOAT * n,
        # h = g + e, three reads or writes of h and hhat, e, ghat.
        traffic=40 * n,
        flops=6 * products,
        calls=call_seconds(work, 4.0, 0.1),
    )


def tracked_cost(work: Workload, ranks: int, rank: int = 16, bits: int = 8) -> Cost:
    n = work.parameters * work.compressed
    projected, factors = work.count_factors(rank)
    return Cost(
        reduced=0.0,
        # Both factors of a matrix, and what is not projected.
        quantized=code_bytes(bits) * (factors + work.parameters - projected),
        exchanges=2,
        state=MOMENTS * work.parameters + FLOAT * n + FLOAT * factors / 2,
        peak=TRACKED_PEAK * work.parameters,
        save=FLOAT * n,
        # h = g + e twice, ghat, e and what rounding dropped.
        traffic=48 * n,
        # Four products, and two orthonormal bases.
        flops=8 * projected * rank + QR_SLOWDOWN * 2 * rank * factors,
        calls=call_seconds(work, 5.0, 0.1),
    )


def tagc_cost(
    work: Workload,
    ranks: int,
    density: float = 0.0125,
    width: int = FLOAT,
    updates: int | None = None,
) -> Cost:
    n, rest = work.split(work.large)
    # Independent choices: the worst case.
    union = 1 - (1 - density) ** ranks
    back, more, rounding = float(width), 0.0, 0.0
    if updates is not None:
        # Codes and scales, and the owner's residual, are read and written; all codes are added.
        back, more = code_bytes(updates), FLOAT / ranks
        rounding = 16 / ranks + 2 * back + 12
    # Bitmaps go there and back, the payload is reduced to its owners, parameters are gathered.
    bitmaps = 2 * n / 8 if density < 1 else 0.0
    return Cost(
        reduced=0.0,
        gathered=width * (union * n + rest) + bitmaps,
        after_commit=back * work.parameters,
        exchanges=2,
        state=(MOMENTS / ranks + more) * work.parameters + FLOAT * n,
        peak=(8.8 + 16 / ranks) * work.parameters,
        # The residual is averaged, what is sharded is gathered.
        save=FLOAT * n + (MOMENTS + more * ranks) * work.parameters / 2,
        traffic=(16 + THRESHOLD + 12 * union) * n
        + (rounding - ADAMW_TRAFFIC * (1 - 1 / ranks)) * work.parameters,
        calls=call_seconds(work, 4.5, 0.13),
    )


def tagc_start_cost(
    work: Workload, ranks: int, width: int = FLOAT, updates: int | None = None
) -> Cost:
    """A dense step of TagcAdamW: every element is sent."""
    return replace(tagc_cost(work, ranks, 1.0, width, updates), exchanges=1)


# Bytes an element that a round's end moves: anchor - w and its norm 16, + residual 12, codes both
# ways 31, mean and residual 16, Nesterov's momentum 44, new parameters 8.
OUTER_TRAFFIC = 127


def local_steps_cost(
    work: Workload, ranks: int, every: int = 30, delay: int = 0, bits: int = 4
) -> Cost:
    n = work.parameters
    return Cost(
        reduced=0.0,
        # Once a round, of all parameters, with a message in front of them.
        quantized=(code_bytes(bits) * n + ANNOUNCEMENT_BYTES) / every,
        # Moments; anchors, outer momentum, residual; with a delay the pseudo-gradient in transfer.
        state=(MOMENTS + 3 * FLOAT + FLOAT * (delay > 0)) * n,
        peak=LOCAL_PEAK * n,
        # Residual and moments, after end_round().
        save=(FLOAT + MOMENTS) * n,
        # In every step: is the gradient finite.
        traffic=(OUTER_TRAFFIC / every + FLOAT) * n,
        every=every,
        delay=min(delay, every),
        calls=call_seconds(work, 0.5, 0.02) + call_seconds(work, 3.0, 0.05) / every,
    )


def powersgd_cost(work: Workload, ranks: int, rank: int = 4) -> Cost:
    # torch's hook sends whole what factors do not make twice smaller.
    n, factors = work.count_factors(rank, 2.0)
    return Cost(
        reduced=FLOAT * (factors + work.parameters - n),
        exchanges=2,
        state=MOMENTS * work.parameters + FLOAT * n + FLOAT * factors,
        traffic=40 * n,
        flops=6 * n * rank,
        calls=call_seconds(work, 2.0, 0.1),
    )


def offload_residual(cost: Cost, work: Workload, passes: int) -> Cost:
    """``offload="residual"``: it crosses to the device or back so many times a step."""
    nbytes = FLOAT * work.parameters * work.compressed
    return replace(cost, state=cost.state - nbytes, host=passes * nbytes)


def store_residual_in_int8(cost: Cost, work: Workload) -> Cost:
    """``residual_dtype="int8"``: it is decoded twice a step and encoded once, a part at a time."""
    n = work.parameters * work.compressed
    saved = (FLOAT - code_bytes(8)) * n
    return replace(cost, state=cost.state - saved, traffic=cost.traffic + 15 * n)


def offload_outer(cost: Cost, work: Workload) -> Cost:
    """``offload="outer"``: a round's exchange and outer step are the host's."""
    n = work.parameters
    moved = (OUTER_TRAFFIC + 2 * FLOAT) * n / (cost.every or 1)
    return replace(cost, state=MOMENTS * n, peak=0.0, traffic=FLOAT * n, host=moved)


@dataclass(frozen=True)
class Method:
    """One row of the table; calling it with a workload, a number of ranks and options gives its
    `Cost`.

    Args:
        cost: the formula.
        line: the constructor call; ``{steps}`` stands for the steps of the run, ``{start}`` for
            those of its dense start.
        start: the dense start: a number of steps, or as a float a share of the run.
        start_cost: the formula of a step of the dense start.
        ours: whether it is a class of this package.
        options: of the formula, in this row.
        growth: steps over which rounds grow from one step to their length; None: the whole run.
        losses: key of `losses.LOSSES`; "": the row's name.
        ddp_buckets: whether DDP's buckets travel, not the package's.
        offload: what ``offload=`` or ``residual_dtype=`` makes of the cost; such a row stands in
            for ``instead_of``.
        instead_of: the row that is shown where its state fits.
    """

    cost: Callable[..., Cost]
    line: str
    start: int | float = 0
    start_cost: Callable[..., Cost] = dense_cost
    ours: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    growth: int | None = 0
    losses: str = ""
    ddp_buckets: bool = False
    offload: Callable[[Cost, Workload], Cost] | None = None
    instead_of: str = ""

    def __call__(self, work: Workload, ranks: int, **options: Any) -> Cost:
        cost = self.cost(work, ranks, **{**self.options, **options})
        return self.offload(cost, work) if self.offload else cost

    def start_steps(self, steps: int) -> int:
        """Steps of the dense start, in a run of so many."""
        if isinstance(self.start, float):
            return round(self.start * steps)
        return min(self.start, steps)

    def phases(self, work: Workload, ranks: int, steps: int) -> list[tuple[int, Cost]]:
        """The costs of a run: numbers of steps, and the cost of each of these.

        Where rounds grow there is a phase for every length of a round.
        """
        cost, dense = self(work, ranks), self.start_steps(steps)
        start = [(dense, self.start_cost(work, ranks))] if dense else []
        if cost.every is None:
            return [*start, (steps - dense, cost)] if steps > dense else start
        growth = steps - dense if self.growth is None else self.growth
        lengths = count_round_lengths(cost.every, growth, steps - dense)
        rows = [(n * k, self(work, ranks, every=k)) for k, n in lengths]
        return [*start, *rows]


@lru_cache
def count_round_lengths(every: int, growth: int, steps: int) -> tuple[tuple[int, int], ...]:
    """Of every length of a round in a run of so many steps, how many rounds have it;
    ``end_round()`` ends the last one.
    """
    options, since = {"every": every, "growth_steps": growth}, 0
    counts: Counter[int] = Counter()
    while since < steps:
        length = rounds.round_length(options, since)
        grown_at = steps if since >= growth else -(-length * growth // max(1, every - 1))
        number = -(-(min(grown_at, steps) - since) // length)  # of rounds as long as this one
        last = min(length, steps - since - (number - 1) * length)
        counts[length] += number - 1
        counts[last] += 1
        since += (number - 1) * length + last
    return tuple(sorted((+counts).items()))


# A dense start of 15 % is what the runs had in which losses were measured.
SHARE = 0.15
DENSE_START = "dense_steps={start}"


def tracked_row(arguments: str, **options: int) -> Method:
    """A row of SeparateAdam's tracked projection; its dense start is 10 steps."""
    line = f"compopt.SeparateAdam(params, lr=...{arguments})"
    start_cost = partial(quantized_start_cost, bits=options.get("bits", 8))
    return Method(tracked_cost, line, 10, start_cost, options=options)


def local_steps_row(arguments: str, growth: int | None, **options: Any) -> Method:
    line = f"compopt.LocalSteps(torch.optim.AdamW(params, lr=...){arguments})"
    return Method(local_steps_cost, line, options=options, growth=growth)


def tagc_row(arguments: str, **options: Any) -> Method:
    line = f"compopt.TagcAdamW(named_params, lr=..., {arguments}{DENSE_START})"
    start_cost = partial(tagc_start_cost, **options)
    return Method(tagc_cost, line, SHARE, start_cost, options=options, losses="TagcAdamW")


def radius_row(arguments: str = "") -> Method:
    line = f"compopt.RadiusAdamW(params, lr=..., density=0.4, {arguments}{DENSE_START})"
    return Method(radius_cost, line, SHARE)


def scape_row(arguments: str = "") -> Method:
    line = (
        "compopt.ScapeAdamS(params, lr=..., density=0.1, density_steps=0, "
        f"{arguments}{DENSE_START})"
    )
    return Method(scape_cost, line, SHARE)


# The class's steps over which rounds grow.
LOCAL_GROWTH = 800

METHODS: dict[str, Method] = {
    "AdamW+DDP": Method(
        dense_cost, "torch.optim.AdamW(params, lr=...)", ours=False, ddp_buckets=True
    ),
    "SeparateAdam": tracked_row(""),
    "SeparateAdam, rank 32, int4": tracked_row(', rank=32, payload_dtype="int4"', rank=32, bits=4),
    "SeparateAdam, rank 16, int4": tracked_row(', payload_dtype="int4"', bits=4),
    "SeparateAdam, rank 8, int4": tracked_row(', rank=8, payload_dtype="int4"', rank=8, bits=4),
    "SeparateAdam, rank 4, int8": tracked_row(", rank=4", rank=4),
    "SeparateAdam, Gaussian 16": Method(
        gaussian_cost,
        f'compopt.SeparateAdam(params, lr=..., projection="gaussian", ratio=16, {DENSE_START})',
        SHARE,
    ),
    "LocalSteps": local_steps_row("", LOCAL_GROWTH),
    "LocalSteps, every=140, int2": local_steps_row(
        ', every=140, growth_steps={steps}, outer_lr=1, payload_dtype="int2"',
        None,
        every=140,
        bits=2,
    ),
    "RadiusAdamW": radius_row(),
    "ScapeAdamS": scape_row(),
    "TagcAdamW": tagc_row("density=0.0125, "),
    "TagcAdamW, bf16": tagc_row("payload_dtype=torch.bfloat16, ", width=2),
    "TagcAdamW, int4": tagc_row(
        'payload_dtype=torch.bfloat16, update_dtype="int4", ', width=2, updates=4
    ),
    "RadiusAdamW, offloaded": replace(
        radius_row('offload="residual", '),
        losses="RadiusAdamW",
        offload=lambda cost, work: offload_residual(cost, work, 2),
        instead_of="RadiusAdamW",
    ),
    "ScapeAdamS, offloaded": replace(
        scape_row('offload="residual", '),
        losses="ScapeAdamS",
        offload=lambda cost, work: offload_residual(cost, work, 3),
        instead_of="ScapeAdamS",
    ),
    "SeparateAdam, residual in int8": replace(
        tracked_row(', residual_dtype="int8"'),
        losses="SeparateAdam",
        offload=store_residual_in_int8,
        instead_of="SeparateAdam",
    ),
    "LocalSteps, offloaded": replace(
        local_steps_row(', offload="outer"', LOCAL_GROWTH),
        losses="LocalSteps",
        offload=offload_outer,
        instead_of="LocalSteps",
    ),
    "DDP, bf16 hook": Method(
        dense_cost,
        "ddp.register_comm_hook(None, bf16_compress_hook)",
        ours=False,
        options={"width": 2},
        ddp_buckets=True,
    ),
    "PowerSGD rank 4": Method(
        powersgd_cost,
        "ddp.register_comm_hook(state, powerSGD_hook)",
        SHARE,
        ours=False,
        ddp_buckets=True,
    ),
}
"""The methods that can be advised, by name. A new method is one formula and one row here."""
