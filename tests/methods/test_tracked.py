"""projection="tracked": what is conserved, warm starts, shards, and backward's shadow. Its equations: test_twins.py."""

from __future__ import annotations

import dataclasses

import conformance
import pytest
import test_conformance as steps
import test_conformance_faults as faults
import test_conformance_saving as saving
import torch
from problems import gradients, replicas, step, weights
from sim import Ranks
from slow_rows import in_turn
from table import by_name, projecting
from torch import nn

import compopt
from compopt._lowrank.projections import orthonormalize, orthonormalize_by_cholesky, plan_projection

SHAPES = [(64, 80), (80,), (128, 64), (96, 3, 40), (10, 10)]
MATRICES = (0, 2, 3)
RANK = 3


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def make(ranks: int, **options):
    def tracked(params, **group):
        return compopt.Separate(sgd(params), **group, **projecting("tracked", rank=RANK, **options))

    return replicas(ranks, weights(SHAPES), tracked)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.int8, "int4"], ids=str)
def test_what_came_is_what_was_applied_and_what_is_kept(ranks, dtype):
    """The mean of g + e is the averaged gradient plus the mean of the new e, to float32, codes included; also in the
    step for which the rank was changed.
    """
    world, params, optimizers = make(ranks, payload_dtype=dtype)
    for local in (group for optimizer in optimizers for group in optimizer.base.param_groups):
        local.update(lr=1.0, momentum=0.0)

    def kept(i: int) -> torch.Tensor:
        states = [optimizer.state[local[i]] for optimizer, local in zip(optimizers, params, strict=True)]
        return torch.stack([state["residual"] for state in states]).mean(0)

    for t in range(6):
        if t == 4:
            for optimizer in optimizers:
                optimizer.param_groups[0]["compopt_rank"] = RANK + 2
        grads = gradients(ranks, t, SHAPES)
        before = {i: (kept(i).clone(), params[0][i].detach().clone()) for i in MATRICES}
        step(world, params, optimizers, grads)
        for i, (e, w) in before.items():
            came = torch.stack([local[i] for local in grads]).mean(0) + e
            torch.testing.assert_close((w - params[0][i].detach()) + kept(i), came, rtol=1e-5, atol=1e-5)
            assert kept(i).any()
        basis = optimizers[0].state[params[0][2]]["basis"]
        assert basis.numel() == 64 * (RANK + 2 * (t > 3)) and basis.any()


def test_it_follows_a_gradient_of_low_rank():
    """At the third step all of a stationary gradient of rank 3 arrives; a random projection gets little of it."""
    g = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))[:, :RANK] @ torch.randn(RANK, 64)
    caught = {}
    for kind in ("tracked", "gaussian"):
        p = nn.Parameter(torch.zeros(96, 64))
        optimizer = compopt.Separate(
            torch.optim.SGD([p], lr=1.0), **projecting(kind, 12, RANK), ef_beta=1.0, simulate=True
        )
        for _ in range(3):
            before, p.grad = p.detach().clone(), g.clone()
            optimizer.step()
        caught[kind] = float((before - p.detach() - g).norm() / g.norm())
    assert caught["tracked"] < 1e-4 and caught["gaussian"] > 0.5


@pytest.mark.parametrize("by", [orthonormalize, orthonormalize_by_cholesky])
def test_columns_are_orthonormal_whatever_comes(by):
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(40, 1, generator=generator).expand(40, 3)
    matrices = [torch.randn(40, 3, generator=generator), torch.zeros(40, 3), same, torch.randn(7, 2)]
    small_and_large = torch.randn(40, 3, generator=generator) * torch.tensor([1e-30, 1.0, 1e18])
    nearly_same = same + 1e-5 * torch.randn(40, 3, generator=generator)
    matrices += [small_and_large, nearly_same, torch.eye(40)[:, :3], -torch.eye(40)[:, :3]]
    for matrix, (results,) in zip(matrices, by([matrix[None] for matrix in matrices]), strict=True):
        matrix = matrix / matrix.norm(dim=0).clamp_min(1e-35)
        torch.testing.assert_close(results.t() @ results, torch.eye(results.shape[1]), rtol=0, atol=1e-5)
        torch.testing.assert_close(results @ (results.t() @ matrix), matrix, rtol=1e-4, atol=1e-4)


