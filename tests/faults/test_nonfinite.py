"""Gradients that are inf, NaN or too large to square, on one rank: all ranks skip, nothing changes, nothing is owed."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch
from conformance import AVERAGING, assert_same, every_average, loss, make_ranks, snapshot, some_average
from sim import Ranks
from slow_rows import slow_but

VALUES = (float("inf"), float("nan"), -3e38)  # the last is finite, but its square is not
PLACES = ("on the mask", "off the mask", "dense")


def masked(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    """Where ``p`` is exchanged in the coming step; everywhere while there is no mask."""
    everywhere = [q for group in optimizer.param_groups for q in group["params"]]
    number = next(n for n, q in enumerate(everywhere) if q is p)
    entry = optimizer.state_dict()["state"][number]
    mask = entry.get("next_mask", entry.get("mask"))
    return mask if mask is not None and mask.any() else torch.ones_like(p, dtype=torch.bool)


def spoil(ranks: Ranks, rank: int, place: str, value: float, look: bool) -> None:
    """Put ``value`` into one element of a rank's gradient. Only with ``look`` is a mask in flight awaited."""
    model = ranks.models[rank]
    p = model.up.bias if place == "dense" else model.up.weight
    where = masked(ranks.optimizers[rank], p) if look and place != "dense" else torch.ones_like(p, dtype=torch.bool)
    spots = (where if place != "off the mask" or where.all() else ~where).nonzero()
    p.grad[tuple(spots[7 * len(spots) // 11])] = value


# of the classes that select by masks of the step before, also with masks in flight
SPOILT = [(True, case) for case in AVERAGING] + [(False, case) for case in AVERAGING if case.method == "scape"]


@pytest.mark.parametrize(
    ("look", "case"),
    slow_but(lambda look, case: not look or case.name in ("SeparateAdam", "TagcAdamW"), SPOILT),
    ids=lambda value: {True: "", False: "masks in flight"}.get(value) if isinstance(value, bool) else value.name,
)
def test_every_step_survives_a_bad_gradient_of_every_kind(case, look):
    """Before each of ten steps, dense, resampling and sparse, one spoilt attempt: the run is as if it had not been."""
    ranks, untroubled = make_ranks(case, 3), make_ranks(case, 3)
    kinds = itertools.cycle(itertools.product(VALUES, PLACES))
    for step in range(10):
        value, place = next(kinds)
        ranks.backward(loss)
        before = [snapshot(optimizer) for optimizer in ranks.optimizers] if look else []
        spoil(ranks, step % 3, place, value, look)
        ranks.world.step(ranks.optimizers)
        for optimizer in ranks.optimizers:
            assert (optimizer.stats.phase, optimizer.stats.skipped) == ("skipped", step + 1)
            assert "non-finite gradient: parameter" in optimizer.stats.reason
        for old, optimizer in zip(before, ranks.optimizers, strict=False):
            assert_same(old, snapshot(optimizer))
        ranks.train(loss, 1)
    untroubled.train(loss, 10)
    for a, b in zip(ranks.optimizers, untroubled.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))


@every_average
def test_gradients_that_overflow_only_when_added_are_skipped_too(case):
    ranks = make_ranks(case, 4)
    ranks.train(loss, 4)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    for model in ranks.models:
        model.up.bias.grad.fill_(1.5e38)
    ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert optimizer.stats.phase == "skipped"
        assert_same(old, snapshot(optimizer))


@some_average("RadiusAdamW", "SeparateAdam", "TagcAdamW")
def test_the_limit_of_skips_counts_steps_in_a_row_and_leaves_the_state_usable(case):
    ranks, untroubled = make_ranks(case, 2), make_ranks(case, 2)
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 3
    spoilt = lambda model, rank, step: loss(model, rank, step) * (float("inf") if rank else 1.0)  # noqa: E731
    for _ in range(2):
        ranks.train(loss, 2)
        for _ in range(2):
            ranks.backward(spoilt)
            ranks.world.step(ranks.optimizers)
    ranks.backward(spoilt)
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped") as caught:
        ranks.world.step(ranks.optimizers)
    groups = enumerate(ranks.optimizers[0].param_groups)
    places = {f"parameter {n} of group {g}" for g, group in groups for n in range(len(group["params"]))}
    named = re.findall(r"parameter \d+ of group \d+", str(caught.value))
    assert named and places.issuperset(named)
    for both, steps in (ranks, 2), (untroubled, 6):
        both.train(loss, steps)
    assert_same(snapshot(untroubled.optimizers[1]), snapshot(ranks.optimizers[1]))


@some_average("ScapeAdamS", "TagcAdamW", "LocalSteps")
def test_skips_are_counted_anew_after_a_load(case):
    """The first step after it compares ranks, and is skipped as cleanly as any other."""
    ranks, untroubled = make_ranks(case, 2), make_ranks(case, 2)
    for one in (ranks, untroubled):
        one.train(loss, 4)
    spoilt = lambda model, rank, step: loss(model, rank, step) * (float("nan") if rank else 1.0)  # noqa: E731
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 3
    for is_loaded in (False, True):
        if is_loaded:
            for optimizer in [*ranks.optimizers, *untroubled.optimizers]:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            ranks.backward(spoilt)
            before = [snapshot(optimizer) for optimizer in ranks.optimizers]
            ranks.world.step(ranks.optimizers)
            assert all(optimizer.stats.phase == "skipped" for optimizer in ranks.optimizers)
            for old, optimizer in zip(before, ranks.optimizers, strict=True):
                assert_same(old, snapshot(optimizer))
    for one in (ranks, untroubled):
        one.train(loss, 3)
    for a, b in zip(ranks.optimizers, untroubled.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 2
    ranks.backward(spoilt)
    ranks.world.step(ranks.optimizers)
    ranks.backward(spoilt)
    with pytest.raises(FloatingPointError, match="2 steps in a row were skipped"):
        ranks.world.step(ranks.optimizers)
