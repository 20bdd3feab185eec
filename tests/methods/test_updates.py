"""``update_dtype``: updates of TAGC's shards travel as codes, and what rounding takes off is owed by their owner.

Held against an AdamW of the averaged gradients, written here on dense tensors in float64.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from problems import gradients, replicas, step, weights
from sim import World
from torch import Tensor

import compopt

# beside a row of 128 and a code of four: parts of tensors end within both
SHAPES = [(64, 65), (80,), (64, 66), (3, 41, 47), (10, 10), (127,), (128,), (129, 33)]
HYPER = {"lr": 3e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MOST = {"int8": 127, "int4": 7}  # units of a row's scale in its largest element
ALL = ["int8", "int4", "int2"]


def make(ranks: int, kind: str, dtype=torch.float64, **options):
    options = {**HYPER, "density": 1.0, "update_dtype": kind, **options}
    return replicas(ranks, weights(SHAPES, dtype), functools.partial(compopt.TagcAdamW, **options))


def mean_residuals(params, optimizers) -> list[Tensor]:
    """Of each tensor what its owners owe: ranks hold consecutive parts."""
    rows = zip(*params, strict=True)
    return [torch.cat([o.state[p]["update_residual"] for o, p in zip(optimizers, row, strict=True)]) for row in rows]


class Reference:
    """AdamW's update of parameters that it is told, from its own moments."""

    def __init__(self, shapes):
        self.m, self.v = ([torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(2))
        self.t = 0

    def update(self, i: int, w: Tensor, g: Tensor) -> Tensor:
        b1, b2 = HYPER["betas"]
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
        mhat, vhat = self.m[i] / (1 - b1**self.t), self.v[i] / (1 - b2**self.t)
        return -HYPER["lr"] * (mhat / (vhat.sqrt() + HYPER["eps"]) + HYPER["weight_decay"] * w)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ALL)
def test_what_is_sent_and_what_is_owed_is_the_update_and_what_was_owed(kind, ranks):
    """And replicas are equal to the bit, and no more is owed than one rounding takes off."""
    world, params, optimizers = make(ranks, kind)
    reference = Reference(SHAPES)
    before = [torch.zeros(p.numel(), dtype=torch.float64) for p in params[0]]
    for t in range(6):
        grads, start = gradients(ranks, t, SHAPES), [p.detach().clone() for p in params[0]]
        step(world, params, optimizers, grads)
        reference.t += 1
        after = mean_residuals(params, optimizers)
        for i, (w, p) in enumerate(zip(start, params[0], strict=True)):
            exact = reference.update(i, w, sum(local[i] for local in grads) / ranks).view(-1)
            sent = (p.detach() - w).view(-1)
            torch.testing.assert_close(sent + after[i], exact + before[i], rtol=1e-9, atol=1e-12)
            assert all(torch.equal(p, other[i]) for other in params)
            if kind in MOST:
                assert after[i].abs().max() <= (exact + before[i]).abs().max() / MOST[kind] * (1 + 1e-6)
            assert i in (1, 4) or after[i].abs().max() > 0
        before = after


def test_random_numbers_of_rounding_differ_between_steps_ranks_and_buckets():
    """As between buckets: two ranks own equal halves of two tensors, of a group each, and every step updates by the
    same. Only the random numbers differ."""
    half = torch.linspace(0.1, 1, 4096, dtype=torch.float64)
    both = torch.cat([half, half]).view(64, 128)
    options = {"lr": 1e-2, "eps": 1.0, "weight_decay": 0.0, "density": 1.0, "update_dtype": "int4"}

    def in_two_groups(params, process_group):
        return compopt.TagcAdamW([{"params": [p]} for p in params], process_group=process_group, **options)

    world, params, optimizers = replicas(2, [torch.zeros_like(both)] * 2, in_two_groups)
    rest = []
    for _ in range(2):
        step(world, params, optimizers, [[0.5 * both] * 2, [1.5 * both] * 2])
        for optimizer, p in ((o, p) for o, local in zip(optimizers, params, strict=True) for p in local):
            residual = optimizer.state[p]["update_residual"]
            rest.append(residual.clone())
            residual.zero_()
    for i, one in enumerate(rest):
        for other in rest[i + 1 :]:
            assert (one - other).abs().gt(1e-6).float().mean() > 0.2


