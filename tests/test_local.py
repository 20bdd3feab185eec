"""Local steps against an oracle written from the design, what holds at the end of a round, and faults in it."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import local as oracle
from problems import SHAPES, gradients, replicas, step, weights

import compopt

PARTS = [[0, 1, 2], [3, 4]]  # of SHAPES: those whose middle is in the first half of all elements, and the others


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(ranks: int, steps: int, dtype=torch.float64, shapes=SHAPES, inner=adamw, **options):
    options = {"every": 4, "every_warmup_steps": 0, "payload_dtype": None, **options}

    def make(params, process_group):
        return compopt.LocalSteps(inner(params), process_group=process_group, **options)

    world, params, optimizers = replicas(ranks, weights(shapes, dtype), make)
    for t in range(steps):
        step(world, params, optimizers, gradients(ranks, t, shapes, dtype))
    return params, optimizers


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (1, 0.0), (3, 0.0), (0, 0.5), (1, 0.5), (3, 0.25)])
def test_it_is_the_design(ranks, fragments, delay, mix):
    params, optimizers = train(ranks, 26, every=8, fragments=fragments, delay=delay, mix=mix)
    parts = PARTS if fragments == 2 else None
    wanted = oracle.train(ranks, weights(), gradients, 26, 8, adamw, parts=parts, delay=delay, mix=mix)
    assert optimizers[0].stats.round == 3
    for own, theirs in zip(params, wanted, strict=True):
        for p, q in zip(own, theirs, strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_outer_optimizer_grows_with_the_rounds(ranks):
    """Rounds of 1, 1, 1, 2, 3, 4, 6 and 8 steps; by hand, without a codec."""
    lengths, every, lr, mu = [1, 1, 1, 2, 3, 4, 6, 8], 8, 0.7, 0.9
    params, optimizers = train(ranks, sum(lengths), every=every, every_warmup_steps=15)
    assert optimizers[0].stats.round == len(lengths)
    w = [[torch.nn.Parameter(x.clone()) for x in weights()] for _ in range(ranks)]
    inner, anchor = [adamw(own) for own in w], weights()
    v, t = [torch.zeros_like(x) for x in anchor], 0
    for steps in lengths:
        for _ in range(steps):
            for own, optimizer, given in zip(w, inner, gradients(ranks, t), strict=True):
                for p, g in zip(own, given, strict=True):
                    p.grad = g.clone()
                optimizer.step()
            t += 1
        grown = math.log(steps) / math.log(every)
        lr_now, mu_now = 1 + (lr - 1) * grown, mu * grown
        for i, a in enumerate(anchor):
            mean = sum(a - own[i].detach() for own in w) / ranks
            v[i] = mu_now * v[i] + mean if mu_now else v[i]  # SGD without momentum leaves its own alone
            a -= lr_now * (mean + mu_now * v[i])
            for own in w:
                own[i].data.copy_(a)
    for own in params:
        for p, a in zip(own, anchor, strict=True):
            torch.testing.assert_close(p.detach(), a, rtol=1e-12, atol=1e-12)
