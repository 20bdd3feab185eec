"""ScapeAdamS step by step: in float32 on the backend chosen by itself, in float64 on PyTorch's operators.

After every step, whatever the options: nothing is lost, and the next masks are what their owners should choose.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from oracles import kernels as reference
from problems import gradients, replicas, step, weights
from slow_rows import in_turn
from torch import Tensor

import compopt

SHAPES = {  # of float32 sizes above the blocks that passes work in; all are cut between ranks
    torch.float32: [(64, 80), (80,), (260, 520), (70, 300)],
    torch.float64: [(64, 80), (80,), (70, 80), (64, 66)],
}
COMPRESSED = (0, 2, 3)

DTYPES = [torch.float32, torch.float64]  # by the C passes, and by operators
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["native", "torch"])


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Run:
    """Ranks whose books are checked in every step."""

    def __init__(self, dtype: torch.dtype, ranks: int = 2, **options):
        self.group = dict(density=0.1, density_steps=0) | options
        self.sign = -1.0 if options.get("maximize") else 1.0
        self.shapes, self.dtype = SHAPES[dtype], dtype
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
        m = {i: self.momentum(i) for i in COMPRESSED}
        residual = {i: self.mean_residual(i) for i in COMPRESSED}
        came = {i: [self._x(i, rank, m[i], local[i]) for rank, local in enumerate(grads)] for i in COMPRESSED}
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        for i in COMPRESSED:
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


OPTIONS = {
    "bits": dict(density=0.3),
    "codes": dict(density=0.02),
    "maximize": dict(maximize=True),
    "int8": dict(payload_dtype=torch.int8, density=0.2),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(OPTIONS, DTYPES), ids=str)
def test_nothing_is_lost_and_masks_are_the_owners(dtype, name):
    run = Run(dtype, **OPTIONS[name])
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
            optimizer._session.settle_state()
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
        exchange.in_flight for optimizer in run.optimizers for exchange in optimizer._session.post_commit.exchanges
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
    residual = {i: run.mean_residual(i) for i in COMPRESSED}
    run.world.consolidate(run.optimizers)
    for i in COMPRESSED:
        close(run.mean_residual(i), residual[i])
    run.step()
