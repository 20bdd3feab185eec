"""TagcAdamW step by step: in float32 on the backend chosen by itself, in float64 on PyTorch's operators."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from problems import gradients, replicas, step, weights
from test_radius_steps import COMPRESSED, SHAPES, each_dtype
from torch import Tensor

import compopt
from compopt import tagc
from compopt.tagc import count_selected


class Run:
    """Ranks whose books are checked in every step: what is applied, what is owed, and what AdamW makes of it."""

    def __init__(self, dtype: torch.dtype, ranks: int = 2, **options):
        self.shapes, self.dtype = SHAPES[dtype], dtype
        make = functools.partial(compopt.TagcAdamW, lr=1e-2, weight_decay=0.1, **{"density": 0.1, **options})
        self.world, self.params, self.optimizers = replicas(ranks, weights(self.shapes, dtype), make)
        self.t = 0

    def options(self, **changed) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(changed)

    def whole(self, name: str, i: int) -> Tensor:
        """A sharded state, put together."""
        states = [o.state[local[i]] for o, local in zip(self.optimizers, self.params, strict=True)]
        return torch.cat([state[name] for state in states]).view(self.shapes[i]).clone()

    def residual(self, i: int) -> Tensor:
        states = [o.state[local[i]] for o, local in zip(self.optimizers, self.params, strict=True)]
        return torch.stack([state["residual"] for state in states]).mean(0)

    def counts(self, i: int) -> list[float]:
        return [float(o.state[local[i]]["step"]) for o, local in zip(self.optimizers, self.params, strict=True)]

    def step(self, absent: int | None = None, exact: bool = True) -> None:
        grads = gradients(self.world.size, self.t, self.shapes, self.dtype)
        for local in grads:
            if absent is not None:
                local[absent] = None
        before = {i: (self.params[0][i].detach().clone(), self.whole("exp_avg", i), self.whole("exp_avg_sq", i),
                      self.residual(i), self.counts(i)) for i in COMPRESSED}  # fmt: skip
        step(self.world, self.params, self.optimizers, grads)
        self.t += 1
        for i, (w, m, v, residual, counts) in before.items():
            if i == absent:
                assert torch.equal(self.params[0][i], w) and torch.equal(self.whole("exp_avg", i), m)
                assert torch.equal(self.residual(i), residual) and self.counts(i) == counts
                continue
            t = counts[0] + 1
            assert self.counts(i) == [t] * self.world.size
            came = torch.stack([local[i] for local in grads]).mean(0) + residual
            applied = (self.whole("exp_avg", i) - 0.9 * m) / (1 - 0.9)
            torch.testing.assert_close(applied + self.residual(i), came, rtol=1e-4, atol=1e-4)
            if not exact:  # parameters are gathered as their updates, rounded
                continue
            v = 0.999 * v + 0.001 * applied.square()
            torch.testing.assert_close(self.whole("exp_avg_sq", i), v, rtol=1e-3, atol=1e-6)
            update = self.whole("exp_avg", i) / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            torch.testing.assert_close(self.params[0][i].detach(), w - 1e-2 * (update + 0.1 * w), rtol=1e-3, atol=2e-4)
        for local in self.params[1:]:
            for p, q in zip(self.params[0], local, strict=True):
                assert torch.equal(p, q)

    @property
    def phase(self) -> str:
        return self.optimizers[0].stats.phase


@each_dtype
@pytest.mark.parametrize("options", [{}, dict(codec="sketch", sketch_ratio=2, density=0.05)], ids=["compact", "sketch"])
def test_nothing_is_lost_and_the_owner_steps_as_adamw_does(dtype, options):
    run = Run(dtype, ranks=3, **options)
    for absent in (None, None, 2, None):
        run.step(absent)
    assert run.phase == "sparse" and run.residual(2).any()


@pytest.mark.parametrize("n", [1, 7, 4096, 16_384, 16_385, 200_000])
@pytest.mark.parametrize("density", [1.0, 0.5, 0.2, 0.1, 0.0125, 0.001])
def test_what_is_left_is_what_density_says(n, density):
    """At most that share is left, no element less, and one where there are any."""
    k = count_selected(density, n)
    assert k == max(1, math.floor(round(density * n, 6)))
    assert k == 1 or k / n <= density + 1e-9


@each_dtype
def test_every_shard_leaves_its_share(dtype):
    run = Run(dtype, density=0.25)
    run.world.record = True
    run.step()
    (sent,) = [per_rank for kind, per_rank in run.world.log if kind == "BitOr"]
    (bucket,) = run.optimizers[0]._buckets
    cuts = bucket.shards.mask_cuts
    for bits in sent:
        for rank in range(2):
            local = bits[cuts[rank] : cuts[rank + 1]]
            left = int((local.unsqueeze(1) >> torch.arange(8) & 1).sum())
            assert left == count_selected(0.25, bucket.shards.compressed_counts[rank])


@each_dtype
def test_the_norm_that_is_clipped_is_of_all_shards(dtype):
    run = Run(dtype, density=1.0, max_grad_norm=1.0)
    grads = gradients(2, 0, run.shapes, dtype)
    step(run.world, run.params, run.optimizers, grads)
    mean = [torch.stack(same).mean(0) for same in zip(*grads, strict=True)]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean))
    assert run.optimizers[0].stats.grad_norm == pytest.approx(norm, rel=1e-5)
    for i in COMPRESSED:
        torch.testing.assert_close(run.whole("exp_avg", i), 0.1 * mean[i] / norm, rtol=1e-4, atol=1e-7)


def test_a_sketch_draws_other_cells_in_every_step_and_bucket_and_the_same_on_all_ranks(monkeypatch):
    """Cells that repeat would leave the same elements over in every step."""
    drawn = []

    class Recorded(tagc.Sketch):
        def __init__(self, layout, index, counts, ratio, seed):
            drawn.append((layout.rank, seed))
            super().__init__(layout, index, counts, ratio, seed)

    monkeypatch.setattr(tagc, "Sketch", Recorded)

    def make(params, **options):
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return compopt.TagcAdamW(groups, codec="sketch", density=0.1, **options)

    shapes = SHAPES[torch.float64]
    world, params, optimizers = replicas(2, weights(shapes, torch.float64), make)
    for t in range(2):
        step(world, params, optimizers, gradients(2, t, shapes, torch.float64))
    of_rank = [[seed for rank, seed in drawn if rank == r] for r in range(2)]
    assert sorted(of_rank[0]) == sorted(of_rank[1])
    assert len(set(of_rank[0])) == 4, "2 steps of 2 buckets"
