"""Options of SEPARATE that decide what is projected, how, and until when: each is seen to act, in float32."""

from __future__ import annotations

import pytest
import torch
from problems import gradients, replicas, step, weights
from table import projecting
from torch import nn

import compopt

SHAPES = [(64, 80), (96, 64)]


def run(steps: int = 3, ranks: int = 2, first: int = 0, **options):
    """A few steps on the same gradients, whatever the options; counted from ``first``."""
    start = weights(SHAPES, torch.float32)
    world, params, optimizers = replicas(
        ranks, start, lambda ps, process_group: compopt.SeparateAdam(ps, process_group=process_group, **options)
    )
    residuals = []
    for optimizer in optimizers:
        optimizer.param_groups[0]["step"] = first
    for t in range(steps):
        step(world, params, optimizers, gradients(ranks, t, SHAPES, torch.float32))
        residuals.append([optimizers[0].state[p]["residual"].clone() for p in params[0]])
    return params[0], residuals


def test_the_seed_decides_about_the_matrices_and_nothing_else_does():
    for projection in ("gaussian", "tracked"):
        one, same, other = (run(**projecting(projection), seed=seed)[0] for seed in (5, 5, 6))
        for a, b, c in zip(one, same, other, strict=True):
            assert torch.equal(a, b) and not torch.allclose(a, c)


def test_matrices_are_other_ones_in_every_step_and_for_every_tensor():
    from compopt._lowrank.matrices import MatrixSource
    from compopt._lowrank.projections import plan_projection as plan_of

    q = plan_of((64, 80), False, 16, "gaussian", "auto", 4)
    bucket = compopt.SeparateAdam(
        [nn.Parameter(torch.zeros(64, 80)) for _ in range(2)], projection="gaussian"
    )._buckets[0]
    drawn = [
        [R.clone() for R in MatrixSource().draw(bucket, [0, 1], [q, q], seed, t)]
        for seed, t in ((0, 1), (0, 2), (1, 1))
    ]
    matrices = [R for pair in drawn for R in pair]
    assert all(not torch.allclose(a, b) for n, a in enumerate(matrices) for b in matrices[:n])


@pytest.mark.parametrize(
    ("options", "forgets"),
    [
        (dict(projection="gaussian"), [128]),
        (dict(projection="tracked", rank=4), []),
        (dict(projection="tracked", rank=4, reset_interval=64), [64, 128]),
        (dict(projection="gaussian", reset_interval=63), [63]),
        (dict(projection="gaussian", reset_interval=None), []),
    ],
    ids=str,
)
def test_the_error_is_forgotten_every_128_steps_and_a_tracked_one_never(options, forgets):
    results = []
    for first in (62, 126):
        _, residuals = run(3, 1, first, **options)
        results += [first + 1 + n for n, each in enumerate(residuals) if not any(r.any() for r in each)]
    assert results == forgets


def columns_of(p: torch.Tensor, moved: torch.Tensor) -> int:
    """The rank of what a step of plain SGD has changed: as many as were sent."""
    return int(torch.linalg.matrix_rank((p - moved).double(), rtol=1e-4))


@pytest.mark.parametrize("named", [False, True])
def test_a_group_of_the_base_says_how_its_tensors_are_compressed(named):
    """And groups that say nothing take what the wrapper says."""
    local = [{}, {"compopt_ratio": 4}, {"compopt_ratio": 32}, {"compopt_compress": False}]
    params = [nn.Parameter(w) for w in weights([(64, 96)] * len(local), torch.float32)]
    groups = [
        {"params": [(f"layer{n}.weight", p)] if named else [p], **message}
        for n, (p, message) in enumerate(zip(params, local, strict=True))
    ]
    optimizer = compopt.Separate(torch.optim.SGD(groups, lr=1.0), projection="gaussian", ratio=16, simulate=True)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, gradients(1, 0, [(64, 96)] * len(local), torch.float32)[0], strict=True):
        p.grad = g
    optimizer.step()
    assert [columns_of(*pair) for pair in zip(before, params, strict=True)] == [4, 16, 2, 64]
    floats = 4 * (96 * (4 + 16 + 2) + 64 * 96)
    assert floats <= optimizer.stats.bytes_sent <= floats + 1024
    assert [group["ratio"] for group in optimizer._option_groups] == [16, 4, 32, 16]


def test_a_group_of_the_base_says_its_rank_and_its_weight_of_old_errors():
    params = [nn.Parameter(w) for w in weights([(64, 96)] * 3, torch.float32)]
    own = [{}, {"compopt_rank": 3}, {"compopt_ef_beta": 1.0}]
    groups = [{"params": [p], **options} for p, options in zip(params, own, strict=True)]
    optimizer = compopt.Separate(torch.optim.SGD(groups, lr=1.0), **projecting("tracked", rank=7), simulate=True)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, gradients(1, 0, [(64, 96)] * 3, torch.float32)[0], strict=True):
        p.grad = g
    optimizer.step()
    assert [columns_of(*pair) for pair in zip(before, params, strict=True)] == [7, 3, 7]
    assert [bool(optimizer.state[p]["residual"].any()) for p in params] == [True, True, False]


def test_a_checkpoint_of_the_base_alone_begins_compression_anew():
    """Also in an optimizer that has trained: what it held back belongs to other parameters."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(80, 64))
    optimizer = compopt.Separate(torch.optim.AdamW([p], lr=1e-2), projection="gaussian", ratio=8, simulate=True)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
    assert optimizer.stats.residual_norm() > 0
    optimizer.load_state_dict(optimizer.base.state_dict())
    assert optimizer.stats.residual_norm() == 0 and optimizer.state_dict()["param_groups"][0]["step"] == 0
    assert optimizer.base.state[p]["step"] == 3