def test_what_is_tracked():
    assert plan_projection(torch.Size((320, 960)), False, 16, "tracked", "auto", 16).r == 16
    conv = plan_projection(torch.Size((128, 64, 3, 3)), True, 16, "tracked", "auto", 16)
    assert (conv.d, conv.m, conv.r, conv.beta) == (128, 576, 16, 0.0)
    few_rows = plan_projection(torch.Size((2, 4096)), True, 16, "tracked", "auto", 16)
    assert few_rows is None or few_rows.r * (2 + 4096) < 2 * 4096
    for shape in [(64, 64), (5000,), (1, 4096), (0, 64)]:
        assert plan_projection(torch.Size(shape), False, 16, "tracked", "auto", 32) is None, shape


def test_bytes_are_rank_times_the_sides():
    p = nn.Parameter(torch.zeros(960, 320))
    for dtype, size in ((None, 4), (torch.int8, 1 + 4 / 128), ("int4", 1 / 2 + 4 / 128)):
        optimizer = compopt.SeparateAdam([p], **projecting("tracked", rank=16, payload_dtype=dtype), simulate=True)
        p.grad = torch.ones_like(p)
        optimizer.step()
        words = optimizer.stats.bytes_sent - size * 16 * (960 + 320)
        header = 1 + len(optimizer._buckets[0].control.numbers)
        assert 0 < words <= 2 * 4 * header + 56, "headers and control words, twice; seven words of the handshake"


TRACKED = projecting("tracked", dense_steps=2)
CASES = [
    dataclasses.replace(by_name[name], compressed={**TRACKED, **more})
    for name, more in (("SeparateAdam", {}), ("Separate", {"payload_dtype": torch.int8}))
]


HOLDS = dict(
    zip(
        ["replicas", "nan", "failure", "absent", "resumed", "consolidated", "fewer", "unfrozen", "shapes", "copies"],
        [
            lambda case: steps.test_replicas_are_equal_to_the_bit_after_every_step(case, 3),
            lambda case: faults.test_a_bad_gradient_on_one_rank_makes_all_skip_and_changes_nothing(
                case, (float("nan"), 4)
            ),
            lambda case: faults.test_a_collective_that_fails_changes_nothing(case, 5),
            lambda case: steps.test_no_gradient_on_one_rank_counts_as_zeros(case),
            lambda case: saving.test_resumed_on_the_same_ranks_it_continues_to_the_bit(case, 7),
            lambda case: saving.test_consolidated_it_resumes_on_any_number_of_ranks_with_the_mean_residual(case),
            lambda case: faults.test_survivors_go_on_over_a_smaller_group_from_memory(case, 4),
            lambda case: steps.test_a_layer_unfrozen_later_joins(case),
            lambda case: steps.test_strange_shapes_and_layouts(case),
            lambda case: saving.test_deepcopy_and_pickle_continue_alike(case),
        ],
        strict=True,
    )
)


@pytest.mark.filterwarnings("ignore:.* ranks are gone")
@pytest.mark.parametrize(("holds", "number"), in_turn(HOLDS, (0, 1)))
def test_conformance_holds(holds, number):
    """In float32, and around a base in int8."""
    HOLDS[holds](CASES[number])


def test_a_checkpoint_of_another_rank_begins_its_basis_anew():
    def make(rank: int) -> Ranks:
        def build(params, process_group):
            return compopt.SeparateAdam(params, **projecting("tracked", rank=rank), process_group=process_group)

        return Ranks(1, conformance.Small, build)

    saved, other = make(4), make(8)
    saved.train(conformance.loss, 3)
    other.optimizers[0].load_state_dict(saved.optimizers[0].state_dict())
    assert other.optimizers[0].param_groups[0]["rank"] == 4
    other.optimizers[0].param_groups[0]["rank"] = 8
    other.train(conformance.loss, 2)


def test_it_is_refused_where_it_makes_no_sense():
    p = nn.Parameter(torch.zeros(64, 64))
    for options in (dict(rank=0), dict(rank=1.5), dict(adaptive=True)):
        with pytest.raises(ValueError, match=next(iter(options))):
            compopt.SeparateAdam([p], projection="tracked", **options)
