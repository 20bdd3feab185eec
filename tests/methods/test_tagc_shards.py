"""TagcAdamW and its shards: whose they are, what fails, what is saved, what a lost rank leaves."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from conformance import assert_same, snapshot
from problems import gradients, step
from sim import World
from test_tagc import HYPER, SHAPES, make
from torch import nn

import compopt


def test_moments_and_masters_are_shared_out_equally():
    world, _, params, optimizers = make(4, dtype=torch.bfloat16, density=0.1)
    step(world, params, optimizers, gradients(4, 0, SHAPES, torch.bfloat16))
    n = sum(p.numel() for p in params[0])
    for optimizer in optimizers:
        for name in ("exp_avg", "exp_avg_sq", "master"):
            held = sum(entry[name].numel() for entry in optimizer.state.values())
            assert abs(held - n / 4) <= 2 * 64 and all(e[name].dtype == torch.float32 for e in optimizer.state.values())


@pytest.mark.parametrize("late", range(4))
def test_whichever_collective_fails_nothing_has_changed(late):
    """Index, gradients, norm, and the updated parameters: all or nothing."""
    world, _, params, optimizers = make(2, density=0.1)
    for t in range(2):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    before = [snapshot(optimizer) for optimizer in optimizers]
    world.failing_everywhere.add(world.comms[0].started + late)
    with pytest.raises(compopt.CommunicationError, match="step 3 was not applied"):
        step(world, params, optimizers, gradients(2, 2, SHAPES))
    for old, optimizer in zip(before, optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
    step(world, params, optimizers, gradients(2, 2, SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True)) and optimizers[0].stats.applied_steps == 3


def test_a_consolidated_checkpoint_is_whole_and_fits_adamw():
    world, _, params, optimizers = make(3, density=1.0)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES))
    world.consolidate(optimizers)
    saved = copy.deepcopy(optimizers[2].state_dict())
    reference = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params[0]], **HYPER)
    reference.load_state_dict(saved)
    step(world, params, optimizers, grads := gradients(3, 3, SHAPES))
    local = reference.param_groups[0]["params"]
    for i, p in enumerate(local):
        p.grad = sum(grads[rank][i] for rank in range(3)) / 3
    reference.step()
    for p, wanted in zip(params[1], local, strict=True):
        torch.testing.assert_close(p.detach(), wanted.detach(), rtol=1e-10, atol=1e-12)
    assert optimizers[0].state_dict()["param_groups"][0]["residuals"] == "rank 0 of 3"  # a step later it is not


def test_after_a_rank_is_lost_the_shards_of_the_others_are_kept():
    world, _, params, optimizers = make(3, density=0.1)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES))
    before = [torch.cat([o.state[local[0]]["exp_avg_sq"] for o, local in zip(optimizers, params, strict=True)])]
    lost = slice(len(optimizers[0].state[params[0][0]]["exp_avg_sq"]), None)
    lost = slice(lost.start, lost.start + len(optimizers[1].state[params[1][0]]["exp_avg_sq"]))
    before[0][lost] = 0
    survivors, world = [0, 2], World(2)
    params, optimizers = [params[r] for r in survivors], [optimizers[r] for r in survivors]
    with pytest.warns(UserWarning, match="1 of 3 ranks are gone.* shards begin again"):
        world.run(
            [optimizer.rebind_as_generator(comm) for optimizer, comm in zip(optimizers, world.comms, strict=True)]
        )
    world.consolidate(optimizers)
    saved = optimizers[1].state_dict()["state"][0]["exp_avg_sq"]
    torch.testing.assert_close(saved.view(-1), before[0])
    step(world, params, optimizers, gradients(2, 3, SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_after_a_rebind_that_failed_no_step_is_taken_without_moments():
    world, _, params, optimizers = make(3, density=0.1)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES))
    world.consolidate(optimizers)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    params, optimizers = params[:2], optimizers[:2]

    def rebind(world):
        pairs = zip(optimizers, world.comms, strict=True)
        world.run([optimizer.rebind_as_generator(comm) for optimizer, comm in pairs])

    failing = World(2)
    failing.failing_everywhere.add(0)
    with pytest.raises(compopt.CommunicationError):
        rebind(failing)
    before = [p.detach().clone() for p in params[0]]
    with pytest.raises(RuntimeError, match=r"rebind\(\) of TagcAdamW failed before ranks had exchanged their shards"):
        step(failing, params, optimizers, gradients(2, 3, SHAPES))
    for saves in (optimizers[0].state_dict, optimizers[0].consolidate_state, lambda: copy.deepcopy(optimizers[0])):
        with pytest.raises(RuntimeError, match=r"rebind\(\) of TagcAdamW failed before ranks had exchanged"):
            saves()
    assert all(map(torch.equal, params[0], before))
    for optimizer, state in zip(optimizers, saved, strict=False):
        optimizer.load_state_dict(state)
    step(failing, params, optimizers, gradients(2, 3, SHAPES))
    assert all(map(torch.equal, *params)) and not torch.equal(params[0][0], before[0])
    with pytest.warns(UserWarning, match="1 of 2 ranks are gone"):
        params, optimizers = params[:1], optimizers[:1]
        rebind(World(1))
    assert any(bool(entry["exp_avg_sq"].any()) for entry in optimizers[0].state.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_rank_that_alone_missed_the_parameters_takes_the_step_over(dtype):
    world, _, params, optimizers = make(2, dtype=dtype, density=0.1, lr=1e-3)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES, dtype))
    world.failing.add((1, world.comms[0].started + 3))  # index, gradients, norm, parameters
    with pytest.raises(compopt.CommunicationError, match="step 4 was not applied on rank 1"):
        step(world, params, optimizers, gradients(2, 3, SHAPES, dtype))
    assert [o.param_groups[0]["step"] for o in optimizers] == [4, 3]
    world = World(2)
    with pytest.warns(UserWarning, match="rank 1 had not applied step 4"):
        world.run(
            [optimizer.rebind_as_generator(comm) for optimizer, comm in zip(optimizers, world.comms, strict=True)]
        )
    step(world, params, optimizers, gradients(2, 4, SHAPES, dtype))
    assert [o.stats.applied_steps for o in optimizers] == [5, 5]
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_masters_are_the_same_whoever_owns_them():
    """A bfloat16 run on 1, 2 and 3 ranks with the same gradients everywhere, nothing held back: equal parameters."""
    results = []
    for ranks in (1, 2, 4):
        world, _, params, optimizers = make(ranks, dtype=torch.bfloat16, density=1.0, lr=1e-3)
        for t in range(4):
            grads = gradients(1, t, SHAPES, torch.bfloat16)[0]
            for o in optimizers:
                o._session.ddp_left_gradients = True  # bit-identical gradients on purpose
            step(world, params, optimizers, [grads] * ranks)
        results.append(params[-1])
    for a, b in itertools.combinations(results, 2):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_checkpoint_knows_which_tensors_are_compressed_by_name():
    """Attention is not, and keeps no residual: that was taken for damage."""

    def made() -> tuple[list[nn.Parameter], compopt.TagcAdamW]:
        params = [nn.Parameter(torch.ones(80, 80)) for _ in range(2)]
        named = zip(("layer.q_proj.weight", "fc.weight"), params, strict=True)
        return params, compopt.TagcAdamW(list(named), lr=1e-2, dense_steps=0)

    params, optimizer = made()
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.consolidate_state()
    again = made()[1]
    again.load_state_dict(optimizer.state_dict())
    ours, theirs = (one.state_dict()["state"] for one in (optimizer, again))
    assert "residual" not in ours[0] and torch.equal(ours[1]["residual"], theirs[1]["residual"])
