"""Every class against its oracle in float32, the dtype it trains in, on every backend, above every block's size.

The oracles compute in float64, so results differ by rounding: by some 1e-6 of what moved. A mask that differs at one of
10,000 elements, or a residual that is wrong by a percent, shows as 1e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conservation import everywhere, mean_residuals, moments
from oracles import AdamSOracle, AverageOracle, RadiusOracle, ScapeOracle, SeparateOracle, TagcOracle
from oracles.common import as_float64
from problems import gradients, replicas, step, weights
from simple import local_steps, separate_adam
from slow_rows import in_turn
from table import CASES, projecting
from torch import Tensor
from twins import TwinRanks, start_separate_adam_alike

import compopt
from compopt._lowrank.matrices import MatrixSource
from compopt._lowrank.projections import plan_projection

LARGE = [(260, 512), (80,), (260, 512)]  # of 133,120 elements: two ranks own, and select in, one each
SMALL = [(64, 64), (80,), (64, 64)]  # for Triton's interpreter
COMPRESS = [True, False, True]
HYPER = dict(lr=3e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEPS = 8
CLOSE = 1e-4  # relative; ten times that in parameters, where AdamW makes a step of every rounded zero


def radius(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return RadiusOracle(start, len(optimizers), compress=COMPRESS, **HYPER, **options)


def adams(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return AdamSOracle(start, len(optimizers), **HYPER, **options)


def scape(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    known = {name: value for name, value in options.items() if name != "sharded"}
    owner = [len(optimizers) - 1, 0, 0]  # ranks select in the order of the bucket, which is reversed
    return ScapeOracle(start, len(optimizers), owner=owner, compress=COMPRESS, **HYPER, **known)


def tagc(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    known = {name: value for name, value in options.items() if name not in ("codec", "sketch_ratio")}
    parts = [[(n, 0, start[n].numel())] for n in (2, 0)]
    shards = parts if len(optimizers) == 2 else [parts[0] + parts[1]]
    return TagcOracle(start, len(optimizers), shards=shards, compress=COMPRESS, **HYPER, **known)


def separate(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    kind, ratio = options.get("projection", "gaussian"), options["ratio"]
    plan = [
        plan_projection(w.shape, False, ratio, kind, "auto") if c else None
        for w, c in zip(start, COMPRESS, strict=True)
    ]
    assert not any(q and q.transposes for q in plan) or start[0].shape[0] < start[0].shape[1]
    (bucket,) = optimizers[0]._buckets

    def random(t: int, i: int) -> Tensor:
        drawn = MatrixSource().draw(bucket, [2, 1, 0], plan[::-1], 0, t)[2 - i].double()
        return drawn if kind == "gaussian" else drawn * plan[i].r ** 0.5  # the oracle divides by r

    known = {name: value for name, value in options.items() if name not in ("ratio", "projection")}
    if kind != "gaussian":
        known["ef_beta"] = 0.0
    return SeparateOracle([turned(w) for w in start], len(optimizers), adamw, random, compress=COMPRESS, **known)


def tracked(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    kept = dict(HYPER, rank=options["rank"], dense_steps=0)
    wanted = as_float64(start)
    ranks = TwinRanks(separate_adam, lambda p: separate_adam.SeparateAdam(p, **kept), wanted, len(optimizers))
    start_separate_adam_alike(ranks, optimizers[0])
    pairs = zip(ranks.twins, ranks.all_params, strict=True)
    ranks.error = [[twin.e.get(p, torch.zeros_like(p)) for p in params] for twin, params in pairs]
    return ranks


def average(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return AverageOracle(start, len(optimizers), sgd, **options)


def local(start: list[Tensor], optimizers: list, options: dict[str, Any]):
    return TwinRanks(
        local_steps, lambda p: local_steps.LocalSteps(adamw(p), options["every"]), as_float64(start), len(optimizers)
    )


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **HYPER)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    """Shows how large gradients are; AdamW's step is the same whatever they are clipped to."""
    return torch.optim.SGD(params, lr=3e-2, momentum=0.9)


def turned(x: Tensor) -> Tensor:
    """As the oracle of SEPARATE has it: what is projected comes last. The smaller side of a matrix is."""
    return x.t().contiguous() if x.dim() == 2 and x.shape[0] < x.shape[1] else x


