"""The oracle of SEPARATE against facts from elsewhere: hand computation, torch.optim, the paper."""

from __future__ import annotations

import pytest
import torch
from oracles import SeparateOracle
from oracles.samples import ADAM, SHAPES, assert_close, randn, random_grads, start, tensor, torch_adamw


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


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
        assert max(e.abs().max() for local in oracle.error for e in local) < 1e-12


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
