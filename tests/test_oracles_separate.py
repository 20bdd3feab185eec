"""The oracle of SEPARATE against facts from elsewhere: hand computation, torch.optim, the paper."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import SeparateOracle
from oracles.samples import ADAM, SHAPES, assert_close, mean, randn, random_grads, start, tensor, torch_adamw


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def gaussian(ratio: int):
    def random(t: int, i: int) -> torch.Tensor:
        c = SHAPES[i][-1]
        return randn(c, -(-c // ratio), seed=100 * t + i)

    return random


def square_orthogonal(t: int, i: int) -> torch.Tensor:
    """R R^T / r = I: nothing is lost."""
    c = SHAPES[i][-1]
    return torch.linalg.qr(randn(c, c, seed=t)).Q * c**0.5


@pytest.mark.parametrize("ranks", [1, 3])
def test_separate_without_loss_is_the_base_optimizer(ranks: int):
    oracle = SeparateOracle(start(), ranks, lambda ps: torch.optim.AdamW(ps, **ADAM), square_orthogonal)
    for step, wanted in enumerate(torch_adamw(ranks, 6)):
        oracle.step(random_grads(ranks, step))
        assert oracle.phase == "projected"
        assert_close(oracle.params, wanted, 1e-10)
        assert max(e.abs().max() for own in oracle.error for e in own) < 1e-12


def test_separate_by_hand():
    """c = 3, r = 1, beta 3/4, SGD with lr 1 from w = 0.

    t = 1, R = (1, 0, 1): p = 1 + 3 = 4, reconstruction (4, 0, 4), lost (-3, 2, -1), error a quarter: (-.75, .5, -.25).
    t = 2, g = 0, R = (0, 2, 0): h = error, p = 1, reconstruction (0, 2, 0), lost (-.75, -1.5, -.25);
        error 3/4 (-.75, .5, -.25) + 1/4 (-.75, -1.5, -.25) = (-.75, 0, -.25).
    """
    matrices = {1: tensor(1, 0, 1), 2: tensor(0, 2, 0)}
    oracle = SeparateOracle([torch.zeros(1, 3)], 1, sgd, lambda t, i: matrices[t].view(3, 1), ef_beta=0.75)
    oracle.step([[tensor(1, 2, 3).view(1, 3)]])
    assert oracle.params[0].tolist() == [[-4, 0, -4]]
    assert oracle.error[0][0].tolist() == [[-0.75, 0.5, -0.25]]
    oracle.step([[torch.zeros(1, 3)]])
    assert oracle.average[0].tolist() == [[0, 2, 0]] and oracle.params[0].tolist() == [[-4, -2, -4]]
    assert oracle.error[0][0].tolist() == [[-0.75, 0, -0.25]]


def test_separate_is_unbiased_and_its_variance_is_w():
    """2000 seeds: the mean is within 5 standard errors of g, the mean squared loss within 5 % of (c + 1)/r |g|^2."""
    g = randn(3, 16, seed=5)
    oracle = SeparateOracle(
        [torch.zeros(3, 16)], 1, sgd, lambda t, i: randn(16, 4, seed=t), ef_beta=0.9, reset_interval=1
    )
    total, square, lost = torch.zeros(3, 16), torch.zeros(3, 16), 0.0
    for _ in range(2000):
        oracle.step([[g]])
        got = oracle.average[0]
        total, square, lost = total + got, square + got.square(), lost + (got - g).square().sum().item()
    average = total / 2000
    error = ((square / 2000 - average.square()) / 2000).sqrt()
    assert ((average - g).abs() < 5 * error).all()
    assert lost / 2000 == pytest.approx(17 / 4 * g.square().sum().item(), rel=0.05)


def test_separate_auto_beta_and_its_stability():
    """Stationary gradients, ratio 16: bounded with "auto"; weighting the new error, as printed, diverges."""

    def error_after(steps: int, ef_beta: float | str) -> float:
        oracle = SeparateOracle(
            [torch.zeros(8, 64)], 1, sgd, lambda t, i: randn(64, 4, seed=t), ef_beta=ef_beta, reset_interval=None
        )
        g = randn(8, 64, seed=9)
        for _ in range(steps):
            oracle.step([[g]])
        return (oracle.error[0][0].norm() / g.norm()).item()

    w = 65 / 4
    oracle = SeparateOracle([torch.zeros(8, 64)], 1, sgd, lambda t, i: randn(64, 4, seed=t))
    assert oracle.beta(0, 4) == pytest.approx(w / (1 + w))
    assert error_after(500, "auto") < 10
    assert error_after(30, 0.05) > 1e6  # 0.95 read as the paper prints it


def test_separate_resets_starts_dense_and_clips():
    adamw = torch_adamw(2, 2)
    oracle = SeparateOracle(
        start(), 2, lambda ps: torch.optim.AdamW(ps, **ADAM), gaussian(2), warmup_steps=2, reset_interval=4
    )
    for step in range(9):
        oracle.step(random_grads(2, step))
        if step < 2:
            assert oracle.phase == "dense"
            assert_close(oracle.params, next(adamw))
        cleared = max(e.abs().max() for own in oracle.error for e in own) == 0
        assert cleared == (oracle.t <= 2 or oracle.t % 4 == 0)

    for clip in ("local", "average"):
        oracle = SeparateOracle(start(), 2, sgd, square_orthogonal, max_grad_norm=1.0, clip=clip)
        oracle.step(random_grads(2, 0))
        grads = random_grads(2, 0)
        norms = [math.sqrt(sum(g.square().sum() for g in own)) for own in (*grads, mean(grads))]
        if clip == "local":
            wanted = mean([[g / (norms[rank] + 1e-6) for g in own] for rank, own in enumerate(grads)])
        else:
            wanted = [g / (norms[2] + 1e-6) for g in mean(grads)]
        assert_close(oracle.average, wanted, 1e-10)
