"""RadiusAdamW step by step: in float32 on the backend chosen by itself, in float64 on PyTorch's operators."""

from __future__ import annotations

import functools

import pytest
import torch
from oracles import kernels as reference
from problems import gradients, replicas, step, weights
from torch import Tensor

import compopt

SHAPES = {  # of float32 sizes above the blocks that passes work in
    torch.float32: [(64, 80), (80,), (260, 520), (70, 300)],
    torch.float64: [(64, 80), (80,), (70, 80), (64, 66)],
}
COMPRESSED = (0, 2, 3)

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "torch"])


class Run:
    """Two ranks, and what went in, was applied, and is owed."""

    def __init__(self, dtype: torch.dtype, ranks: int = 2, **options):
        make = functools.partial(compopt.RadiusAdamW, lr=1e-2, **options)
        self.shapes, self.dtype = SHAPES[dtype], dtype
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
        books = {i: (self.state("exp_avg", i), self.residual(i)) for i in COMPRESSED}
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
    for i in COMPRESSED:
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
        for i in COMPRESSED:
            m, v, t = (run.state(name, i) for name in ("exp_avg", "exp_avg_sq", "step"))
            update = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + before[i]
            k = round(density * before[i].numel())
            mask = reference.unpack_bits(run.state("mask", i), before[i].numel())
            assert int(mask.sum()) == k
            wanted = update.abs().view(-1).topk(k).values.sum()
            torch.testing.assert_close(update.abs().view(-1)[mask].sum(), wanted, rtol=1e-5, atol=0)
