"""SCAPE's guesses where to look for a threshold: found where selection is sampled, forgotten by consolidation."""

from __future__ import annotations

import pytest
import torch
from problems import gradients, replicas, step, weights

import compopt

SHAPES = [(192, 200), (64, 80)]  # above and below what a threshold is looked for in


@pytest.mark.parametrize("sharded", [False, True])
def test_consolidation_forgets_them_so_that_a_resumed_run_selects_as_the_run_that_went_on(sharded, monkeypatch):
    monkeypatch.setenv("COMPOPT_BACKEND", "torch")  # which tries thresholds; the native backend counts
    world, params, optimizers = replicas(
        2,
        weights(SHAPES, torch.float32),
        lambda ps, process_group: compopt.ScapeAdamS(
            ps, process_group=process_group, density=0.1, density_warmup_steps=0, sharded=sharded
        ),
    )
    for t in range(4):
        step(world, params, optimizers, gradients(2, t, SHAPES, torch.float32))
    held = [optimizer.state[local[0]]["threshold"] for local, optimizer in zip(params, optimizers, strict=True)]
    assert any(float(threshold) > 0 for threshold in held)
    world.consolidate(optimizers)
    assert all(float(threshold) == 0 for threshold in held)
    saved = optimizers[0].state_dict()
    again_world, again_params, again = replicas(
        2,
        [p.detach().clone() for p in params[0]],
        lambda ps, process_group: compopt.ScapeAdamS(
            ps, process_group=process_group, density=0.1, density_warmup_steps=0, sharded=sharded
        ),
    )
    for optimizer in again:
        optimizer.load_state_dict(saved)
    for t in range(4, 8):
        grads = gradients(2, t, SHAPES, torch.float32)
        step(world, params, optimizers, grads)
        step(again_world, again_params, again, grads)
    for p, q in zip(params[1], again_params[1], strict=True):
        assert torch.equal(p, q)