TRACKED = projecting("tracked")
RUNS: dict[str, tuple[type, Callable, dict[str, Any]]] = {
    "Radius": (compopt.RadiusAdamW, radius, dict(density=0.4, interval=4, dense_steps=2)),
    "Radius, few": (compopt.RadiusAdamW, radius, dict(density=0.01, interval=3, dense_steps=0, max_grad_norm=100.0)),
    "AdamS": (compopt.AdamS, adams, {}),
    "SCAPE": (compopt.ScapeAdamS, scape, dict(density=0.1, dense_steps=1, density_steps=2)),
    "SCAPE, few": (
        compopt.ScapeAdamS,
        scape,
        dict(density=0.01, density_steps=0),
    ),
    "TAGC": (compopt.TagcAdamW, tagc, dict(density=0.1, dense_steps=1)),
    "TAGC, few": (compopt.TagcAdamW, tagc, dict(density=0.01, codec="sketch", sketch_ratio=10)),
    "SEPARATE": (compopt.SeparateAdam, separate, dict(projection="gaussian", ratio=8, dense_steps=1)),
    "SEPARATE, tracked": (compopt.SeparateAdam, tracked, TRACKED),
    "Separate": (compopt.Separate, separate, dict(projection="gaussian", ratio=16, reset_interval=5)),
    "Average": (compopt.Average, average, dict(max_grad_norm=100.0)),
    "Average, rounded": (compopt.Average, average, dict(payload_dtype=torch.bfloat16)),
    "Local steps": (compopt.LocalSteps, local, dict(every=3, growth_steps=0, payload_dtype=None)),
}
BASES = {compopt.Separate: adamw, compopt.Average: sgd, compopt.LocalSteps: adamw}


def test_every_class_is_run():
    assert {cls for cls, *_ in RUNS.values()} == {case.cls for case in CASES}


def far(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Relative distance over all tensors."""
    pairs = [(a.detach().double().reshape(-1), b.detach().reshape(-1)) for a, b in zip(got, wanted, strict=True)]
    size = max(float(torch.cat([b for _, b in pairs]).norm()), 1e-30)
    return float(torch.cat([a - b for a, b in pairs]).norm()) / size


@pytest.mark.parametrize(("name", "ranks"), in_turn(RUNS, (2, 1)))
def test_equals_the_oracle(name, backend, ranks):
    cls, oracle_of, options = RUNS[name]
    if "sharded" in options and ranks > 1:
        pytest.skip("ranks select by what they own, not by their own momenta")
    if backend == "triton" and (name not in ("Radius", "SCAPE", "AdamS")):
        pytest.skip("its interpreter takes seconds; one run of each kernel is enough")
    base_of = BASES.get(cls)
    start = weights(SMALL if backend == "triton" else LARGE, torch.float32)
    world, params, optimizers = replicas(
        ranks,
        start,
        lambda p, process_group: cls(
            base_of(p) if base_of else p, process_group=process_group, **{**({} if base_of else HYPER), **options}
        ),
    )
    oracle, turn = oracle_of(start, optimizers, options), turned if oracle_of is separate else (lambda x: x)
    for t in range(5 if backend == "triton" else STEPS):
        grads = gradients(ranks, t, [w.shape for w in start], torch.float32)
        step(world, params, optimizers, grads)
        oracle.step([[turn(g) for g in local_part] for local_part in grads])
        moved, wanted = ([p.detach().double() - w.double() for p, w in zip(now, map(turn, start), strict=True)]
                         for now in (map(turn, params[-1]), oracle.params))  # fmt: skip
        assert far(moved, wanted) < 10 * CLOSE, f"parameters after step {t + 1}, {optimizers[0].stats.phase}"
    if hasattr(oracle, "m"):
        assert far(moments(optimizers), oracle.m) < CLOSE
    held = getattr(oracle, "residual", getattr(oracle, "error", None))
    if held:
        mean = [torch.stack(each).mean(0) for each in zip(*held, strict=True)]
        assert far([turn(r) for r in mean_residuals(optimizers)], mean) < CLOSE
        for optimizer, local_part in zip(optimizers, held, strict=True) if "sharded" not in options else ():
            entries = [optimizer.state[p] for p in everywhere(optimizer)]
            got = [turn(entry["residual"]) if "residual" in entry else torch.zeros_like(r)
                   for entry, r in zip(entries, local_part, strict=True)]  # fmt: skip
            assert far(got, local_part) < CLOSE
