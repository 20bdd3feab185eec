"""ScapeAdamS against Algorithm 1 written on dense tensors, step by step, its masks, and its sharded form."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from conformance import assert_same, snapshot
from oracles import AdamSOracle, ScapeOracle
from oracles import kernels as reference
from problems import BY_DTYPE, COMPRESSED, MATRICES, each_dtype, gradients, replicas, step, weights
from slow_rows import in_turn
from torch import Tensor, nn

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


DTYPES = [torch.float32, torch.float64]  # by the C passes, and by operators


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Run:
    """Ranks whose books are checked in every step."""

    def __init__(self, dtype: torch.dtype, ranks: int = 2, **options):
        self.group = dict(density=0.1, density_steps=0) | options
        self.sign = -1.0 if options.get("maximize") else 1.0
        self.shapes, self.dtype = BY_DTYPE[dtype], dtype
        make = functools.partial(compopt.ScapeAdamS, lr=1e-2, **self.group)
        self.world, self.params, self.optimizers = replicas(ranks, weights(self.shapes, dtype), make)
        self.t = 0

    def state(self, name: str, i: int, rank: int = 0) -> Tensor:
        optimizer = self.optimizers[rank]
        optimizer.state_dict()  # waits for masks on their way
        return optimizer.state[self.params[rank][i]][name].clone()

    def bits(self, name: str, i: int) -> Tensor:
        return reference.unpack_bits(self.state(name, i), self.params[0][i].numel())

    def momentum(self, i: int) -> Tensor:
        """With its zeros, flat."""
        if self.group.get("sharded"):
            return torch.cat([self.state("exp_avg", i, rank) for rank in range(self.world.size)])
        whole = torch.zeros(self.params[0][i].numel(), dtype=self.dtype)
        whole[self.bits("mask", i)] = self.state("exp_avg", i).view(-1)
        return whole

    def residual(self, i: int, rank: int) -> Tensor:
        return self.state("residual", i, rank).view(-1)

    def mean_residual(self, i: int) -> Tensor:
        ranks = range(self.world.size)
        mean = torch.stack([self.residual(i, rank) for rank in ranks]).mean(0)
        if self.group.get("sharded"):
            mean += torch.cat([self.state("common", i, rank) for rank in ranks])
        return mean

    def step(self, absent: int | None = None) -> None:
        """One step; ``absent`` has no gradient on any rank."""
        grads = gradients(self.world.size, self.t, self.shapes, self.dtype)
        for local in grads:
            if absent is not None:
                local[absent] = None
        m = {i: self.momentum(i) for i in MATRICES}
        residual = {i: self.mean_residual(i) for i in MATRICES}
        came = {i: [self._x(i, rank, m[i], local[i]) for rank, local in enumerate(grads)] for i in MATRICES}
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        for i in MATRICES:
            if i == absent:
                assert torch.equal(self.momentum(i), m[i]) and torch.equal(self.mean_residual(i), residual[i])
            elif "max_grad_norm" not in self.group:
                mean = torch.stack([self.sign * local[i] for local in grads]).mean(0).view(-1)
                close(self.momentum(i) + self.mean_residual(i), 0.9 * m[i] + 0.1 * mean + residual[i])
        if not self.group.get("sharded"):
            self._check_masks(came)

    def _x(self, i: int, rank: int, m: Tensor, g: Tensor | None) -> Tensor:
        x = 0.9 * m + self.residual(i, rank)
        return x if g is None else x + 0.1 * self.sign * g.view(-1)

    def _check_masks(self, came: dict[int, list[Tensor]]) -> None:
        """A bucket's mask is cut into equal ranges of words, its tensors in reverse; each rank selects in its own."""
        total = sum((x[0].numel() + 7) // 8 for x in came.values())
        ranks, at = self.world.size, 0
        cuts = [8 * (total * rank // ranks // 8 * 8) for rank in range(ranks)] + [8 * total]
        for i in sorted(came, reverse=True):
            n = came[i][0].numel()
            mask = self.bits("next_mask", i)
            assert int(mask.sum()) == round(self.group["density"] * n)
            for rank in range(ranks):
                part = slice(max(0, min(n, cuts[rank] - at)), max(0, min(n, cuts[rank + 1] - at)))
                x, chosen = came[i][rank][part].abs(), mask[part]
                if chosen.any():
                    assert x[chosen].min() >= x[~chosen].max() - 1e-6
            at += (n + 7) // 8 * 8


STEPS_OPTIONS = {
    "bits": dict(density=0.3),
    "codes": dict(density=0.02),
    "maximize": dict(maximize=True),
    "int8": dict(payload_dtype=torch.int8, density=0.2),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(STEPS_OPTIONS, DTYPES), ids=str)
def test_nothing_is_lost_and_masks_are_the_owners(dtype, name):
    run = Run(dtype, **STEPS_OPTIONS[name])
    for _ in range(4):
        run.step()
    assert run.optimizers[0].stats.phase == "sparse"
    for i in (2, 2, None, None):
        run.step(i)
    for p, q in zip(*run.params, strict=True):
        assert torch.equal(p, q)


@each_dtype
def test_a_tensor_absent_while_the_others_become_sparse_keeps_its_momentum(dtype):
    """Their momenta shrink to what is on the mask, in other memory; its own stays whole."""
    run = Run(dtype)
    for absent in (None, 2, 2, None, None):
        run.step(absent)
    assert run.optimizers[0].stats.phase == "sparse"


@pytest.mark.parametrize("guess", [0.0, 1e-30, 1e30])
def test_a_guess_that_leads_nowhere_loses_nothing(guess):
    """The native commit then searches in all of x, of which it has already sent a part."""
    run = Run(torch.float32)
    for _ in range(2):
        run.step()
    for _ in range(2):
        for optimizer in run.optimizers:
            optimizer._engine.settle_state()
            for bucket in optimizer._buckets:
                bucket.cache["guesses"].fill_(guess)
        run.step()


@each_dtype
def test_what_int8_owes_on_the_mask_is_owed_after_a_checkpoint(dtype):
    run = Run(dtype, payload_dtype=torch.int8, density=0.2)
    for _ in range(3):
        run.step()
    assert (run.residual(0, 0)[run.bits("mask", 0)] != 0).any()
    for optimizer in run.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run.step()


@each_dtype
def test_a_mask_that_is_lost_is_not_the_one_before_it(dtype):
    run = Run(dtype)
    for _ in range(3):
        run.step()
    step(run.world, run.params, run.optimizers, gradients(2, run.t, run.shapes, dtype))
    for pending in (
        exchange.in_flight for optimizer in run.optimizers for exchange in optimizer._engine.post_commit.exchanges
    ):
        run.world.failing_everywhere.add(pending.number)
    for optimizer in run.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not run.bits("next_mask", 0).any() and run.bits("mask", 0).any()
    step(run.world, run.params, run.optimizers, gradients(2, run.t + 1, run.shapes, dtype))
    assert run.optimizers[0].stats.phase == "dense"


@each_dtype
def test_sharded_loses_nothing_either(dtype):
    """Nor is anything that is common to all ranks taken twice when it is handed out."""
    run = Run(dtype, ranks=3, sharded=True)
    for absent in (None, None, None, 2, None):
        run.step(absent)
    residual = {i: run.mean_residual(i) for i in MATRICES}
    run.world.consolidate(run.optimizers)
    for i in MATRICES:
        close(run.mean_residual(i), residual[i])
    run.step()


def test_density_falls_exponentially_after_the_warm_up():
    world, _, params, optimizers = make(1, [(128, 128)], density=0.01, dense_steps=4, density_steps=10)
    records = []
    for t in range(18):
        step(world, params, optimizers, gradients(1, t, [(128, 128)]))
        records.append(optimizers[0].stats.density)
    wanted = [1.0] * 4 + [max(0.01, 0.01 ** (k / 10)) for k in range(14)]
    assert records == pytest.approx(wanted, rel=5e-3)


def test_the_clock_of_the_mask():
    """The first step has no mask: a step uses that of the step before."""
    world, _, params, optimizers = make(1, density=0.1, density_steps=0)
    for t, phase in enumerate(["dense", "sparse"]):
        step(world, params, optimizers, gradients(1, t, SHAPES))
        assert optimizers[0].stats.phase == phase


def test_a_lost_mask_makes_the_next_step_dense_and_nothing_is_lost_with_it():
    world, _, params, optimizers = make(2, density=0.1, density_steps=0)
    for t in range(3):
        step(world, params, optimizers, gradients(2, t, SHAPES))
    for pending in (
        exchange.in_flight for optimizer in optimizers for exchange in optimizer._engine.post_commit.exchanges
    ):
        world.failing_everywhere.add(pending.number)
    p = params[0][0]
    residuals = sum(o.state[local[0]]["residual"] for o, local in zip(optimizers, params, strict=True)) / 2
    wanted = 0.9 * dense_moment(optimizers[0], p) + 0.1 * sum(g[0] for g in gradients(2, 3, SHAPES)) / 2 + residuals
    step(world, params, optimizers, gradients(2, 3, SHAPES))
    assert optimizers[0].stats.phase == "dense" and optimizers[0].stats.residual_norm() == 0
    torch.testing.assert_close(dense_moment(optimizers[0], p), wanted)
    step(world, params, optimizers, gradients(2, 4, SHAPES))
    assert optimizers[1].stats.phase == "sparse"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_checkpoint_with_a_mask_in_flight_continues_to_the_bit(at):
    options = dict(density=0.1, density_steps=3)
    shapes = [(256, 256), (30,)]
    world, _, params, optimizers = make(2, shapes, **options)
    for t in range(at):
        step(world, params, optimizers, gradients(2, t, shapes))
    assert all(optimizer._engine.post_commit.exchanges for optimizer in optimizers)  # in flight
    reached = [[p.detach().clone() for p in local] for local in params]
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    again, _, new_params, new = make(2, shapes, **options)
    for local, held, optimizer, state in zip(new_params, reached, new, saved, strict=True):
        for p, w in zip(local, held, strict=True):
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
    world, _, params, optimizers = make(1, density=0.1, density_steps=0)
    for t in range(3):
        step(world, params, optimizers, gradients(1, t, SHAPES))
    state = copy.deepcopy(optimizers[0].state_dict())
    for broken in (state["state"][0]["exp_avg"][:-1], torch.zeros(3)):
        state["state"][0]["exp_avg"] = broken
        with pytest.raises(ValueError, match="'exp_avg' of parameter 0"):
            optimizers[0].load_state_dict(state)


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
