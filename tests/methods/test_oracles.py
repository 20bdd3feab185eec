"""The common parts of all oracles, and the toy problems' stated losses, which rest on them."""

from __future__ import annotations

import pytest
import torch
from oracles import RadiusOracle, ScapeOracle, SeparateOracle, TagcOracle
from oracles.samples import ADAM, SHAPES, assert_close, randn, random_grads, start
from oracles.training import best_of_sgd, train_dense
from problems import NAMES, problem


def radius(ranks: int) -> RadiusOracle:
    return RadiusOracle(start(), ranks, **ADAM, density=0.3, interval=4, dense_steps=3)


def scape(ranks: int) -> ScapeOracle:
    return ScapeOracle(start(), ranks, **ADAM, owner=[0] * len(SHAPES), density=0.3)


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
    """That the methods reach it too: test_problems.py."""
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
