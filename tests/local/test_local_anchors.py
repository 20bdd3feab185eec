"""Anchors in the model for an evaluation, and the rank's own parameters afterwards."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from local_runs import adamw, are_equal, copies, end_round, train
from problems import gradients, step, weights

import compopt

OPTIONS = [dict(), dict(fragments=2), dict(delay=2), dict(payload_dtype="int4", fragments=2, delay=1)]


def shown(params, optimizers) -> list[list[torch.Tensor]]:
    found = []
    for own, optimizer in zip(params, optimizers, strict=True):
        with optimizer.use_anchors():
            found.append([p.detach().clone() for p in own])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("since", [0, 1, 3])
def test_they_are_the_model_as_of_the_last_exchange(since, dtype):
    """Which ``end_round()`` would leave there, and does where the round has just ended."""
    params, optimizers = train(3, 8, dtype)
    at_round = copies(params)
    for t in range(8, 8 + since):
        step(optimizers[0].comm.world, params, optimizers, gradients(3, t, dtype=dtype))
    before = copies(params)
    found = shown(params, optimizers)
    for own in found:
        assert all(map(torch.equal, own, at_round[0]))
    for own, as_it_was in zip(params, before, strict=True):
        assert all(map(torch.equal, own, as_it_was))
    if since == 0:
        end_round(optimizers)
        assert all(map(torch.equal, params[1], found[1]))
    else:
        assert not are_equal(params)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("offload", [None, "outer"])
def test_training_goes_on_as_if_they_had_not_been_shown(options, offload):
    expected, _ = train(2, 23, torch.bfloat16, offload=offload, **options)
    params, optimizers = train(2, 0, torch.bfloat16, offload=offload, **options)
    for t in range(23):
        sent = optimizers[0].comm.bytes_sent
        first, second = shown(params, optimizers)
        assert all(map(torch.equal, first, second)) and optimizers[0].comm.bytes_sent == sent
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t, dtype=torch.bfloat16))
    for own, theirs in zip(params, expected, strict=True):
        assert all(map(torch.equal, own, theirs))


def test_what_is_on_its_way_is_not_shown():
    """Right after an exchange has begun: what is frozen there moves no more, and has not got its anchor yet."""
    params, optimizers = train(2, 4, delay=2)
    for own in params:
        own[2].requires_grad_(False)
    for own in shown(params, optimizers):
        assert all(map(torch.equal, own, weights()))


def test_a_rank_whose_parameters_are_not_finite_shows_anchors_too():
    """It sends nothing in the exchange that has begun."""
    params, optimizers = train(3, 3, delay=2)
    params[1][2].data[0, 0] = torch.nan
    step(optimizers[0].comm.world, params, optimizers, gradients(3, 3))
    for own in shown(params, optimizers):
        assert all(map(torch.equal, own, weights()))


def test_an_error_brings_the_parameters_back():
    params, optimizers = train(2, 6)
    before = copies(params)
    with pytest.raises(KeyboardInterrupt), optimizers[0].use_anchors():
        assert not torch.equal(params[0][0], before[0][0])
        raise KeyboardInterrupt
    assert all(map(torch.equal, params[0], before[0]))
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 6))


def test_within_each_other_they_are_shown_until_the_outermost_ends():
    params, optimizers = train(2, 6)
    before = copies(params)
    with optimizers[0].use_anchors():
        with optimizers[0].use_anchors():
            inner = copies(params)
        assert all(map(torch.equal, params[0], inner[0])) and not torch.equal(params[0][0], before[0][0])
        with pytest.raises(RuntimeError, match=r"leave use_anchors\(\) first"):
            optimizers[0].state_dict()
    assert all(map(torch.equal, params[0], before[0]))


CALLS = {
    "step": lambda optimizer: optimizer.step(),
    "end_round": lambda optimizer: optimizer.end_round(),
    "rebind": lambda optimizer: optimizer.rebind(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({}),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_the_ranks_own_parameters_is_refused_meanwhile(call):
    params, optimizers = train(2, 6)
    before = copies(params)
    with optimizers[0].use_anchors(), pytest.raises(RuntimeError, match=r"leave use_anchors\(\) first"):
        CALLS[call](optimizers[0])
    assert all(map(torch.equal, params[0], before[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizers[0].state_dict()


def test_frozen_layers():
    """One moved in the round before it was frozen; what is done to another, which did not, stays."""
    params, optimizers = train(2, 4)
    at_round = copies(params)
    for own in params:
        own[3].requires_grad_(False)
        own[3].data.fill_(3.0)
    for t in (4, 5):
        grads = gradients(2, t)
        for given in grads:
            given[3] = None
        step(optimizers[0].comm.world, params, optimizers, grads)
    for own in params:
        own[2].requires_grad_(False)
    for own in shown(params, optimizers):
        assert bool((own[3] == 3).all())
        assert all(torch.equal(own[i], at_round[0][i]) for i in (0, 1, 2, 4))


def test_a_layer_that_was_never_trained_is_shown_as_it_is():
    params = [torch.nn.Parameter(w, requires_grad=i != 2) for i, w in enumerate(weights())]
    optimizer = compopt.LocalSteps(adamw(params), 4, growth_steps=0, simulate=True)
    for t in range(6):
        for p, g in zip(params, gradients(1, t)[0], strict=True):
            p.grad = g if p.requires_grad else None
        optimizer.step()
    with optimizer.use_anchors():
        assert torch.equal(params[2], weights()[2])


def test_without_other_ranks_the_model_is_shown():
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.LocalSteps(adamw(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with optimizer.use_anchors():
        assert torch.equal(model.weight, before)
        optimizer.state_dict()
