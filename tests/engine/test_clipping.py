"""``max_grad_norm``: of what is averaged, while buckets leave in backward, on real ranks; the norm that is clipped."""

from __future__ import annotations

import hashlib
import math
import warnings

import pytest
import torch
from deep import Deep
from problems import gradients, replicas, step, weights
from ranks import run_ranks
from table import projecting
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt._ops.operations import clip_factor

INT8 = {"payload_dtype": torch.int8}
TRACKED = projecting("tracked")
LIMIT = 1e-2


def around(params, **options):
    return compopt.Separate(torch.optim.AdamW(params, lr=1e-3), **options)


MAKES = {
    "Radius": (compopt.RadiusAdamW, dict(density=0.3, interval=3)),
    "SCAPE": (compopt.ScapeAdamS, dict(density_steps=0)),
    "SCAPE, as printed": (compopt.ScapeAdamS, dict(density_steps=0, clip="scape")),
    "SCAPE, sharded": (compopt.ScapeAdamS, dict(density_steps=0, sharded=True)),
    "gaussian": (compopt.SeparateAdam, dict(projection="gaussian", ratio=8)),
    "tracked, int8": (compopt.SeparateAdam, TRACKED | INT8),
    "around AdamW": (around, TRACKED),
    "Average": (lambda params, **o: compopt.Average(torch.optim.AdamW(params, lr=1e-3), **o), INT8),
    "TAGC": (compopt.TagcAdamW, dict(density=0.1)),
}


def on_two(rank: int) -> dict[str, tuple[int, int, float, str]]:
    """Of each: buckets, those that left early, the norm and a digest of the parameters."""
    from compopt._state import buckets

    buckets.BUCKET_BYTES, buckets.JOINED_PART_ON_CPU = 33_300, 0  # two layers
    warnings.simplefilter("error")
    results = {}
    for name, (make, options) in MAKES.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(Deep().layers)
        optimizer = make(model.parameters(), max_grad_norm=LIMIT, **options)
        for number in range(4):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * number + rank))
            (model(x) - x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        stats = optimizer.stats
        results[name] = stats.buckets, stats.early_buckets, stats.grad_norm, hashlib.sha256(bits).hexdigest()
    return results


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_two, 2)


@pytest.mark.parametrize("name", MAKES)
def test_clipping_keeps_communication_behind_backward(ranks, name):
    buckets, overlapped, norm, _ = ranks[0][name]
    assert buckets > 2 and overlapped == buckets - 1
    assert norm > LIMIT, "nothing was clipped"
    assert ranks[0][name] == ranks[1][name], "ranks clip by other factors"


# The norm of what is averaged

SHAPES = [(64, 160), (160, 96), (30,)]


def squares(tensors: list[Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors)


@pytest.mark.parametrize("ratio", [8, 16, 64])
def test_of_a_gaussian_projection_it_is_right_on_average(ratio):
    """Over many matrices; of a reconstruction it would be sqrt(1 + w) times as much, 8 times for ratio 64."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = compopt.SeparateAdam(params, lr=0.0, projection="gaussian", ratio=ratio, ef_beta=1.0, simulate=True)
    results = []
    for p, g in zip(params, gradients(1, 0, SHAPES, torch.float32)[0], strict=True):
        p.grad = g
    for _ in range(100):
        optimizer.step()
        results.append(optimizer.stats.grad_norm**2)
    assert sum(results) / len(results) == pytest.approx(squares([p.grad for p in params]), rel=0.05)


def test_of_orthonormal_columns_it_is_what_arrives_and_never_more_than_what_is_averaged():
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    base = torch.optim.SGD(params, lr=1.0)
    optimizer = compopt.Separate(base, simulate=True, **TRACKED)
    for t in range(5):
        before = [p.detach().clone() for p in params]
        residuals = [optimizer.state[p].get("residual", torch.zeros_like(p)).clone() for p in params]
        for p, g in zip(params, gradients(1, t, SHAPES, torch.float32)[0], strict=True):
            p.grad = g
        optimizer.step()
        arrived = [w - p.detach() for p, w in zip(params, before, strict=True)]
        norm = optimizer.stats.grad_norm
        assert norm == pytest.approx(math.sqrt(squares(arrived)), rel=1e-4)
        assert norm < math.sqrt(squares([p.grad + e for p, e in zip(params, residuals, strict=True)]))


@pytest.mark.parametrize("payload_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("projection", ["gaussian", "tracked"])
def test_an_outlier_that_is_clipped_is_not_owed(projection, payload_dtype):
    """One gradient a thousand times as large: what is applied and held back afterwards is as if it had been clipped."""
    options = projecting(projection, lr=1e-2, reset_interval=None, payload_dtype=payload_dtype)
    world, params, optimizers = replicas(
        2, weights(SHAPES, torch.float32), lambda ps, **o: compopt.SeparateAdam(ps, max_grad_norm=150.0, **options, **o)
    )
    norms = []
    for t in range(8):
        grads = gradients(2, t, SHAPES, torch.float32)
        for local in grads:
            for g in local:
                g.mul_(1000.0 if t == 4 else 1.0)
        step(world, params, optimizers, grads)
        norms.append(optimizers[0].stats.grad_norm)
        residuals = optimizers[0].stats.residual_norm()
        assert residuals < 3000, f"step {t + 1}"
    assert norms[4] > 1e4 and max(norms[5:]) < 1000, norms
    assert clip_factor(norms[4], 150.0) < 0.02


@pytest.mark.parametrize("payload_dtype", [None, torch.int8], ids=str)
def test_what_is_not_applied_of_a_clipped_gradient_is_owed(payload_dtype):
    """applied + owed' = f (mean g) + owed, for a projection that keeps all of the error; also in dense steps after it,
    which send it as far as the clip lets them."""
    options = projecting("tracked", lr=1e-2, reset_interval=None, payload_dtype=payload_dtype)
    world, params, optimizers = replicas(
        2, weights(SHAPES, torch.float32), lambda ps, **o: compopt.SeparateAdam(ps, max_grad_norm=20.0, **options, **o)
    )
    states = [[optimizer.state[p] for p in local[:2]] for optimizer, local in zip(optimizers, params, strict=True)]
    for t in range(9):
        if t == 5:
            for optimizer in optimizers:
                optimizer.param_groups[0]["dense_steps"] = 100
        m = [entry["exp_avg"].clone() for entry in states[0]]
        residuals = [(a["residual"] + b["residual"]) / 2 for a, b in zip(*states, strict=True)]
        grads = gradients(2, t, SHAPES, torch.float32)
        step(world, params, optimizers, grads)
        f = clip_factor(optimizers[0].stats.grad_norm, 20.0)
        assert f < 0.8
        for i in range(2):
            applied = (states[0][i]["exp_avg"] - 0.9 * m[i]) / (1 - 0.9)
            after = (states[0][i]["residual"] + states[1][i]["residual"]) / 2
            came = f * (grads[0][i] + grads[1][i]) / 2 + residuals[i]
            torch.testing.assert_close(applied + after, came, rtol=1e-4, atol=1e-3)
            assert t < 5 or after.norm() < (1 - f / 2) * residuals[i].norm()
