"""The oracle of Radius against facts from elsewhere: hand computation, torch.optim, the paper."""

from __future__ import annotations

import math

import pytest
from oracles import RadiusOracle
from oracles.samples import ADAM, assert_close, random_grads, start, tensor, torch_adamw


def radius(ranks: int, **options) -> RadiusOracle:
    return RadiusOracle(start(), ranks, **{**ADAM, "density": 0.3, "interval": 4, "dense_steps": 3, **options})


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 2.0}, {"maximize": True}], ids=str)
def test_radius_at_density_1_is_torch_adamw(ranks: int, options: dict):
    oracle = radius(ranks, density=1.0, **options)
    for step, wanted in enumerate(torch_adamw(ranks, 12, **options)):
        oracle.step(random_grads(ranks, step))
        assert_close(oracle.params, wanted)


def test_radius_three_elements_by_hand():
    """density 1/3 (k = 1), interval 3, betas 1/2, eps 0, decay 1/2, lr 1/10, two ranks, w = (1, 2, 2.2).

    t = 1, resample. G = (2, 1, 1), m_hat = G and v_hat = G^2, so u = 1 + w/2 = (1.5, 2, 2.1): mask 3rd. (|G|: 1st.)
        m = G/2 = (1, .5, .5), v = G^2/2 = (2, .5, .5), w = (.85, 1.8, 1.99).
    t = 2, sparse. G = (0, 0, 3); rank 0 keeps (2, 4, 0), rank 1 nothing.
        m = (.5, .25, 1.75), v = (1, .25, 4.75), both divided by 3/4: m_hat/sqrt(v_hat) = (1, 1, 7/sqrt(19)) / sqrt(3).
    t = 3, resample. G = ((2, 4, 0) + (2, 0, 0)) / 2 = (2, 2, 0), nothing is kept.
        m = (1.25, 1.125, .875), v = (2.5, 2.125, 2.375), both divided by 7/8:
        m_hat/sqrt(v_hat) = (10/7 / sqrt(20/7), 9/7 / sqrt(17/7), 1 / sqrt(19/7)); + w/2 = (1.22, 1.65, 1.51): mask 2nd.
    """
    oracle = RadiusOracle(
        [tensor(1, 2, 2.2)], 2, 0.1, (0.5, 0.5), 0.0, 0.5, density=1 / 3, interval=3, dense_steps=0, compress=[True]
    )
    oracle.step([[tensor(4, 0, 1)], [tensor(0, 2, 1)]])
    w = tensor(0.85, 1.8, 1.99)
    assert_close(oracle.params, [w])
    assert oracle.mask[0].tolist() == [False, False, True]

    oracle.step([[tensor(2, 4, 2)], [tensor(0, 0, 4)]])
    w = w - 0.1 * (tensor(1, 1, 7 / math.sqrt(19)) / math.sqrt(3) + 0.5 * w)
    assert_close(oracle.params, [w])
    assert oracle.residual[0][0].tolist() == [2, 4, 0] and oracle.residual[1][0].tolist() == [0, 0, 0]
    assert oracle.mask[0].tolist() == [False, False, True]

    oracle.step([[tensor(0, 0, 0)], [tensor(2, 0, 0)]])
    u = tensor(10 / 7 / math.sqrt(20 / 7), 9 / 7 / math.sqrt(17 / 7), 1 / math.sqrt(19 / 7)) + 0.5 * w
    assert_close(oracle.params, [w - 0.1 * u])
    assert oracle.residual[0][0].tolist() == [0, 0, 0]
    assert oracle.mask[0].tolist() == [False, True, False]
