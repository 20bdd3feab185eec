"""ScapeAdamS against Algorithm 1 written on dense tensors, and what is the class's own."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from oracles import AdamSOracle, ScapeOracle
from problems import COMPRESSED, gradients, replicas, step, weights
from torch import nn

import compopt
from compopt._ops import math

SHAPES = [(64, 80), (80,), (128, 64), (3, 41, 47), (10, 10)]
HYPER = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make(ranks: int, shapes=SHAPES, **options):
    start, options = weights(shapes), {"selection": "exact", **HYPER, **options}
    world, params, optimizers = replicas(ranks, start, functools.partial(compopt.ScapeAdamS, **options))
    return world, start, params, optimizers


def dense_moment(optimizer, p) -> torch.Tensor:
    """exp_avg of a compressed tensor, with its zeros."""
    state = optimizer.state[p]
    full = torch.zeros(p.numel(), dtype=torch.float64)
    full[math.unpack_bits(state["mask"], p.numel())] = state["exp_avg"]
    return full.view(p.shape)


OPTIONS = {
    "as printed": dict(density=0.1, density_warmup_steps=0, clip="scape", max_grad_norm=10.0),
    "one percent": dict(density=0.01, density_warmup_steps=0),
    "warm-up": dict(density=0.1, warmup_steps=5, density_warmup_steps=20, max_grad_norm=20.0, maximize=True),
    "no delay": dict(density=0.1, mask_delay=0, warmup_steps=3, density_warmup_steps=5),
    "adams": dict(density=0.3, bias_correction="adams", density_warmup_steps=3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process_equals_the_oracle(name):
    options = OPTIONS[name]
    world, start, params, optimizers = make(1, **options)
    oracle = ScapeOracle(start, 1, **HYPER, **options, owner=[0] * 5, compress=COMPRESSED)
    run_against(oracle, world, params, optimizers, 50, SHAPES, COMPRESSED)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_that_own_a_tensor_each_equal_the_oracle(ranks, name):
    """Equal tensors, dealt in the order of the bucket: reverse to that of registration."""
    shapes, options = [(64, 64)] * ranks, OPTIONS[name]
    world, start, params, optimizers = make(ranks, shapes, **options)
    oracle = ScapeOracle(start, ranks, **HYPER, **options, owner=list(reversed(range(ranks))))
    run_against(oracle, world, params, optimizers, 30, shapes, [True] * ranks)


def run_against(oracle, world, params, optimizers, steps, shapes, compressed) -> None:
    phases = set()
    for t in range(steps):
        grads = gradients(world.size, t, shapes)
        step(world, params, optimizers, grads)
        oracle.step(grads)
        phases.add(oracle.phase)
        assert optimizers[0].stats.phase == oracle.phase
        for i, wanted in enumerate(oracle.params):
            torch.testing.assert_close(params[-1][i].detach(), wanted, rtol=1e-10, atol=1e-11)
    assert "sparse" in phases
    for rank, optimizer in enumerate(optimizers):
        optimizer.state_dict()  # waits for the masks
        for i, p in enumerate(params[rank]):
            state = optimizer.state[p]
            if not compressed[i]:
                torch.testing.assert_close(state["exp_avg"], oracle.m[i], rtol=1e-10, atol=1e-11)
                continue
            torch.testing.assert_close(state["residual"], oracle.residual[rank][i], rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(dense_moment(optimizer, p), oracle.m[i], rtol=1e-10, atol=1e-11)
            assert torch.equal(math.unpack_bits(state["mask"], p.numel()), oracle.mask[i].view(-1))
            if optimizer.param_groups[0]["mask_delay"]:
                assert torch.equal(math.unpack_bits(state["next_mask"], p.numel()), oracle.next_mask[i].view(-1))


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("delay", [0, 1])
def test_density_1_equals_adams(ranks, delay):
    world, start, params, optimizers = make(ranks, density=1.0, mask_delay=delay)
    oracle = AdamSOracle(start, ranks, **HYPER)
    for t in range(20):
        grads = gradients(ranks, t, SHAPES)
        step(world, params, optimizers, grads)
        oracle.step(grads)
    for p, wanted in zip(params[-1], oracle.params, strict=True):
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_nothing_is_lost(ranks, delay, selection):
    """The sum over ranks of b1 m + (1 - b1) g + e before a step is that of m + e after it."""
    world, _, params, optimizers = make(
        ranks, density=0.05, density_warmup_steps=4, mask_delay=delay, selection=selection
    )

    def held(momentum: float) -> list[torch.Tensor]:
        pairs = [(optimizer, own[i]) for i in (0, 2, 3) for optimizer, own in zip(optimizers, params, strict=True)]
        each = [momentum * dense_moment(o, p) + o.state[p]["residual"] for o, p in pairs]
        return [sum(each[n : n + ranks]) for n in range(0, len(each), ranks)]

    for t in range(12):
        grads = gradients(ranks, t, SHAPES)
        before = [x + 0.1 * sum(own[i] for own in grads) for x, i in zip(held(0.9), (0, 2, 3), strict=True)]
        step(world, params, optimizers, grads)
        for came, kept in zip(before, held(1.0), strict=True):
            torch.testing.assert_close(kept, came, rtol=1e-11, atol=1e-12)
    assert optimizers[0].stats.residual_norm() > 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"mask_delay": 0}, {"payload_dtype": torch.bfloat16}])
def test_replicas_and_masks_are_equal_to_the_bit(ranks, options):
    world, _, params, optimizers = make(ranks, density=0.1, density_warmup_steps=6, selection="sampled", **options)
    for t in range(15):
        step(world, params, optimizers, gradients(ranks, t, SHAPES))
        for own, optimizer in zip(params[1:], optimizers[1:], strict=True):
            optimizer.state_dict()
            optimizers[0].state_dict()
            for p, q in zip(params[0], own, strict=True):
                assert torch.equal(p, q)
                for name in ("exp_avg", "mask", "next_mask"):
                    if name in optimizer.state[q]:
                        assert torch.equal(optimizers[0].state[p][name], optimizer.state[q][name])


def test_a_bf16_payload_rounds_the_gradient_only():
    """Also of the tensors that are not compressed, and of dense steps."""
    shapes = [(96, 64), (200,), (70, 70)]
    options = dict(density=0.2, density_warmup_steps=3, selection="exact")
    full, rounded = (make(1, shapes, payload_dtype=dtype, **options) for dtype in (None, torch.bfloat16))
    for t in range(4):
        for world, _, params, optimizers in (full, rounded):
            step(world, params, optimizers, gradients(1, t, shapes))
            momentum = [optimizers[0].state[p]["exp_avg"].view(-1) for p in params[0]]
            if world is full[0]:
                wanted = momentum
            elif t == 0:
                for m in momentum:  # (1 - b1) times a number of 8 bits
                    torch.testing.assert_close(m / 0.1, (m / 0.1).bfloat16().double(), rtol=1e-12, atol=0)
        for m, w in zip(momentum, wanted, strict=True):
            if len(m) == len(w) and t < 2:  # the same mask
                torch.testing.assert_close(m, w, rtol=1 / 64, atol=1e-3)


def test_a_clipped_outlier_makes_no_larger_a_step_and_as_printed_it_does():
    """The normaliser is made of the previous momentum and this gradient. Clipping the gradient there alone leaves an
    unclipped momentum over a small normaliser; clipping both leaves the step of a gradient that had that norm."""

    def moved(clip: str, scale: float, norm: float | None) -> torch.Tensor:
        world, _, params, optimizers = make(
            2, [(64, 64)], density=0.1, density_warmup_steps=0, clip=clip, max_grad_norm=norm
        )
        for t in range(6):
            step(world, params, optimizers, gradients(2, t, [(64, 64)]))
        before = params[0][0].detach().clone()
        outlier = gradients(2, 6, [(64, 64)])
        outlier[1][0] *= scale
        step(world, params, optimizers, outlier)
        return params[0][0].detach() - before, optimizers[0].stats.grad_norm

    usual, norm = moved("consistent", 1.0, None)
    largest = float(usual.norm())
    clipped, raw = moved("consistent", 1000.0, norm)
    assert raw > 50 * norm  # the outlier bites
    printed, _ = moved("scape", 1000.0, norm)
    assert float(clipped.norm()) <= 1.05 * largest
    assert float(printed.norm()) > 3 * float(clipped.norm())


def test_density_falls_exponentially_after_the_warm_up():
    world, _, params, optimizers = make(1, [(128, 128)], density=0.01, warmup_steps=4, density_warmup_steps=10)
    seen = []
    for t in range(18):
        step(world, params, optimizers, gradients(1, t, [(128, 128)]))
        seen.append(optimizers[0].stats.density)
    wanted = [1.0] * 4 + [max(0.01, 0.01 ** (k / 10)) for k in range(14)]
    assert seen == pytest.approx(wanted, rel=5e-3)


def test_the_clock_of_the_mask():
    """With a delay of 1 the first step has no mask; with 0 it has its own."""
    for delay, phases in ((1, ["dense", "sparse"]), (0, ["sparse", "sparse"])):
        world, _, params, optimizers = make(1, density=0.1, density_warmup_steps=0, mask_delay=delay)
        for t, phase in enumerate(phases):
            step(world, params, optimizers, gradients(1, t, SHAPES))
            assert optimizers[0].stats.phase == phase


def test_a_lost_mask_makes_the_next_step_dense_and_nothing_is_lost_with_it():
    world, _, params, optimizers = make(2, density=0.1, density_warmup_steps=0)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    for pending in (exchange.pending for optimizer in optimizers for exchange in optimizer._runtime.tails):
        world.failing_everywhere.add(pending.number)
    p = params[0][0]
    owed = sum(o.state[own[0]]["residual"] for o, own in zip(optimizers, params, strict=True)) / 2
    wanted = 0.9 * dense_moment(optimizers[0], p) + 0.1 * sum(g[0] for g in gradients(2, 3, SHAPES)) / 2 + owed
    step(world, params, optimizers, gradients(2, 3, SHAPES))
    assert optimizers[0].stats.phase == "dense" and optimizers[0].stats.residual_norm() == 0
    torch.testing.assert_close(dense_moment(optimizers[0], p), wanted)
    step(world, params, optimizers, gradients(2, 4, SHAPES))
    assert optimizers[1].stats.phase == "sparse"


@pytest.mark.parametrize("selection", ["sampled", "exact"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_checkpoint_with_a_mask_in_flight_continues_to_the_bit(at, selection):
    options = dict(density=0.1, density_warmup_steps=3, selection=selection)
    shapes = [(256, 256), (30,)]
    world, _, params, optimizers = make(2, shapes, **options)
    for t in range(at):
        step(world, params, optimizers, gradients(2, t, shapes))
    assert all(optimizer._runtime.tails for optimizer in optimizers)  # in flight
    reached = [[p.detach().clone() for p in own] for own in params]
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    again, _, new_params, new = make(2, shapes, **options)
    for own, held, optimizer, state in zip(new_params, reached, new, saved, strict=True):
        for p, w in zip(own, held, strict=True):
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
    world, _, params, optimizers = make(1, density=0.1, density_warmup_steps=0)
    for t in range(3):
        step(world, params, optimizers, gradients(1, t, SHAPES))
    state = copy.deepcopy(optimizers[0].state_dict())
    for broken in (state["state"][0]["exp_avg"][:-1], torch.zeros(3)):
        state["state"][0]["exp_avg"] = broken
        with pytest.raises(ValueError, match="'exp_avg' of parameter 0"):
            optimizers[0].load_state_dict(state)


@pytest.mark.parametrize("density, most", [(0.1, 4.7), (0.01, 4.4)])
def test_state_is_smaller_than_adamws(density, most):
    p = nn.Parameter(torch.zeros(512, 512))
    optimizer = compopt.ScapeAdamS([p], density=density, density_warmup_steps=0)
    for t in range(3):
        p.grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    optimizer.state_dict()
    held = sum(value.numel() * value.element_size() for value in optimizer.state[p].values())
    assert held / p.numel() <= most
    owned = sum(flat.untyped_storage().nbytes() for bucket in optimizer._buckets for flat in bucket.flat.values())
    assert owned / p.numel() <= most


def test_stats_tell_density_bytes_and_overlap():
    shapes = [(256, 256), (64,)]
    world, _, params, optimizers = make(2, shapes, density=0.05, density_warmup_steps=0)
    grads = gradients(2, 0, shapes)
    for _ in range(4):
        step(world, params, optimizers, grads)
    stats = optimizers[0].stats
    assert stats.density == pytest.approx(0.05, rel=1e-3)
    assert stats.payload_bytes + stats.mask_bytes == stats.bytes_sent
    assert 0.05 * 65536 * 8 < stats.payload_bytes < 0.055 * 65536 * 8 and 0 < stats.mask_bytes < 65536 / 16
    masks = []
    for t in (5, 5):
        optimizers[0].state_dict()
        masks.append(math.unpack_bits(optimizers[0].state[params[0][0]]["next_mask"], 65536))
        overlap = optimizers[0].stats.mask_overlap()
        previous = math.unpack_bits(optimizers[0].state[params[0][0]]["mask"], 65536)
        assert overlap == pytest.approx(float((masks[-1] & previous).sum() / masks[-1].sum()))
        step(world, params, optimizers, gradients(2, t, shapes))


def test_tensors_without_gradients_wait_and_join():
    world, start, params, optimizers = make(2, density=0.1, density_warmup_steps=0)
    for t in range(6):
        grads = gradients(2, t, SHAPES)
        if t % 2 or t < 2:
            for own in grads:
                own[2] = None
        if t == 4:
            grads[1][0] = None
        before = params[0][2].detach().clone()
        moment = dense_moment(optimizers[0], params[0][2])
        step(world, params, optimizers, grads)
        if grads[0][2] is None:
            assert torch.equal(params[0][2], before)
            assert torch.equal(dense_moment(optimizers[0], params[0][2]), moment)
        for p, q in itertools.zip_longest(params[0], params[1]):
            assert torch.equal(p, q)
    assert not torch.equal(params[0][2], start[2])


def test_moments_of_any_beta_are_carried_to_the_next_mask():
    for betas in ((0.0, 0.95), (0.5, 0.0)):
        world, start, params, optimizers = make(1, [(64, 80)], density=0.2, density_warmup_steps=0)
        oracle = ScapeOracle(start, 1, **HYPER, density=0.2, owner=[0])
        optimizers[0].param_groups[0]["betas"] = oracle.betas = betas
        for t in range(8):
            grads = gradients(1, t, [(64, 80)])
            step(world, params, optimizers, grads)
            oracle.step(grads)
            torch.testing.assert_close(params[0][0].detach(), oracle.params[0], rtol=1e-10, atol=1e-11)


FEW = [(64, 64), (80,), (3, 41, 47)]


@pytest.mark.parametrize(
    ("name", "ranks", "steps"),
    [("one percent", 2, 100), ("one percent", 4, 100), *((name, 3, 15) for name in OPTIONS), ("no delay", 1, 15)],
)
def test_sharded_equals_replicated(name, ranks, steps):
    """To 1e-12, with identical masks; what is owed is the same when they are saved, and each loads the other's."""
    options = OPTIONS[name]
    whole, shared = make(ranks, FEW, **options), make(ranks, FEW, **options, sharded=True)
    for t in range(steps):
        grads = gradients(ranks, t, FEW)
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
    world, _, params, optimizers = make(4, density=0.1, density_warmup_steps=0, sharded=True)
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
    world, _, params, optimizers = make(2, density=0.1, density_warmup_steps=0, sharded=True)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    for optimizer in optimizers:
        optimizer._settle()
    kept = [[p.detach().clone() for p in own] for own in params]
    state = [
        [{k: v.clone() for k, v in o.state[p].items()} for p in own] for o, own in zip(optimizers, params, strict=True)
    ]
    world.failing_everywhere.add(world.comms[0].started + late)
    if late < 3:  # gradients, norm, parameters; what follows are the masks, without which a step is dense
        with pytest.raises(compopt.CommunicationError, match="step 4 was not applied"):
            step(world, params, optimizers, gradients(2, 3, SHAPES))
        for rank in range(2):
            assert all(torch.equal(p, q) for p, q in zip(params[rank], kept[rank], strict=True))
            for p, entry in zip(params[rank], state[rank], strict=True):
                assert all(torch.equal(optimizers[rank].state[p][name], before) for name, before in entry.items())
    for t in range(3, 6):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(*params, strict=True)) and optimizers[0].stats.step == 6
