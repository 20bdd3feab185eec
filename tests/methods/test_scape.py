"""ScapeAdamS against Algorithm 1 written on dense tensors, and what is the class's own."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from oracles import AdamSOracle, ScapeOracle
from oracles import kernels as reference
from problems import COMPRESSED, gradients, replicas, step, weights
from slow_rows import in_turn
from torch import nn

import compopt

SHAPES = [(64, 80), (80,), (128, 64), (3, 41, 47), (10, 10)]
HYPER = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make(ranks: int, shapes=SHAPES, **options):
    start, options = weights(shapes), {**HYPER, **options}
    world, params, optimizers = replicas(ranks, start, functools.partial(compopt.ScapeAdamS, **options))
    return world, start, params, optimizers


def dense_moment(optimizer, p) -> torch.Tensor:
    """exp_avg of a compressed tensor, with its zeros."""
    state = optimizer.state[p]
    full = torch.zeros(p.numel(), dtype=torch.float64)
    full[reference.unpack_bits(state["mask"], p.numel())] = state["exp_avg"]
    return full.view(p.shape)


OPTIONS = {
    "as printed": dict(density=0.1, density_steps=0, clip="scape", max_grad_norm=10.0),
    "one percent": dict(density=0.01, density_steps=0),
    "dense start": dict(density=0.1, dense_steps=5, density_steps=20, max_grad_norm=20.0, maximize=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process_equals_the_oracle(name):
    options = OPTIONS[name]
    world, start, params, optimizers = make(1, **options)
    oracle = ScapeOracle(start, 1, **HYPER, **options, owner=[0] * 5, compress=COMPRESSED)
    run_against(oracle, world, params, optimizers, 50, SHAPES, COMPRESSED)


@pytest.mark.parametrize(("name", "ranks"), in_turn(OPTIONS, (2, 4)))
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
            assert torch.equal(reference.unpack_bits(state["mask"], p.numel()), oracle.mask[i].view(-1))
            assert torch.equal(reference.unpack_bits(state["next_mask"], p.numel()), oracle.next_mask[i].view(-1))


@pytest.mark.parametrize("ranks", [1, 4])
def test_density_1_equals_adams(ranks):
    world, start, params, optimizers = make(ranks, density=1.0)
    oracle = AdamSOracle(start, ranks, **HYPER)
    for t in range(20):
        grads = gradients(ranks, t, SHAPES)
        step(world, params, optimizers, grads)
        oracle.step(grads)
    for p, wanted in zip(params[-1], oracle.params, strict=True):
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"payload_dtype": torch.bfloat16}])
def test_replicas_and_masks_are_equal_to_the_bit(ranks, options):
    world, _, params, optimizers = make(ranks, density=0.1, density_steps=6, **options)
    for t in range(15):
        step(world, params, optimizers, gradients(ranks, t, SHAPES))
        for local, optimizer in zip(params[1:], optimizers[1:], strict=True):
            optimizer.state_dict()
            optimizers[0].state_dict()
            for p, q in zip(params[0], local, strict=True):
                assert torch.equal(p, q)
                for name in ("exp_avg", "mask", "next_mask"):
                    if name in optimizer.state[q]:
                        assert torch.equal(optimizers[0].state[p][name], optimizer.state[q][name])


def test_a_bf16_payload_rounds_the_gradient_only():
    """Also of the tensors that are not compressed, and of dense steps."""
    shapes = [(96, 64), (200,), (70, 70)]
    options = dict(density=0.2, density_steps=3)
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
        world, _, params, optimizers = make(2, [(64, 64)], density=0.1, density_steps=0, clip=clip, max_grad_norm=norm)
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


@pytest.mark.parametrize("density, most", [(0.1, 4.7), (0.01, 4.4)])
def test_state_is_smaller_than_adamws(density, most):
    p = nn.Parameter(torch.zeros(512, 512))
    optimizer = compopt.ScapeAdamS([p], density=density, density_steps=0, simulate=True)
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
    world, _, params, optimizers = make(2, shapes, density=0.05, density_steps=0)
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
        masks.append(reference.unpack_bits(optimizers[0].state[params[0][0]]["next_mask"], 65536))
        overlap = optimizers[0].stats.mask_overlap()
        previous = reference.unpack_bits(optimizers[0].state[params[0][0]]["mask"], 65536)
        assert overlap == pytest.approx(float((masks[-1] & previous).sum() / masks[-1].sum()))
        step(world, params, optimizers, gradients(2, t, shapes))


def test_tensors_without_gradients_wait_and_join():
    world, start, params, optimizers = make(2, density=0.1, density_steps=0)
    for t in range(6):
        grads = gradients(2, t, SHAPES)
        if t % 2 or t < 2:
            for local in grads:
                local[2] = None
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
        world, start, params, optimizers = make(1, [(64, 80)], density=0.2, density_steps=0)
        oracle = ScapeOracle(start, 1, **HYPER, density=0.2, owner=[0])
        optimizers[0].param_groups[0]["betas"] = oracle.betas = betas
        for t in range(8):
            grads = gradients(1, t, [(64, 80)])
            step(world, params, optimizers, grads)
            oracle.step(grads)
            torch.testing.assert_close(params[0][0].detach(), oracle.params[0], rtol=1e-10, atol=1e-11)
