"""Sharded state: one norm and one step decision over the shards of all ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from problems import gradients, replicas, step, weights

import compopt
from compopt.tagc import UnionReducer

SHAPES = [(64, 65), (80,), (64, 66), (10, 10)]


def make(**options):
    options = {"lr": 1e-2, "density": 0.1, **options}
    return replicas(3, weights(SHAPES, torch.float32), functools.partial(compopt.TagcAdamW, **options))


def snapshot(params, optimizers) -> list[torch.Tensor]:
    state = [v.clone() for o in optimizers for entry in o.state.values() for v in entry.values()]
    return [p.detach().clone() for local in params for p in local] + state


def same(before, after) -> bool:
    return all(map(torch.equal, before, after))


def test_the_norm_is_of_all_shards():
    world, params, optimizers = make(density=1.0)
    grads = gradients(3, 0, SHAPES, torch.float32)
    step(world, params, optimizers, grads)
    mean = torch.cat([torch.stack(one).mean(0).view(-1) for one in zip(*grads, strict=True)])
    for optimizer in optimizers:
        assert optimizer.stats.grad_norm == pytest.approx(float(mean.double().norm()), rel=1e-6)
        assert optimizer.stats.phase == "sparse"


def test_what_only_one_rank_finds_too_late_to_say_keeps_all_from_stepping(monkeypatch):
    """Its own part of the average cannot be decoded at first: everything has been sent by then."""
    world, params, optimizers = make()
    step(world, params, optimizers, gradients(3, 0, SHAPES, torch.float32))
    before, reduce, raised = snapshot(params, optimizers), UnionReducer.reduce, []

    def broken(reducer):
        mean = yield from reduce(reducer)
        if reducer.layout.rank == 1 and not raised:
            raised.append(reducer)
            raise OverflowError("of rank 1")
        return mean

    monkeypatch.setattr(UnionReducer, "reduce", broken)
    for local, mine in zip(params, gradients(3, 1, SHAPES, torch.float32), strict=True):
        for p, g in zip(local, mine, strict=True):
            p.grad = g
    with pytest.raises(RuntimeError, match=r"not applied on rank 0: .* rank 1 \(OverflowError: of rank 1\)"):
        world.step(optimizers)
    assert same(before, snapshot(params, optimizers))


def test_an_average_that_overflows_in_one_shard_is_not_applied_in_any():
    """Each rank's gradient is finite, and so are its marks; what is sent to one owner is not."""
    world, params, optimizers = make(payload_dtype="float16")
    step(world, params, optimizers, gradients(3, 0, SHAPES, torch.float32))
    before, grads = snapshot(params, optimizers), gradients(3, 1, SHAPES, torch.float32)
    grads[0][2][5, 5] = 1e6
    step(world, params, optimizers, grads)
    assert [o.stats.phase for o in optimizers] == ["skipped"] * 3
    assert same(before, snapshot(params, optimizers))
