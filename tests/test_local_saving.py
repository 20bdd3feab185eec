"""Checkpoints of local steps."""

from __future__ import annotations

import warnings

import pytest
import torch
from conformance import through_a_file
from local_runs import adamw, single, train
from problems import gradients, replicas, step, weights
from sim import World

import compopt


def state_of(optimizer) -> dict:
    return through_a_file(optimizer.state_dict())


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 2, "fragments": 2}, {"delay": 3, "mix": 0.5}])
@pytest.mark.parametrize("at", [2, 4, 5, 8])
def test_a_checkpoint_within_a_round_goes_on_to_the_bit(options, at):
    options = {"every": 4, "payload_dtype": "int8", "warmup_steps": 1, "every_warmup_steps": 0, **options}

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    world, params, optimizers = replicas(2, weights(dtype=torch.float32), make)
    for t in range(at):
        step(world, params, optimizers, single(2, t))
    saved = [state_of(optimizer) for optimizer in optimizers]
    world2, params2, optimizers2 = replicas(2, weights(dtype=torch.float32), make)
    for own, theirs, optimizer, state in zip(params2, params, optimizers2, saved, strict=True):
        for p, q in zip(own, theirs, strict=True):
            p.data.copy_(q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of another rank's residuals
            optimizer.load_state_dict(state)
    for t in range(at, at + 9):
        step(world, params, optimizers, single(2, t))
        step(world2, params2, optimizers2, single(2, t))
    for own, theirs in zip(params, params2, strict=True):
        assert all(map(torch.equal, own, theirs))
    assert optimizers[0].stats.round == optimizers2[0].stats.round > 1


def test_consolidated_it_goes_on_with_any_number_of_ranks():
    params, optimizers = train(2, 8, torch.float32, payload_dtype="int8")
    world = optimizers[0].comm.world
    world.consolidate(optimizers)
    state = state_of(optimizers[0])
    more = World(3)
    ranks = [[torch.nn.Parameter(p.detach().clone()) for p in params[0]] for _ in range(3)]
    new = [compopt.LocalSteps(adamw(own), process_group=comm) for own, comm in zip(ranks, more.comms, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in new:
            optimizer.load_state_dict(state)
    for t in range(8, 12):
        step(more, ranks, new, gradients(3, t, dtype=torch.float32))
    assert new[0].stats.round == 3 and all(map(torch.equal, ranks[0], ranks[2]))
