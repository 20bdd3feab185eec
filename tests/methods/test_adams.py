"""AdamS against equation 2 written in float64, and what is the class's own."""

from __future__ import annotations

import functools

import pytest
import torch
from oracles import AdamSOracle
from problems import gradients, replicas, step
from torch import nn

import compopt
from compopt._backends.native import library

SHAPES = [(64, 80), (80,), (3, 300, 90), ()]


@pytest.mark.parametrize(("ranks", "options"), [(3, {}), (1, {"maximize": True}), (3, {"betas": (0.0, 0.9)})])
def test_equals_equation_2(ranks, options):
    hyper = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1} | options
    start = [torch.randn(s, generator=torch.Generator().manual_seed(7), dtype=torch.float64) for s in SHAPES]
    world, params, optimizers = replicas(ranks, start, functools.partial(compopt.AdamS, **hyper))
    oracle = AdamSOracle(start, ranks, **hyper)
    for t in range(25):
        grads = gradients(ranks, t, SHAPES)
        step(world, params, optimizers, grads)
        oracle.step(grads)
    for i, wanted in enumerate(oracle.params):
        torch.testing.assert_close(params[-1][i].detach(), wanted, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(optimizers[-1].state[params[-1][i]]["exp_avg"], oracle.m[i], rtol=1e-11, atol=1e-12)


def test_one_state_buffer():
    p = nn.Parameter(torch.zeros(256, 256))
    held = {
        name: t.numel() * t.element_size() / p.numel() for name, t in compopt.AdamS([p]).state[p].items() if t.dim()
    }
    assert held == {"exp_avg": 4}


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_of_a_tensor_without_a_gradient_nothing_changes(monkeypatch, backend):
    """Not its count of steps either, which its bias correction goes by."""
    if backend == "native" and not library.find_objects():
        pytest.skip("needs the compiled passes")
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    params = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = compopt.AdamS(params, lr=0.1)
    params[0].grad = torch.ones(5)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [1, 0]
    assert torch.equal(params[1], torch.ones(5)) and not optimizer.state[params[1]]["exp_avg"].any()


@pytest.mark.parametrize("backend", ["torch", "native", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("payload_dtype", ["int8", "bfloat16"])
def test_rounded_it_is_average_around_it(monkeypatch, backend, payload_dtype):
    """Bytes, clip, residuals and parameters; with maximize against negated gradients."""
    if backend == "native" and not library.find_objects():
        pytest.skip("needs the compiled passes")
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    hyper = {"lr": 3e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    # a clip scales the payload, in bfloat16 with rounding
    ours = {"payload_dtype": payload_dtype, "max_grad_norm": 0.5 if payload_dtype == "int8" else None}
    start = [torch.randn(s, generator=torch.Generator().manual_seed(7)) for s in SHAPES]

    def inside(params, process_group):
        return compopt.Average(compopt.AdamS(params, **hyper), process_group=process_group, **ours)

    plain = functools.partial(compopt.AdamS, **hyper, **ours)
    makes = [plain, inside, functools.partial(plain, maximize=True)]
    if payload_dtype == "int8":  # which rounds at random, and not alike to both sides of zero
        makes.pop()
    runs = [replicas(2, start, make) for make in makes]
    for t in range(6):
        grads = gradients(2, t, SHAPES, torch.float32)
        for number, (world, params, optimizers) in enumerate(runs):
            step(world, params, optimizers, [[-g for g in of] for of in grads] if number == 2 else grads)
    (_, params, (_, first)), (_, _, (_, around)) = runs[:2]
    assert first.stats.phase == "rounded" and first.stats.grad_norm > 0.5
    assert first.stats.bytes_sent == around.stats.bytes_sent < 0.6 * first.stats.bytes_dense
    assert first.state[params[1][0]]["residual"].any()
    for (_, others, (_, other)), sign in zip(runs[1:], (1, -1), strict=False):
        for p, q in zip(params[1], others[1], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                first.state[p]["residual"], sign * other.state[q]["residual"], rtol=1e-5, atol=1e-6
            )


def test_a_payload_dtype_may_come_later():
    p = nn.Parameter(torch.ones(64, 80))
    optimizer = compopt.AdamS([p], simulate=True)
    p.grad = torch.randn(64, 80)
    optimizer.step()
    assert "residual" not in optimizer.state[p] and optimizer.stats.phase == "dense"
    optimizer.param_groups[0]["payload_dtype"] = "int8"
    optimizer.step()
    assert optimizer.state[p]["residual"].any() and optimizer.stats.phase == "rounded"
