"""Gradients that come and go, and gradients in odd memory."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from conformance import assert_same, every_average, loss, make_ranks, snapshot, some_average
from sim import Ranks, World
from table import by_name
from torch import nn

import compopt

SHAPES = [(0, 5), (), (80, 70), (8, 16, 8, 8), (1, 4096), (64, 64, 0), (3,)]


@every_average
def test_a_step_without_any_gradient_changes_nothing_but_its_count(case):
    ranks = make_ranks(case, 2)
    for at in (3, 1, 1, 2):  # after dense, resampling and sparse steps
        ranks.train(loss, at)
        before = [snapshot(optimizer) for optimizer in ranks.optimizers]
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.world.step(ranks.optimizers)
        for old, optimizer in zip(before, ranks.optimizers, strict=True):
            parameters = sum(len(group["params"]) for group in optimizer.param_groups)
            assert_same(old[:parameters], snapshot(optimizer)[:parameters])
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


def find_in_buckets(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> str:
    """A parameter as messages name it where it has no name."""
    places = ((g, n, q) for g, group in enumerate(optimizer.param_groups) for n, q in enumerate(group["params"]))
    return next(f"parameter {n} of group {g}" for g, n, q in places if q is p)


def caught(turns: Generator, errors: list[Exception]) -> Generator:
    """A rank's turns; the error it ends with is noted."""
    try:
        yield from turns
    except Exception as error:
        errors.append(error)


@every_average
def test_a_sparse_gradient_on_one_rank_is_refused_by_name_and_all_hear_of_it(case):
    ranks = make_ranks(case, 2)
    ranks.train(loss, 5)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    kept = ranks.models[1].down.weight.grad
    ranks.models[1].down.weight.grad = kept.to_sparse()
    errors: list[Exception] = []
    ranks.world.run([caught(optimizer.step_as_generator(), errors) for optimizer in ranks.optimizers])
    (theirs,) = (error for error in errors if isinstance(error, compopt.CommunicationError))
    (ours,) = (error for error in errors if isinstance(error, TypeError))
    place = find_in_buckets(ranks.optimizers[1], ranks.models[1].down.weight)
    assert f"sparse gradient for {place}" in str(ours) and "rank 1" in str(theirs)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
    ranks.models[1].down.weight.grad = kept  # the step can be taken after all
    ranks.world.step(ranks.optimizers)
    ranks.assert_replicas_equal()


@every_average
@pytest.mark.parametrize("form", ["another size", "the same size"])
def test_a_parameter_that_is_resized_on_one_rank_is_refused_by_name_and_all_hear_of_it(case, form):
    refuse_resized(make_ranks(case, 2), form)


def test_it_is_also_refused_in_the_step_that_plans_projections_anew():
    ranks = make_ranks(by_name["SeparateAdam"], 2, projection="gaussian", adaptive=True, adapt_interval=1)
    refuse_resized(ranks, "another size")


def refuse_resized(ranks: Ranks, form: str) -> None:
    ranks.train(loss, 5)
    ranks.backward(loss)
    weight = ranks.models[1].down.weight
    kept, rows, columns = (weight.data, weight.grad), *weight.shape
    shape = (rows, columns + 8) if form == "another size" else (columns, rows)
    weight.data, weight.grad = torch.ones(shape), torch.ones(shape)
    errors: list[Exception] = []
    ranks.world.run([caught(optimizer.step_as_generator(), errors) for optimizer in ranks.optimizers])
    (theirs,) = (error for error in errors if isinstance(error, compopt.CommunicationError))
    (ours,) = (error for error in errors if isinstance(error, TypeError))
    place = find_in_buckets(ranks.optimizers[1], weight)
    assert f"{place} is torch.float32 of shape {shape} on cpu here, and was torch.float32 of shape" in str(ours)
    assert "the gradients of rank 1 (TypeError: " in str(theirs) and str(ours) in str(theirs)
    weight.data, weight.grad = kept
    ranks.world.step(ranks.optimizers)
    ranks.assert_replicas_equal()


def odd(g: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory that is strided, shared with more, and not at its beginning."""
    if g.dim() == 0:
        return torch.stack([g + 1, g])[1]
    wide = torch.full((2 * g.shape[0] + 1, *g.shape[1:]), 7.0)
    view = wide[1::2]
    view.copy_(g)
    return view.transpose(0, -1).contiguous().transpose(0, -1) if g.dim() == 3 else view


@some_average("RadiusAdamW", "ScapeAdamS", "SeparateAdam", "TagcAdamW", "Separate")
def test_views_strides_and_empty_tensors_step_as_plain_ones(case):
    def run(form) -> list:
        world, sets, optimizers = World(2), [], []
        for rank in range(2):
            torch.manual_seed(0)
            sets.append([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
            optimizers.append(case.make(sets[rank], process_group=world.comms[rank]))
        for step in range(8):
            for rank, params in enumerate(sets):
                draw = torch.Generator().manual_seed(100 * step + rank)
                for p in params:
                    p.grad = form(torch.randn(p.shape, generator=draw))
            world.step(optimizers)
        for a, b in zip(*sets, strict=True):
            assert torch.equal(a, b)
        return snapshot(optimizers[0])

    for plain, strange in zip(run(lambda g: g), run(odd), strict=True):
        torch.testing.assert_close(plain, strange, rtol=1e-5, atol=1e-6)
