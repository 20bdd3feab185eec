"""Separate and SeparateAdam against Algorithm 1 on dense tensors, and what is their own."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from oracles import SeparateOracle
from problems import COMPRESSED, SHAPES, gradients, replicas, step, weights
from ranks import run_ranks
from slow_rows import slow_but
from torch import nn

import compopt
from compopt._lowrank.matrices import MatrixSource
from compopt._lowrank.projections import plan_projection

ADAM = dict(lr=3e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
BASES = {
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAM),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


def make(ranks: int, base: str = "SeparateAdam", **options):
    options = {"projection": "gaussian", **options}

    def separate(params, **group):
        if base == "SeparateAdam":
            return compopt.SeparateAdam(params, **ADAM, **group, **options)
        return compopt.Separate(BASES[base](params), **group, **options)

    return replicas(ranks, weights(), separate)


@functools.cache
def plan_of(ratio: float, kind: str, height: int | str | None) -> tuple:
    """How every tensor is projected."""
    return tuple(
        plan_projection(torch.Size(s), False, ratio, kind, 0.9, block_rows=height) if c else None
        for s, c in zip(SHAPES, COMPRESSED, strict=True)
    )


@functools.cache
def drawn(ratio: float, kind: str, height: int | str | None, t: int) -> list[torch.Tensor | None]:
    """For every tensor the matrices that the package draws at step t, scaled for the oracle, which divides by r.

    Whatever the base and the number of ranks, they are the same: a QR of 1920 x 240 numbers is worth keeping.
    """
    plan = plan_of(ratio, kind, height)
    order = list(reversed(range(len(SHAPES))))  # a bucket holds its tensors in reverse
    bucket = make(1, ratio=ratio, projection=kind)[2][0]._buckets[0]
    matrices = MatrixSource().draw(bucket, order, [plan[i] for i in order], 0, t)
    scaled: list[list[torch.Tensor | None]] = [[None]] * len(SHAPES)
    for i, matrix in zip(order, matrices, strict=True):
        if matrix is not None:
            R = matrix * (1.0 if kind == "gaussian" else plan[i].r ** 0.5)
            scaled[i] = [*R.view(-1, *R.shape[-2:])]
    return [R for local in scaled for R in local]


def as_drawn(ratio: float, kind: str, height: int | str | None):
    """Return the oracle's form: every tensor with its projected dimension last, each block of rows that has an R of its
    own as a tensor, and the matrices the package draws.
    """

    def turned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(plan_of(ratio, kind, height), tensors, strict=True)
        blocks = ([t] if q is None else q.view_as_matrix(t.contiguous()).split(q.block_height or q.m) for q, t in pairs)
        return [block for local in blocks for block in local]

    return turned, lambda t, i: drawn(ratio, kind, height, t)[i]


OPTIONS = {
    "auto": dict(ratio=8, reset_interval=4),
    "clipped": dict(ratio=4, ef_beta=0.95, reset_interval=None, dense_steps=3, max_grad_norm=20.0),
    "no error feedback": dict(ratio=16, ef_beta=1.0, max_grad_norm=20.0),
    "blocks": dict(ratio=8, block_rows=48, reset_interval=4, max_grad_norm=20.0, dense_steps=2),
    "blocks by themselves": dict(ratio=8, block_rows="auto"),
}
# Every base with every number of ranks once; of the other options each meets every base, and every number of ranks.
RUNS = [
    *(("auto", base, ranks) for base in ("SeparateAdam", *BASES) for ranks in (1, 2, 4)),
    *(("clipped", base, ranks) for base, ranks in (("SeparateAdam", 2), ("AdamW", 4), ("SGD", 1))),
    *(("no error feedback", base, ranks) for base, ranks in (("SeparateAdam", 2), ("AdamW", 1), ("SGD", 4))),
    *(("blocks", base, ranks) for base, ranks in (("SeparateAdam", 2), ("AdamW", 1), ("SGD", 4))),
    ("blocks by themselves", "SeparateAdam", 2),
]


def is_fast(options: str, base: str, ranks: int) -> bool:
    """Every base, every number of ranks and every option at least once."""
    return base == "SeparateAdam" or (options, base, ranks) in (("auto", "AdamW", 4), ("clipped", "SGD", 1))


@pytest.mark.parametrize(("options", "base", "ranks"), slow_but(is_fast, RUNS))
def test_equals_the_oracle(ranks, base, options):
    options = OPTIONS[options]
    world, params, optimizers = make(ranks, base, **options)
    turned, random = as_drawn(options["ratio"], "gaussian", options.get("block_rows"))
    message = {k: v for k, v in options.items() if k not in ("ratio", "block_rows")}
    inner = BASES["AdamW" if base == "SeparateAdam" else base]
    compress = [random(1, i) is not None for i in range(len(turned(weights())))]
    oracle = SeparateOracle(turned(weights()), ranks, inner, random, compress=compress, **message)
    phases = set()
    for t in range(10 if options.get("reset_interval") else 8):
        grads = gradients(ranks, t)
        step(world, params, optimizers, grads)
        oracle.step([turned(local) for local in grads])
        phases.add(oracle.phase)
        assert optimizers[0].stats.phase == oracle.phase
        assert optimizers[0].stats.grad_norm == pytest.approx(oracle.norm)
        for p, wanted in zip(turned(params[-1]), oracle.params, strict=True):
            torch.testing.assert_close(p.detach(), wanted.detach(), rtol=1e-10, atol=1e-11)
    assert "projected" in phases
    for rank, optimizer in enumerate(optimizers):
        residuals = turned([optimizer.state[p].get("residual", p) for p in params[rank]])
        for residual, error, compressed in zip(residuals, oracle.error[rank], compress, strict=True):
            if compressed:
                torch.testing.assert_close(residual, error, rtol=1e-10, atol=1e-11)


def errors_over(steps: int, **options) -> list[float]:
    """The error's norm over the gradient's, under stationary gradients; weights stand still."""
    p = nn.Parameter(torch.zeros(128, 160))
    optimizer = compopt.SeparateAdam(
        [p], lr=0.0, reset_interval=None, **{"projection": "gaussian", **options}, simulate=True
    )
    generator = torch.Generator().manual_seed(0)
    mean, norms = torch.randn(128, 160, generator=generator), []
    p.grad = torch.empty_like(p)
    for _ in range(steps):
        p.grad.normal_(generator=generator).add_(mean)
        optimizer.step()
        norms.append(float(optimizer.state[p]["residual"].norm() / p.grad.norm()))
        if not norms[-1] < 1e6:
            break
    return norms


@pytest.mark.parametrize("ratio", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_error_stays_bounded_with_auto_and_diverges_in_the_printed_direction(ratio):
    steps = max(500, 16 * ratio)  # an error is forgotten over about as many steps as the ratio
    norms = errors_over(steps, ratio=ratio)
    first, second = norms[: steps // 2], norms[steps // 2 :]
    assert len(norms) == steps and max(second) < 1.5 * max(first) and max(norms) < 3 * ratio**0.5
    auto = plan_projection(torch.Size((128, 160)), False, ratio, "gaussian", "auto").beta
    with pytest.warns(UserWarning, match="grow without end"):
        printed = errors_over(2000, ratio=ratio, ef_beta=1 - auto)  # the new error weighs what the old one should
    assert len(printed) < 300


def test_a_stable_number_is_taken_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = nn.Parameter(torch.zeros(128, 160))
        compopt.SeparateAdam([p], projection="gaussian", ratio=16, ef_beta=0.95)


def test_bytes_at_ratio_16_are_a_fourteenth_of_dense():
    block = [(960, 320), (320, 320), (1280, 320), (320, 1280), (320,), (320,)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(256, 320), (64, 320), *block * 2, (256, 320)]]
    optimizer = compopt.SeparateAdam(params, projection="gaussian", simulate=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.stats.bytes_sent * 14 <= optimizer.stats.bytes_dense == 4 * sum(p.numel() for p in params)


def sharded_run(rank: int) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in [(129, 64), (64, 64), (1, 80), (7,)]]
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh["shard"], [Shard(0)])) for p in whole]
    single = dist.new_group([rank], use_local_synchronization=True)
    options = dict(projection="gaussian", ratio=8, simulate=True)
    makers = [
        lambda ps, group: compopt.Separate(torch.optim.SGD(ps, lr=0.1, momentum=0.9), process_group=group, **options),
        lambda ps, group: compopt.SeparateAdam(ps, process_group=group, **options),
    ]
    optimizers = [(make(whole, single), make(parts, mesh.get_group("replicate"))) for make in makers]
    for t in range(6):
        for i, (p, q) in enumerate(zip(whole, parts, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))
            q.grad = distribute_tensor(p.grad, mesh["shard"], [Shard(0)])
        for optimizer in optimizers[t % 2]:
            optimizer.step()
            assert optimizer.stats.phase == "projected"
    return [float((p - q.full_tensor()).abs().max()) for p, q in zip(whole, parts, strict=True)]


def test_rows_sharded_over_ranks_train_as_the_whole_does():
    for differences in run_ranks(sharded_run, 2):
        assert max(differences) < 1e-5