@pytest.mark.parametrize("kind", ALL)
def test_a_scale_is_of_128_elements_of_one_tensor_on_one_rank(kind):
    """The error of each row is of the size of its own updates, although gradients differ 1000-fold."""
    world, params, optimizers = make(2, kind, weight_decay=0.0, eps=1.0, lr=1.0)
    grads = gradients(2, 0, SHAPES)
    for local in grads:
        local[0].view(-1)[128:] *= 1e-3  # the first row of tensor 0 alone is large
        local[1] *= 1e-3
    step(world, params, optimizers, grads)
    left = mean_residuals(params, optimizers)
    # the row after the large one, by its largest update; rows begin anew on the second rank, after as many whole words
    for part in (left[0][128:256], left[1]):
        assert 0 < part.abs().max() < 2e-3
    assert left[0][:128].abs().max() > 2e-3


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_codes_and_scales_of_the_largest_shard(kind, bits, ranks):
    world, params, optimizers = make(ranks, kind, torch.float32)
    step(world, params, optimizers, gradients(ranks, 0, SHAPES, torch.float32))
    sizes = [
        [o.state[p]["update_residual"].numel() for p in local] for o, local in zip(optimizers, params, strict=True)
    ]
    scales = max(sum(-(-n // 128) for n in local) for local in sizes)
    quantized = max(-(-sum(local) * bits // 8) for local in sizes)
    assert {o.stats.parameter_bytes for o in optimizers} == {4 * scales + quantized + -quantized % 4}


@pytest.mark.parametrize("kind", ALL)
def test_float32_follows_the_run_that_rounds_nothing(kind):
    """On the default backend, sparsified, clipped, with a dense start: never further from it than some roundings."""
    options = dict(density=0.1, dense_steps=2, max_grad_norm=1.0, lr=1e-3)
    runs = {}
    for given in (None, kind):
        world, params, optimizers = make(2, given, torch.float32, **options)
        for t in range(8):
            step(world, params, optimizers, gradients(2, t, SHAPES, torch.float32))
        runs[given] = params[0], [*params[0]] if given is None else mean_residuals(params, optimizers)
    start = weights(SHAPES, torch.float32)
    for w, exact, rounded, left in zip(start, runs[None][0], *runs[kind], strict=True):
        torch.testing.assert_close(rounded.detach().view(-1) + left, exact.detach().view(-1), rtol=0, atol=2e-6)
        assert (rounded - exact).abs().max() < (exact - w).abs().max()


def test_a_skipped_step_and_an_absent_tensor_leave_what_is_owed():
    world, params, optimizers = make(2, "int4", torch.float32)
    step(world, params, optimizers, gradients(2, 0, SHAPES, torch.float32))

    def now():
        return [p.detach().clone() for p in params[0]] + mean_residuals(params, optimizers)

    before, grads = now(), gradients(2, 1, SHAPES, torch.float32)
    grads[1][2][0, 0] = float("nan")
    step(world, params, optimizers, grads)
    assert all(map(torch.equal, before, now())) and optimizers[0].stats.phase == "skipped"
    grads = gradients(2, 2, SHAPES, torch.float32)
    for local in grads:
        local[2] = None
    step(world, params, optimizers, grads)
    same = [torch.equal(a, b) for a, b in zip(before, now(), strict=True)]
    n = len(SHAPES)
    assert same[2] and same[n + 2] and not any(same[:2] + same[3:n])


@pytest.mark.parametrize("late", range(4))
def test_whichever_collective_fails_nothing_has_changed(late):
    """Index, gradients, norm, and the codes."""
    world, params, optimizers = make(2, "int4", torch.float32, density=0.1)
    for t in range(2):
        step(world, params, optimizers, gradients(2, t, SHAPES, torch.float32))
    before = [p.detach().clone() for local in params for p in local] + mean_residuals(params, optimizers)
    world.failing_everywhere.add(world.comms[0].started + late)
    with pytest.raises(compopt.CommunicationError, match="step 3 was not applied"):
        step(world, params, optimizers, gradients(2, 2, SHAPES, torch.float32))
    after = [p.detach() for local in params for p in local] + mean_residuals(params, optimizers)
    assert all(map(torch.equal, before, after))
    step(world, params, optimizers, gradients(2, 2, SHAPES, torch.float32))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_a_checkpoint_carries_what_is_owed_and_one_without_it_owes_nothing():
    world, params, optimizers = make(2, "int4", torch.float32)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES, torch.float32))
    world.consolidate(optimizers)
    saved, at = copy.deepcopy(optimizers[0].state_dict()), [p.detach().clone() for p in params[0]]
    assert saved["state"][0]["update_residual"].shape == params[0][0].shape
    assert saved["state"][0]["update_residual"].any()
    for has in (True, False):
        other, theirs, again = make(2, "int4", torch.float32)
        given = copy.deepcopy(saved)
        for entry in () if has else given["state"].values():
            del entry["update_residual"]
        for local, optimizer in zip(theirs, again, strict=True):
            with torch.no_grad():
                for p, w in zip(local, at, strict=True):
                    p.copy_(w)
            optimizer.load_state_dict(given)
        held = mean_residuals(theirs, again)
        if has:
            assert all(map(torch.equal, held, mean_residuals(params, optimizers)))
        else:
            assert not any(e.any() for e in held)
        grads = gradients(2, 3, SHAPES, torch.float32)
        step(other, theirs, again, grads)
        if has:
            step(world, params, optimizers, grads)
            assert all(torch.equal(p, q) for p, q in zip(params[0], theirs[0], strict=True))


def test_after_a_rank_is_lost_its_shard_owes_nothing_and_the_others_what_they_did():
    world, params, optimizers = make(3, "int4", torch.float32)
    for t in range(3):
        step(world, params, optimizers, gradients(3, t, SHAPES, torch.float32))
    whole = mean_residuals(params, optimizers)
    gone = [optimizers[1].state[p]["update_residual"].numel() for p in params[1]]
    first = [optimizers[0].state[p]["update_residual"].numel() for p in params[0]]
    params, optimizers, world = [params[0], params[2]], [optimizers[0], optimizers[2]], World(2)
    with pytest.warns(UserWarning, match="1 of 3 ranks are gone"):
        world.run(
            [functools.partial(optimizer.rebind, comm) for optimizer, comm in zip(optimizers, world.comms, strict=True)]
        )
    for before, after, a, n in zip(whole, mean_residuals(params, optimizers), first, gone, strict=True):
        before[a : a + n] = 0
        assert torch.equal(before, after)
    step(world, params, optimizers, gradients(2, 3, SHAPES, torch.float32))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_a_rank_that_missed_the_codes_does_not_send_again_what_they_held():
    """The others have added what it owed: once it took theirs over it owes nothing; they owe what they did."""
    world, params, optimizers = make(2, "int4", torch.float32, density=0.1)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES, torch.float32))
    world.failing.add((1, world.comms[0].started + 3))  # index, gradients, norm, codes
    with pytest.raises(compopt.CommunicationError, match="step 4 was not applied on rank 1"):
        step(world, params, optimizers, gradients(2, 3, SHAPES, torch.float32))
    kept = [optimizers[0].state[p]["update_residual"].clone() for p in params[0]]
    world = World(2)
    with pytest.warns(UserWarning, match="rank 1 had not applied step 4"):
        world.run(
            [functools.partial(optimizer.rebind, comm) for optimizer, comm in zip(optimizers, world.comms, strict=True)]
        )
    assert all(map(torch.equal, kept, [optimizers[0].state[p]["update_residual"] for p in params[0]]))
    assert any(e.any() for e in kept) and not any(optimizers[1].state[p]["update_residual"].any() for p in params[1])
    step(world, params, optimizers, gradients(2, 4, SHAPES, torch.float32))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True))


