"""AdamS against equation 2 written in float64, and what is the class's own."""

from __future__ import annotations

import functools

import pytest
import torch
from oracles import AdamSOracle
from problems import gradients, replicas, step
from torch import nn

import compopt
from compopt._ops.native import build

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


def test_a_checkpoint_of_adamw_is_taken_over():
    p = nn.Parameter(torch.ones(64, 80))
    dense = torch.optim.AdamW([p])
    p.grad = torch.randn(64, 80)
    dense.step()
    ours = compopt.AdamS([p])
    ours.load_state_dict(dense.state_dict())
    assert torch.equal(ours.state[p]["exp_avg"], dense.state[p]["exp_avg"]) and ours.param_groups[0]["step"] == 1


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_of_a_tensor_without_a_gradient_nothing_changes(monkeypatch, backend):
    """Not its count of steps either, which its bias correction goes by."""
    if backend == "native" and build.find_compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("COMPOPT_BACKEND", backend)
    params = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = compopt.AdamS(params, lr=0.1)
    params[0].grad = torch.ones(5)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [1, 0]
    assert torch.equal(params[1], torch.ones(5)) and not optimizer.state[params[1]]["exp_avg"].any()
