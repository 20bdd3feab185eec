"""Separate around a base: what its checkpoints, copies and pickles carry, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from conformance import through_a_file
from problems import replicas, step
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


class Around(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does, and has no state of a tensor without a gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["slow"] = p.detach().clone()


def matrices(*numbers: int) -> list[list[torch.Tensor | None]]:
    """Gradients of two ranks and two tensors, or None for 0."""
    return [[torch.full((4, 4), float(n + rank)) if n else None for n in numbers] for rank in range(2)]


def is_changed_by_saving(params, optimizers) -> bool:
    before = [p.detach().clone() for p in params[0]]
    counts = [group.get("step") for group in optimizers[0].param_groups]
    optimizers[0].state_dict()
    is_same = all(map(torch.equal, before, params[0]))
    return not is_same or counts != [group.get("step") for group in optimizers[0].param_groups]


@pytest.mark.filterwarnings("ignore:this state dict of")
@pytest.mark.parametrize("wrap", [compopt.Average, compopt.LocalSteps])
def test_a_state_dict_steps_no_optimizer_inside_the_base(wrap):
    """It asks a copy of the base for the state of the second tensor, which never had a gradient."""

    def make(params, process_group):
        return wrap(Around(torch.optim.SGD(params, lr=0.1)), process_group=process_group)

    world, params, optimizers = replicas(2, [torch.zeros(4, 4), torch.zeros(4, 4)], make)
    step(world, params, optimizers, matrices(1, 0))
    assert not is_changed_by_saving(params, optimizers)


@pytest.mark.filterwarnings("ignore:this state dict of")
def test_a_state_dict_does_not_step_a_base_of_this_package():
    """Of a tensor that is trained since the last step, which was skipped, the base has no state yet."""

    def make(params, process_group):
        params[1].requires_grad_(False)
        return compopt.Average(compopt.AdamS(params, lr=0.1), process_group=process_group)

    world, params, optimizers = replicas(2, [torch.zeros(4, 4), torch.zeros(4, 4)], make)
    step(world, params, optimizers, matrices(1, 0))
    for own in params:
        own[1].requires_grad_(True)
    skipped = matrices(2, 3)
    skipped[1][0][0, 0] = torch.inf
    step(world, params, optimizers, skipped)
    assert optimizers[0].stats.phase == "skipped"
    for own, grads in zip(params, matrices(4, 5), strict=True):
        own[0].grad, own[1].grad = grads
    assert not is_changed_by_saving(params, optimizers)
    assert optimizers[0].base.stats.applied_steps == 1
    step(world, params, optimizers, matrices(6, 7))
    assert all(map(torch.equal, *params)) and bool(params[0][1].any())
