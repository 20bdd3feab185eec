"""A round that is ended before its time: after the last step, before an evaluation, before the model is saved."""

from __future__ import annotations

import local_runs
import pytest
import torch
from local_runs import adamw, are_equal, copies, end_round
from problems import gradients, step, weights

import compopt


def train(ranks: int, steps: int, dtype=torch.float64, **options):
    params, optimizers = local_runs.train(ranks, steps, dtype, **options)
    return optimizers[0].comm.world, params, optimizers


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_round_that_ends_early_has_the_outer_step_of_its_length(ranks):
    """Half of a round of 4, by the logarithm: rate and momentum are half way from 1 and 0 to .7 and .9."""
    _, at_round, _ = train(ranks, 4)
    _, params, optimizers = train(ranks, 6)
    start = weights()
    d1 = [(a - w.detach()) for a, w in zip(start, first_mean(ranks), strict=True)]  # of the first round
    anchors = [w.detach().clone() for w in at_round[0]]
    moved = [[a - p.detach() for a, p in zip(anchors, own, strict=True)] for own in params]
    end_round(optimizers)
    assert are_equal(params)
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


@pytest.mark.parametrize("options", [dict(fragments=2), dict(delay=2), dict(fragments=2, delay=1)])
def test_ranks_are_equal_afterwards_and_train_on(options):
    world, params, optimizers = train(2, 10, every=8, **options)
    assert not are_equal(params)
    end_round(optimizers)
    assert are_equal(params)
    for t in range(10, 26):
        step(world, params, optimizers, gradients(2, t))
    end_round(optimizers)
    assert are_equal(params)


@pytest.mark.parametrize("payload", [None, "int4", "int2"])
@pytest.mark.parametrize("gradients_kept", [True, False])
def test_right_after_a_round_nothing_moves(payload, gradients_kept):
    """Not even by what rounding has left in the residuals, or by the outer momentum."""
    _, params, optimizers = train(2, 8, torch.float32, payload_dtype=payload)
    for optimizer in optimizers if not gradients_kept else []:
        optimizer.zero_grad()
    before = copies(params)
    end_round(optimizers)
    assert all(map(torch.equal, params[0], before[0])) and are_equal(params)
    assert optimizers[0].stats.round == 2


@pytest.mark.parametrize("options", [dict(), dict(fragments=2), dict(delay=2), dict(fragments=2, delay=2)])
@pytest.mark.parametrize("steps", [8, 9, 11])
def test_ending_a_round_twice_is_ending_it_once(options, steps):
    _, params, optimizers = train(2, steps, torch.float32, every=4, payload_dtype="int4", **options)
    end_round(optimizers)
    before, rounds = copies(params), optimizers[0]._counts.round
    assert are_equal(params)
    end_round(optimizers)
    assert all(map(torch.equal, params[0], before[0])) and are_equal(params)
    assert optimizers[0]._counts.round == rounds == optimizers[0].stats.round


def test_a_round_that_is_ended_after_one_fragment_exchanges_the_others_only():
    """Fragment 1 of 2 was exchanged in this very step: its parameters stay as they are."""
    _, params, optimizers = train(2, 2, torch.float32, every=4, payload_dtype="int4", fragments=2)
    before = copies(params)
    exchanged = [torch.equal(p, q) for p, q in zip(*params, strict=True)]
    assert any(exchanged) and not all(exchanged)
    end_round(optimizers)
    stayed = [torch.equal(p, q) for p, q in zip(params[0], before[0], strict=True)]
    assert are_equal(params) and stayed == exchanged


def test_what_is_on_its_way_is_all_that_is_exchanged_where_nothing_has_moved_since():
    _, params, optimizers = train(2, 8, every=4, delay=2)

    def exchanges() -> int:
        return int(optimizers[0].state_dict()["state"][0]["outer"]["optimizer"]["step"])

    assert exchanges() == 1
    end_round(optimizers)
    assert exchanges() == 2 and are_equal(params)


def test_on_one_process_there_is_nothing_to_end():
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.LocalSteps(adamw(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    optimizer.end_round()
    assert torch.equal(model.weight.detach(), before)
