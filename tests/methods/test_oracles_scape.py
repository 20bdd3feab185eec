"""The oracles of AdamS and SCAPE against facts from elsewhere: hand computation and the paper."""

from __future__ import annotations

import math

import pytest
from oracles import AdamSOracle, ScapeOracle
from oracles.samples import ADAM, SHAPES, assert_close, random_grads, start, tensor


def test_adams_by_hand():
    """t = 1, g = 2: m = 1, v = g^2/4 = 1, corrected (1 / .5) / sqrt(1 / .25) = 1.
    t = 2, g = 6: m = 3.5, v = .75 * 1^2 + .25 * 36 = 9.75; corrections 1 - .25 = .75 and 1 - .5625 = .4375.
    """
    oracle = AdamSOracle([tensor(3)], 2, 1.0, (0.5, 0.75), 0.0, 0.5)
    oracle.step([[tensor(1)], [tensor(3)]])
    w = 3 - 1.0 - 0.5 * 3
    assert_close(oracle.params, [tensor(w)])
    oracle.step([[tensor(6)], [tensor(6)]])
    assert_close(oracle.params, [tensor(w - (3.5 / 0.75) / math.sqrt(9.75 / 0.4375) - 0.5 * w)])


def scape(ranks: int, **options) -> ScapeOracle:
    owner = [i % ranks for i in range(len(SHAPES))]
    return ScapeOracle(start(), ranks, **{**ADAM, "owner": owner, "density": 0.3, **options})


@pytest.mark.parametrize("ranks", [1, 3])
def test_scape_at_density_1_is_adams(ranks: int):
    oracle = scape(ranks, density=1.0)
    dense = AdamSOracle(start(), ranks, **ADAM)
    for step in range(8):
        oracle.step(random_grads(ranks, step))
        dense.step(random_grads(ranks, step))
        assert_close(oracle.params, dense.params, 1e-11)  # ghat = (b - b1 m) / (1 - b1) costs a digit
        assert oracle.phase == "dense"


def test_scape_three_elements_by_hand():
    """density 1/3 (k = 1), b1 = 1/2, b2 = 3/4, eps next to 0, decay 0, lr 1, two ranks; rank 0 selects.

    t = 1, all ones. x0 = (2, 0, 1), x1 = (0, 2, 3), m = (1, 1, 2). Rank 0's largest is its 1st, though m's is the 3rd.
        m_hat = (2, 2, 4) and v_hat = ghat^2 = (4, 4, 16): u = (1, 1, 1).
    t = 2, mask 1st. x0 = m/2 + (2, 0, 8)/2 = (1.5, .5, 5), x1 = m/2 + (0, 2, 0)/2 = (.5, 1.5, 1): b = (1, 0, 0),
        kept (0, .5, 5) and (0, 1.5, 1); ghat = (1 - 1/2) / (1/2) = 1; v = 3/4 * 1 + 1/4 * 1 = 1;
        u = (1 / (3/4)) / sqrt(1 / (7/16)) on the 1st, 0 elsewhere. Next mask: the 3rd.
    t = 3, no gradient. x0 = (.5, .5, 5), x1 = (.5, 1.5, 1): b = (0, 0, 3), ghat = 6 on the 3rd, v = 1/4 * 36 = 9,
        u = (3 / (7/8)) / sqrt(9 / (37/64)); the 1st and 2nd are kept: (.5, .5, 0), (.5, 1.5, 0).
    """
    oracle = ScapeOracle([tensor(0, 0, 0)], 2, 1.0, (0.5, 0.75), 1e-30, 0.0, owner=[0], density=1 / 3)
    oracle.step([[tensor(4, 0, 2)], [tensor(0, 4, 6)]])
    assert oracle.m[0].tolist() == [1, 1, 2] and oracle.average[0].tolist() == [2, 2, 4]
    assert_close(oracle.params, [tensor(-1, -1, -1)])
    assert oracle.phase == "dense" and oracle.next_mask[0].tolist() == [True, False, False]

    oracle.step([[tensor(2, 0, 8)], [tensor(0, 2, 0)]])
    w = tensor(-1 - (4 / 3) / math.sqrt(16 / 7), -1, -1)
    assert_close(oracle.params, [w])
    assert oracle.m[0].tolist() == [1, 0, 0] and oracle.phase == "sparse"
    assert oracle.residual[0][0].tolist() == [0, 0.5, 5] and oracle.residual[1][0].tolist() == [0, 1.5, 1]
    assert oracle.next_mask[0].tolist() == [False, False, True]

    oracle.step([[tensor(0, 0, 0)], [tensor(0, 0, 0)]])
    assert_close(oracle.params, [w - tensor(0, 0, (24 / 7) / math.sqrt(9 * 64 / 37))])
    assert oracle.residual[0][0].tolist() == [0.5, 0.5, 0] and oracle.residual[1][0].tolist() == [0.5, 1.5, 0]
