"""The oracles against facts from elsewhere: hand computation, torch.optim, the papers; and their common parts."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import AdamSOracle, RadiusOracle, ScapeOracle, SeparateOracle, TagcOracle
from oracles.samples import ADAM, SHAPES, assert_close, randn, random_grads, start, tensor, torch_adamw
from oracles.training import best_of_sgd, train_dense
from problems import NAMES, problem


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


def separate(ranks: int) -> SeparateOracle:
    return SeparateOracle(
        start(), ranks, lambda ps: torch.optim.SGD(ps, lr=1.0), lambda t, i: randn(SHAPES[i][-1], 2, seed=t)
    )


def tagc(ranks: int) -> TagcOracle:
    whole = [(i, 0, torch.Size(shape).numel()) for i, shape in enumerate(SHAPES)]
    return TagcOracle(start(), ranks, **ADAM, shards=[whole], density=0.5)


@pytest.mark.parametrize("make", [radius, scape, separate, tagc])
def test_missing_gradients_are_zeros_and_wrong_counts_are_told(make):
    left, right = make(2), make(2)
    first, second = random_grads(2, 0)
    left.step([first, [None, *second[1:]]])
    right.step([first, [torch.zeros_like(second[0]), *second[1:]]])
    assert_close(left.params, right.params)
    with pytest.raises(ValueError, match="each of 2 ranks"):
        left.step([first])
    with pytest.raises(ValueError, match=r"grads\[1\] has 2 tensors"):
        left.step([first, second[:2]])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_stated_loss_tells_adamw_from_sgd(name: str):
    """That the methods reach it too: test_training.py."""
    toy = problem(name)
    loss = train_dense(toy, lambda ps: torch.optim.AdamW(ps, lr=toy.lr, weight_decay=0.0), toy.lr, ranks=1)
    assert loss < toy.limit("adamw") <= toy.budget
    assert best_of_sgd(toy) > 1.3 * toy.budget


@pytest.mark.parametrize("name", NAMES)
def test_data_is_split_by_rank(name: str):
    """Ranks see different data; on the full-batch problems their gradients average to the whole's."""
    toy = problem(name)
    model = toy.make_model(3).double()
    assert any(p.dim() >= 2 and p.numel() >= 4096 for p in model.parameters())
    losses = [toy.loss(model, rank, 4, 0) for rank in range(4)]
    assert len({loss.item() for loss in losses}) == 4
    params = list(model.parameters())
    gradient = torch.autograd.grad(sum(losses) / 4, params)
    whole = torch.autograd.grad(toy.loss(model, 0, 1, 0), params)
    if name in ("quadratic", "rosenbrock"):
        assert_close(list(gradient), list(whole), 1e-9)
    again = problem.__wrapped__(name)
    assert again.loss(again.make_model(3).double(), 1, 4, 7).item() == toy.loss(model, 1, 4, 7).item()
