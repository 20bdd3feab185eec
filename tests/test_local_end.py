"""A round that is ended before its time: after the last step, before an evaluation, before the model is saved."""

from __future__ import annotations

import pytest
import torch
from problems import gradients, replicas, step, weights

import compopt


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(ranks: int, steps: int, **options):
    options = {"every": 4, "every_warmup_steps": 0, "payload_dtype": None, **options}

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(ranks, weights(), make)
    for t in range(steps):
        step(world, params, optimizers, gradients(ranks, t))
    return world, params, optimizers


def end(world, optimizers) -> None:
    world.run([optimizer.end_round_in_turns() for optimizer in optimizers])


def equal(params) -> bool:
    return all(torch.equal(p, q) for other in params[1:] for p, q in zip(params[0], other, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_round_that_ends_early_has_the_outer_step_of_its_length(ranks):
    """Half of a round of 4, by the logarithm: rate and momentum are half way from 1 and 0 to .7 and .9."""
    _, at_round, _ = train(ranks, 4)
    world, params, optimizers = train(ranks, 6)
    start = weights()
    d1 = [(a - w.detach()) for a, w in zip(start, first_mean(ranks), strict=True)]  # of the first round
    anchors = [w.detach().clone() for w in at_round[0]]
    moved = [[a - p.detach() for a, p in zip(anchors, own, strict=True)] for own in params]
    end(world, optimizers)
    assert equal(params)
    assert (optimizers[0].stats.round, optimizers[0].stats.steps_into_round) == (2, 0)
    lr, mu = 0.85, 0.45
    for i, p in enumerate(params[0]):
        mean = sum(own[i] for own in moved) / ranks
        v = mu * d1[i] + mean
        torch.testing.assert_close(p.detach(), anchors[i] - lr * (mean + mu * v), rtol=1e-12, atol=1e-12)


def first_mean(ranks: int) -> list[torch.Tensor]:
    """Where the ranks' first four steps led, on average: without exchanges."""
    _, params, _ = train(ranks, 4, every=100)
    return [sum(p.detach() for p in tensors) / ranks for tensors in zip(*params, strict=True)]


@pytest.mark.parametrize("options", [dict(fragments=2), dict(delay=2), dict(fragments=2, delay=1, mix=0.5)])
def test_ranks_are_equal_afterwards_and_train_on(options):
    world, params, optimizers = train(2, 10, every=8, **options)
    assert not equal(params)
    end(world, optimizers)
    assert equal(params)
    for t in range(10, 26):
        step(world, params, optimizers, gradients(2, t))
    end(world, optimizers)
    assert equal(params)


def test_right_after_a_round_nothing_moves():
    world, params, optimizers = train(2, 8)
    before = [p.detach().clone() for p in params[0]]
    end(world, optimizers)
    assert all(torch.equal(p.detach(), q) for p, q in zip(params[0], before, strict=True)) and equal(params)
    assert optimizers[0].stats.round == 2


def test_on_one_process_there_is_nothing_to_end():
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.LocalSteps(adamw(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    optimizer.end_round()
    assert torch.equal(model.weight.detach(), before)
