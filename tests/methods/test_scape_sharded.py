"""ScapeAdamS sharded over ranks: equal to the replicated one, and a share of it."""

from __future__ import annotations

import copy

import pytest
import torch
from conformance import assert_same, snapshot
from problems import COMPRESSED, gradients, step
from test_scape import OPTIONS, SHAPES, make

import compopt

FEW = [(64, 64), (80,), (3, 41, 47)]
LONG = pytest.param("one percent", 2, 100, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "ranks", "steps"),
    [LONG, ("one percent", 4, 40), *((name, 3, 15) for name in OPTIONS)],
)
def test_sharded_equals_replicated(name, ranks, steps):
    """To 1e-12, with identical masks; what is owed is the same when they are saved, and each loads the other's.

    Masks are also selected of a tensor that no rank has a gradient of, at times.
    """
    options = OPTIONS[name]
    whole, shared = make(ranks, FEW, **options), make(ranks, FEW, **options, sharded=True)
    for t in range(steps):
        grads = gradients(ranks, t, FEW)
        for local in grads if t % 7 == 6 else ():
            local[2] = None
        for world, _, params, optimizers in (whole, shared):
            step(world, params, optimizers, grads)
        for p, q in zip(whole[2][-1], shared[2][0], strict=True):
            torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-12, atol=1e-12)
        assert shared[3][0].stats.phase == whole[3][0].stats.phase
    for world, _, _, optimizers in (whole, shared):
        world.consolidate(optimizers)
    saved, wanted = shared[3][-1].state_dict(), whole[3][0].state_dict()
    for i, compressed in enumerate([True, False, True]):
        for state in ("exp_avg", "residual") if compressed else ("exp_avg",):
            torch.testing.assert_close(saved["state"][i][state], wanted["state"][i][state], rtol=1e-11, atol=1e-12)
        for mask in ("mask", "next_mask") if compressed else ():
            assert torch.equal(saved["state"][i][mask], wanted["state"][i][mask])
    for world, _, params, optimizers in (whole, shared):  # each goes on from the other's checkpoint
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(wanted if optimizer.sharded else saved))
        step(world, params, optimizers, gradients(ranks, 200, FEW))
    for p, q in zip(whole[2][-1], shared[2][0], strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-11, atol=1e-12)


def test_sharded_state_is_a_share_of_it():
    """Momentum and the common residual: 1/N of the elements on each rank. What crosses is the mask's share."""
    world, _, params, optimizers = make(4, density=0.1, density_steps=0, sharded=True)
    for t in range(3):
        step(world, params, optimizers, gradients(4, t, SHAPES))
    n = sum(p.numel() for p in params[0])
    for optimizer in optimizers:
        held = sum(entry["exp_avg"].numel() for entry in optimizer.state.values())
        assert abs(held - n / 4) <= 2 * 64
    stats, exchanged = (
        optimizers[0].stats,
        0.1 * sum(p.numel() for p, c in zip(params[0], COMPRESSED, strict=True) if c),
    )
    exchanged += sum(p.numel() for p, c in zip(params[0], COMPRESSED, strict=True) if not c)
    assert stats.parameter_bytes == pytest.approx(8 * exchanged / 4, rel=0.1)
    assert stats.payload_bytes == pytest.approx(8 * exchanged, rel=0.2)


@pytest.mark.parametrize("late", range(4))
def test_sharded_whichever_collective_fails_nothing_has_changed(late):
    world, _, params, optimizers = make(2, density=0.1, density_steps=0, sharded=True)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    before = [snapshot(optimizer) for optimizer in optimizers]
    world.failing_everywhere.add(world.comms[0].started + late)
    if late < 3:  # gradients, norm, parameters; what follows are the masks, without which a step is dense
        with pytest.raises(compopt.CommunicationError, match="step 4 was not applied"):
            step(world, params, optimizers, gradients(2, 3, SHAPES))
        for old, optimizer in zip(before, optimizers, strict=True):
            assert_same(old, snapshot(optimizer))
    for t in range(3, 6):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True)) and optimizers[0].stats.applied_steps == 6
