"""RadiusAdamW against Algorithm 1 written on dense tensors, step by step, and what is the class's own."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from oracles import RadiusOracle
from oracles import kernels as reference
from problems import BY_DTYPE, COMPRESSED, MATRICES, each_dtype, gradients, replicas, step, weights
from sim import World
from torch import Tensor, nn

import compopt


def make(ranks: int, **options):
    start = weights()
    world, params, optimizers = replicas(ranks, start, functools.partial(compopt.RadiusAdamW, **options))
    return world, start, params, optimizers


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        dict(density=0.4, interval=7, dense_steps=4),
        dict(density=0.1, interval=5, dense_steps=0, max_grad_norm=1.0),
        dict(density=0.01, interval=4, dense_steps=3, maximize=True),
    ],
    ids=["plain", "clipped", "damped"],
)
def test_equals_the_oracle(ranks, options):
    hyper = dict(lr=3e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    world, start, params, optimizers = make(ranks, **hyper, **options)
    oracle = RadiusOracle(start, ranks, compress=COMPRESSED, **hyper, **options)
    phases = set()
    for t in range(24):
        grads = gradients(ranks, t)
        step(world, params, optimizers, grads)
        oracle.step(grads)
        phases.add(oracle.phase)
        assert optimizers[0].stats.phase == oracle.phase
        for i, wanted in enumerate(oracle.params):
            torch.testing.assert_close(params[-1][i].detach(), wanted, rtol=1e-11, atol=1e-12)
    assert phases >= {"resample", "sparse"}
    for rank, optimizer in enumerate(optimizers):
        optimizer.state_dict()
        for i, p in enumerate(params[rank]):
            if COMPRESSED[i]:
                torch.testing.assert_close(
                    optimizer.state[p]["residual"], oracle.residual[rank][i], rtol=1e-11, atol=1e-12
                )
                assert torch.equal(
                    reference.unpack_bits(optimizer.state[p]["mask"], p.numel()), oracle.mask[i].view(-1)
                )


def test_the_schedule_resamples_at_once_after_warm_up_and_then_at_multiples_of_the_interval():
    world, _, params, optimizers = make(1, density=0.3, interval=4, dense_steps=6)
    phases = []
    for t in range(14):
        step(world, params, optimizers, gradients(1, t))
        phases.append(optimizers[0].stats.phase[0])
    assert "".join(phases) == "dddddr" + "s" + "r" + "sss" + "r" + "ss"


def test_all_ranks_take_rank_0s_mask_and_a_lost_one_makes_the_next_step_resample():
    world, _, params, optimizers = make(2, density=0.3, interval=100, dense_steps=0)
    step(world, params, optimizers, gradients(2, 0))
    for pending in (
        exchange.in_flight for optimizer in optimizers for exchange in optimizer._engine.post_commit.exchanges
    ):
        world.failing_everywhere.add(pending.number)
    step(world, params, optimizers, gradients(2, 1))
    assert optimizers[0].stats.phase == "resample"
    step(world, params, optimizers, gradients(2, 2))
    assert optimizers[1].stats.phase == "sparse"
    masks = [optimizer.state[local[0]]["mask"] for local, optimizer in zip(params, optimizers, strict=True)]
    assert torch.equal(*masks) and masks[0].any()


def test_state_takes_four_bytes_and_one_bit_an_element_beside_adamws():
    p = nn.Parameter(torch.zeros(256, 256))
    optimizer = compopt.RadiusAdamW([p])
    held = {name: t.numel() * t.element_size() / p.numel() for name, t in optimizer.state[p].items() if t.dim()}
    assert held == {"exp_avg": 4, "exp_avg_sq": 4, "residual": 4, "mask": 1 / 8}


def test_a_checkpoint_of_adamw_is_taken_over_and_given_back():
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.ones(64, 80)) for _ in range(2))
    dense, ours = torch.optim.AdamW([p], lr=1e-2), compopt.RadiusAdamW([q], lr=1e-2, density=0.5, dense_steps=6)
    for t in range(4):
        p.grad = torch.randn(64, 80, generator=torch.Generator().manual_seed(t))
        dense.step()
    q.data.copy_(p)
    ours.load_state_dict(dense.state_dict())
    assert ours.param_groups[0]["step"] == 4
    for optimizer in (dense, ours):  # step 5 is dense: the same
        p.grad = q.grad = torch.randn(64, 80, generator=torch.Generator().manual_seed(9))
        optimizer.step()
    torch.testing.assert_close(p, q)
    back = torch.optim.AdamW([q], lr=1e-2)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    back.step()
    ours.step()
    assert float(back.state[q]["step"]) == 6


class Run:
    """Two ranks, and what went in, was applied, and is owed."""

    def __init__(self, dtype: torch.dtype, ranks: int = 2, **options):
        make = functools.partial(compopt.RadiusAdamW, lr=1e-2, **options)
        self.shapes, self.dtype = BY_DTYPE[dtype], dtype
        self.world, self.params, self.optimizers = replicas(ranks, weights(self.shapes, dtype), make)
        self.t = 0

    def options(self, **changed) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(changed)

    def state(self, name: str, i: int, rank: int = 0) -> Tensor:
        optimizer = self.optimizers[rank]
        optimizer.state_dict()  # residuals are made readable, masks are awaited
        return optimizer.state[self.params[rank][i]][name].clone()

    def residual(self, i: int) -> Tensor:
        return torch.stack([self.state("residual", i, rank) for rank in range(self.world.size)]).mean(0)

    def step(self, absent: int | None = None) -> None:
        """One step, of whose compressed tensors none loses anything; ``absent`` has no gradient on any rank."""
        grads = gradients(self.world.size, self.t, self.shapes, self.dtype)
        for local in grads:
            if absent is not None:
                local[absent] = None
        books = {i: (self.state("exp_avg", i), self.residual(i)) for i in MATRICES}
        still = None if absent is None else (self.state("step", absent), self.params[0][absent].detach().clone())
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        for i, (m, residual) in books.items():
            if i == absent:
                assert torch.equal(self.state("exp_avg", i), m) and torch.equal(self.residual(i), residual)
                assert torch.equal(self.state("step", i), still[0]) and torch.equal(self.params[0][i], still[1])
                continue
            mean = torch.stack([local[i] for local in grads]).mean(0)
            applied = (self.state("exp_avg", i) - 0.9 * m) / (1 - 0.9)
            torch.testing.assert_close(applied + self.residual(i), mean + residual, rtol=1e-4, atol=1e-4)

    @property
    def phase(self) -> str:
        return self.optimizers[0].stats.phase


@each_dtype
def test_ranks_whose_own_choice_differs_take_rank_0s_mask(dtype):
    runs = [Run(dtype, density=0.3, interval=100, dense_steps=0) for _ in range(2)]
    for p in runs[1].params[1]:
        runs[1].optimizers[1].state[p]["exp_avg"].normal_(generator=torch.Generator().manual_seed(0))
    for run in runs:
        step(run.world, run.params, run.optimizers, gradients(2, 0, run.shapes, dtype))
    for i in MATRICES:
        wanted = runs[0].state("mask", i)
        for rank in range(2):
            assert torch.equal(runs[1].state("mask", i, rank), wanted)


@each_dtype
@pytest.mark.parametrize("denser", [False, True], ids=["same density", "other density"])
def test_a_tensor_absent_when_masks_are_chosen_keeps_its_own_and_what_it_owes(dtype, denser):
    run = Run(dtype, density=0.3, interval=4, dense_steps=0)
    for _ in range(3):
        run.step()
    mask = run.state("mask", 2)
    run.options(density=0.1 if denser else 0.3)
    run.step(absent=2)
    assert run.phase == "resample" and torch.equal(run.state("mask", 2), mask)
    for absent in (2, None, None, None, None):
        run.step(absent)
    assert run.phase == "sparse" and not torch.equal(run.state("mask", 2), mask)


@each_dtype
@pytest.mark.parametrize("resumes", [False, True])
def test_a_tensor_absent_when_masks_are_chosen_after_a_rebind_sends_what_it_owes_on_a_new_one(dtype, resumes):
    run = Run(dtype, density=0.3, interval=100, dense_steps=0)
    for _ in range(3):
        run.step()
    run.world = World(2)
    pairs = zip(run.optimizers, run.world.comms, strict=True)
    run.world.run([functools.partial(optimizer.rebind, comm) for optimizer, comm in pairs])
    run.step(absent=2)
    assert run.phase == "resample" and run.state("mask", 2).any() and run.residual(2).any()
    for optimizer in run.optimizers if resumes else []:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for absent in (2, None, None):
        run.step(absent)
    assert run.phase == "sparse"


@each_dtype
def test_what_a_payload_rounds_off_on_the_mask_is_sent_when_it_rounds_no_more(dtype):
    run = Run(dtype, density=0.3, interval=100, dense_steps=0)
    for payload_dtype in (None, "int8", None):
        run.options(payload_dtype=payload_dtype)
        run.step()
    assert run.phase == "sparse"


@each_dtype
def test_a_tensor_absent_from_the_first_on_is_masked_by_its_weights(dtype):
    """There is nothing else of its update: weight decay."""
    run = Run(dtype, density=0.25, interval=4, dense_steps=0, weight_decay=0.5)
    run.step(absent=3)
    wanted = run.params[0][3].detach().abs().view(-1)
    mask = reference.unpack_bits(run.state("mask", 3), wanted.numel())
    assert int(mask.sum()) == wanted.numel() // 4
    assert wanted[mask].min() >= wanted[~mask].max()
    run.step()
    assert run.phase == "sparse"


@each_dtype
@pytest.mark.parametrize("density", [0.05, 0.4])
def test_masks_are_of_the_largest_updates_with_the_weights_of_before(dtype, density):
    run = Run(dtype, ranks=1, density=density, interval=1, dense_steps=0, weight_decay=1.0)
    run.options(lr=0.5)
    for _ in range(3):
        before = [p.detach().clone() for p in run.params[0]]
        run.step()
        for i in MATRICES:
            m, v, t = (run.state(name, i) for name in ("exp_avg", "exp_avg_sq", "step"))
            update = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + before[i]
            k = round(density * before[i].numel())
            mask = reference.unpack_bits(run.state("mask", i), before[i].numel())
            assert int(mask.sum()) == k
            wanted = update.abs().view(-1).topk(k).values.sum()
            torch.testing.assert_close(update.abs().view(-1)[mask].sum(), wanted, rtol=1e-5, atol=0)
