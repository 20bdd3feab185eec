"""SEPARATE step by step in float32: what options do, when errors are forgotten, what dense steps in between send."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from problems import gradients, replicas, step, weights
from table import projecting
from torch import Tensor, nn

import compopt

SHAPES = [(64, 80), (80,), (150, 140), (96, 64)]
COMPRESSED = (0, 2, 3)


class Run:
    """Two ranks of SeparateAdam, and what went in, was applied and is owed."""

    def __init__(self, **options):
        make = functools.partial(compopt.SeparateAdam, lr=1e-2, **projecting(**{"projection": "gaussian", **options}))
        self.world, self.params, self.optimizers = replicas(2, weights(SHAPES, torch.float32), make)
        self.t = 0

    def options(self, **changed) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(changed)

    def state(self, name: str, i: int) -> list[Tensor]:
        pairs = zip(self.optimizers, self.params, strict=True)
        return [optimizer.state[local[i]][name].clone() for optimizer, local in pairs]

    def residual(self, i: int) -> Tensor:
        return torch.stack(self.state("residual", i)).mean(0)

    def step(self, absent: int | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """One step; of each compressed tensor what was applied, and what came: gradients and what was owed."""
        grads = gradients(2, self.t, SHAPES, torch.float32)
        for local in grads:
            if absent is not None:
                local[absent] = None
        before = {i: (self.state("exp_avg", i)[0], self.residual(i)) for i in COMPRESSED}
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        books = {}
        for i, (m, residual) in before.items():
            if i == absent:
                assert torch.equal(self.state("exp_avg", i)[0], m) and torch.equal(self.residual(i), residual)
                continue
            applied = (self.state("exp_avg", i)[0] - 0.9 * m) / (1 - 0.9)
            books[i] = applied, torch.stack([local[i] for local in grads]).mean(0) + residual
        return books


@pytest.mark.parametrize("projection, beta", [("gaussian", "auto"), ("tracked", 0.5), ("tracked", "auto")])
def test_dense_steps_in_between_leave_to_absent_tensors_what_they_owe(projection, beta):
    """A contraction's residual is sent. An unbiased projection's error is noise: a dense step drops it."""
    run = Run(projection=projection, ef_beta=beta, reset_interval=None)
    for _ in range(3):
        run.step()
    assert run.optimizers[0].stats.phase == "projected" and run.residual(2).any()
    run.options(dense_steps=100)
    for absent in (2, None):
        residual = {i: run.residual(i) for i in COMPRESSED}
        for i, (applied, came) in run.step(absent).items():
            wanted = came - residual[i] if projection == "gaussian" else came
            torch.testing.assert_close(applied, wanted, rtol=1e-4, atol=1e-4)
            assert not run.residual(i).any()
        assert run.residual(2).any() == (absent == 2)
    assert run.optimizers[0].stats.phase == "dense"


@pytest.mark.parametrize("beta, kept", [("auto", 0.0), (0.9, 0.9)])
def test_of_a_tracked_tensor_as_much_of_the_old_error_is_kept_as_ef_beta_says(beta, kept):
    run = Run(projection="tracked", ef_beta=beta)
    for _ in range(4):
        old = {i: run.residual(i) for i in COMPRESSED}
        for i, (applied, came) in run.step().items():
            wanted = kept * old[i] + (1 - kept) * (came - applied)
            torch.testing.assert_close(run.residual(i), wanted, rtol=1e-3, atol=1e-4)


def test_a_base_of_tracked_tensors_goes_on_after_they_were_absent_and_from_a_checkpoint():
    run, other = Run(projection="tracked"), Run(projection="tracked")
    run.step()
    basis = run.state("basis", 2)
    run.step(absent=2)
    assert all(map(torch.equal, run.state("basis", 2), basis))
    for mine, theirs, local, reached in zip(other.optimizers, run.optimizers, other.params, run.params, strict=True):
        mine.load_state_dict(theirs.state_dict())
        for p, q in zip(local, reached, strict=True):
            p.data.copy_(q)
    other.t = run.t
    for one in (run, other):
        one.step()
    for p, q in zip(run.params[0], other.params[0], strict=True):
        assert torch.equal(p, q)


def test_a_basis_is_orthonormal():
    """So that int8 keeps what belongs to small singular values."""
    run = Run(projection="tracked")
    for _ in range(2):
        run.step()
    for i, (rows, columns) in ((0, (64, 80)), (2, (150, 140))):
        basis = run.state("basis", i)[0]
        basis = basis.view(columns, 4) if basis.numel() == 4 * columns else basis.view(rows, 4)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(4), rtol=0, atol=1e-5)


def test_what_int8_takes_off_a_tensor_sent_dense_beside_tracked_ones_goes_out_with_the_next_step():
    run = Run(projection="tracked", rank=40, payload_dtype=torch.int8)  # more columns than pay for the first
    for _ in range(4):
        for i, (applied, came) in run.step().items():
            torch.testing.assert_close(applied + run.residual(i), came, rtol=1e-3, atol=1e-3)
    assert run.optimizers[0].stats.phase == "projected"


def test_the_rank_of_a_tracked_tensor_is_what_is_asked_for():
    sent = {}
    for rank in (1, 5):
        p = nn.Parameter(torch.zeros(64, 80))
        optimizer = compopt.SeparateAdam([p], **projecting("tracked", rank=rank), simulate=True)
        p.grad = torch.randn(64, 80)
        optimizer.step()
        assert optimizer.state[p]["basis"].numel() == rank * 80
        sent[rank] = optimizer.stats.bytes_sent
    assert sent[5] - sent[1] == 4 * (5 - 1) * (64 + 80)


def test_tracked_tensors_of_one_shape_follow_each_its_own_gradient():
    """Each gradient is of rank 2: in the third step all of it arrives."""
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(96, 64)) for _ in range(3)]
    grads = [torch.randn(96, 2, generator=random) @ torch.randn(2, 64, generator=random) for _ in params]
    optimizer = compopt.Separate(
        torch.optim.SGD(params, lr=1.0), **projecting("tracked", rank=2), ef_beta=1.0, simulate=True
    )
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for p, w, g in zip(params, before, grads, strict=True):
        torch.testing.assert_close(w - p.detach(), g, rtol=1e-3, atol=1e-3)


def test_columns_of_a_stack_are_those_of_each_tensor():
    """Their random numbers begin at a multiple of four: 67 x 5 are not one."""
    params = [nn.Parameter(torch.zeros(67, 81)) for _ in range(3)]
    optimizer = compopt.SeparateAdam(params, projection="gaussian", ratio=16, simulate=True)
    (bucket,) = optimizer._buckets
    reducer = optimizer.make_reducer(bucket)
    reducer.draw_columns()
    (stack,) = reducer.stacks
    columns = stack.R.clone()
    drawn = optimizer._draw(bucket, optimizer._plan_next_step(bucket))
    assert columns.shape == (3, 67, 5) and all(map(torch.equal, columns, drawn))


def test_what_is_adapted_is_each_tensors_own():
    run = Run(adaptive=True, adapt_interval=2, reset_interval=None)
    for optimizer, local in zip(run.optimizers, run.params, strict=True):
        optimizer.state[local[0]]["residual"].normal_(std=30.0, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        run.step()
    (optimizer, _), local = run.optimizers, run.params[0]
    ratios = [ratio for ratio, _ in optimizer.param_groups[0]["adapted"]]
    assert ratios[0] != ratios[2]
    (bucket,) = optimizer._buckets
    plan = dict(zip(bucket.params, optimizer._plan_next_step(bucket), strict=True))
    for i in COMPRESSED:
        assert plan[local[i]].r == math.ceil(min(SHAPES[i]) / ratios[i])