def test_one_process_rounds_nothing_unless_it_simulates():
    for simulate in (False, True):
        params = [w.requires_grad_() for w in weights(SHAPES, torch.float32)]
        optimizer = compopt.TagcAdamW(params, **HYPER, density=1.0, update_dtype="int4", simulate=simulate)
        for p, g in zip(params, gradients(1, 0, SHAPES, torch.float32)[0], strict=True):
            p.grad = g
        optimizer.step()
        assert any(optimizer.state[p]["update_residual"].any() for p in params) == simulate


def test_a_group_may_have_its_own_and_change_it_where_any_has_one():
    start = weights(SHAPES, torch.float32)
    world, params, optimizers = replicas(2, start, functools.partial(compopt.TagcAdamW, **HYPER, update_dtype="int4"))
    for optimizer in optimizers:
        optimizer.param_groups[0]["update_dtype"] = None
    step(world, params, optimizers, gradients(2, 0, SHAPES, torch.float32))
    assert not any(e.any() for e in mean_residuals(params, optimizers))
    for optimizer in optimizers:
        optimizer.param_groups[0]["update_dtype"] = "int2"
    step(world, params, optimizers, gradients(2, 1, SHAPES, torch.float32))
    assert any(e.any() for e in mean_residuals(params, optimizers))
    world, params, optimizers = make(2, None, torch.float32)
    for optimizer in optimizers:
        optimizer.param_groups[0]["update_dtype"] = "int8"
    before = [p.detach().clone() for local in params for p in local]
    with pytest.raises(ValueError, match="made without it, and keeps no update_residual: give it to the constructor"):
        step(world, params, optimizers, gradients(2, 0, SHAPES, torch.float32))
    assert all(map(torch.equal, before, (p for local in params for p in local)))


def test_refusals():
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    with pytest.raises(ValueError, match=r"update_dtype='int8' is for float32 parameters.* these are torch.bfloat16"):
        compopt.TagcAdamW(params, update_dtype="int8")
    optimizer = compopt.TagcAdamW([torch.nn.Parameter(torch.ones(4))], update_dtype=torch.int8)
    assert optimizer.param_groups[0]["update_dtype"] == "int8"
    for wrong in ("bfloat16", "int16", 8, torch.float16):
        with pytest.raises(ValueError, match="update_dtype must be None or 'int8', 'int4', 'int2', got"):
            compopt.TagcAdamW([torch.nn.Parameter(torch.ones(4))], update_dtype=wrong)
