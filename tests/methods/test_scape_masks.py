"""ScapeAdamS and its masks: when one is chosen, how dense, in a checkpoint, lost, or not fitting."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import gradients, step
from test_scape import SHAPES, dense_moment, make


def test_density_falls_exponentially_after_the_warm_up():
    world, _, params, optimizers = make(1, [(128, 128)], density=0.01, dense_steps=4, density_steps=10)
    records = []
    for t in range(18):
        step(world, params, optimizers, gradients(1, t, [(128, 128)]))
        records.append(optimizers[0].stats.density)
    wanted = [1.0] * 4 + [max(0.01, 0.01 ** (k / 10)) for k in range(14)]
    assert records == pytest.approx(wanted, rel=5e-3)


def test_the_clock_of_the_mask():
    """The first step has no mask: a step uses that of the step before."""
    world, _, params, optimizers = make(1, density=0.1, density_steps=0)
    for t, phase in enumerate(["dense", "sparse"]):
        step(world, params, optimizers, gradients(1, t, SHAPES))
        assert optimizers[0].stats.phase == phase


def test_a_lost_mask_makes_the_next_step_dense_and_nothing_is_lost_with_it():
    world, _, params, optimizers = make(2, density=0.1, density_steps=0)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    for pending in (
        exchange.in_flight for optimizer in optimizers for exchange in optimizer._session.post_commit.exchanges
    ):
        world.failing_everywhere.add(pending.number)
    p = params[0][0]
    residuals = sum(o.state[local[0]]["residual"] for o, local in zip(optimizers, params, strict=True)) / 2
    wanted = 0.9 * dense_moment(optimizers[0], p) + 0.1 * sum(g[0] for g in gradients(2, 3, SHAPES)) / 2 + residuals
    step(world, params, optimizers, gradients(2, 3, SHAPES))
    assert optimizers[0].stats.phase == "dense" and optimizers[0].stats.residual_norm() == 0
    torch.testing.assert_close(dense_moment(optimizers[0], p), wanted)
    step(world, params, optimizers, gradients(2, 4, SHAPES))
    assert optimizers[1].stats.phase == "sparse"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_checkpoint_with_a_mask_in_flight_continues_to_the_bit(at):
    options = dict(density=0.1, density_steps=3)
    shapes = [(256, 256), (30,)]
    world, _, params, optimizers = make(2, shapes, **options)
    for t in range(at):
        step(world, params, optimizers, gradients(2, t, shapes))
    assert all(optimizer._session.post_commit.exchanges for optimizer in optimizers)  # in flight
    reached = [[p.detach().clone() for p in local] for local in params]
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    again, _, new_params, new = make(2, shapes, **options)
    for local, held, optimizer, state in zip(new_params, reached, new, saved, strict=True):
        for p, w in zip(local, held, strict=True):
            p.data.copy_(w)
        optimizer.load_state_dict(state)
    for t in range(at, at + 5):
        step(world, params, optimizers, gradients(2, t, shapes))
        step(again, new_params, new, gradients(2, t, shapes))
        assert optimizers[0].stats.phase == new[0].stats.phase == "sparse"
    for p, q in zip(params[1], new_params[1], strict=True):
        assert torch.equal(p, q)
        for name, value in optimizers[1].state[p].items():
            assert torch.equal(value, new[1].state[q][name]), name


def test_a_moment_that_does_not_fit_its_mask_is_refused():
    world, _, params, optimizers = make(1, density=0.1, density_steps=0)
    for t in range(3):
        step(world, params, optimizers, gradients(1, t, SHAPES))
    state = copy.deepcopy(optimizers[0].state_dict())
    for broken in (state["state"][0]["exp_avg"][:-1], torch.zeros(3)):
        state["state"][0]["exp_avg"] = broken
        with pytest.raises(ValueError, match="'exp_avg' of parameter 0"):
            optimizers[0].load_state_dict(state)
