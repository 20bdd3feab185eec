"""Separate around a base: what its checkpoints, copies and pickles carry, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from conformance import through_a_file
from test_separate_base import Net, adamw, assert_same, loss, wrapped

import compopt


@pytest.mark.parametrize(("name", "value"), [("rank", 8.0), ("block_rows", 8.0), ("ratio", float("inf"))])
def test_a_size_of_another_kind_is_refused(name, value):
    options = {} if name == "rank" else {"projection": "gaussian"}
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        compopt.SeparateAdam([torch.nn.Parameter(torch.zeros(64, 64))], **options, **{name: value})


def test_a_checkpoint_carries_both_and_continues_to_the_bit():
    whole = wrapped(adamw, adaptive=True, adapt_interval=4)
    whole.train(loss, 6)
    saved = [(copy.deepcopy(m.state_dict()), through_a_file(o.state_dict())) for _, m, o in whole]
    whole.train(loss, 6)
    resumed = wrapped(adamw, adaptive=True, adapt_interval=4)
    resumed.steps = 6
    for (weights, state), (_, model, optimizer) in zip(saved, resumed, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups is optimizer.base.param_groups
    resumed.train(loss, 6)
    for a, b in zip(whole.optimizers, resumed.optimizers, strict=True):
        assert_same(a.state_dict(), b.state_dict())
    for p, q in zip(whole.models[1].parameters(), resumed.models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_of_the_base_alone_is_taken_and_one_that_does_not_fit_is_refused_whole():
    model, wrapped_model = Net(), Net()
    plain = adamw(model.parameters())
    loss(model, 0, 0).backward()
    plain.step()
    optimizer = compopt.Separate(adamw(wrapped_model.parameters()), projection="gaussian", ratio=8)
    optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert torch.equal(
        optimizer.base.state[wrapped_model.up.weight]["exp_avg"], plain.state[model.up.weight]["exp_avg"]
    )

    loss(wrapped_model, 0, 1).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    broken["state"][0]["residual"] = torch.zeros(3)
    broken["base"]["state"][0]["exp_avg"] += 1
    with pytest.raises(ValueError, match="residual"):
        optimizer.load_state_dict(broken)
    assert_same(optimizer.state_dict(), before)
