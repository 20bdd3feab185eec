"""One rule for the start of a run: a number of steps, or a share of a stated number of steps."""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance import Small, loss
from sim import Ranks
from table import CASES
from torch import nn

import compopt
from compopt._sparse.scape_masks import density_at

WARMED = [case for case in CASES if "total_steps" in inspect.signature(case.cls).parameters]
classes = pytest.mark.parametrize("case", WARMED, ids=lambda case: case.name)


def phases(case, steps: int = 12, **options) -> list[str]:
    ranks, results = (
        Ranks(1, Small, lambda ps, process_group: case.make(ps, process_group=process_group, **options)),
        [],
    )
    for _ in range(steps):
        ranks.train(loss, 1)
        results.append(ranks.optimizers[0].stats.phase)
    return results


def test_every_class_that_compresses_has_it():
    assert {case.cls.__name__ for case in WARMED} >= {
        "RadiusAdamW",
        "ScapeAdamS",
        "SeparateAdam",
        "TagcAdamW",
        "Separate",
    }


@classes
def test_a_share_is_as_many_steps(case):
    ramp = {"density_steps": 0} if "density_steps" in case.compressed else {}
    counted = phases(case, dense_steps=6, **ramp)
    assert phases(case, dense_steps=0.3, total_steps=20, **ramp) == counted
    assert 5 <= counted.count("dense") <= 7 and "dense" not in counted[7:]


@classes
def test_a_share_of_nothing_is_refused_in_a_sentence(case):
    params = [nn.Parameter(torch.zeros(64, 64))]
    with pytest.raises(ValueError, match=r"dense_steps=0\.15 is a share of total_steps.*pass total_steps="):
        case.make(params, dense_steps=0.15)
    for bad in (-1, 2.5, -0.1, "half", float("nan")):
        with pytest.raises(ValueError, match="dense_steps must be a number of steps >= 0, or a share"):
            case.make(params, dense_steps=bad, total_steps=100)
    for bad in (0, -5, 2.5, True):
        with pytest.raises(ValueError, match="total_steps must be None or an integer >= 1"):
            case.make(params, total_steps=bad)


@pytest.mark.parametrize("total, start, ramp", [(None, 0, 100), (1000, 150, 150)])
def test_scapes_density_arrives_early_in_a_run(total, start, ramp):
    p = nn.Parameter(torch.zeros(64, 64))
    (bucket,) = compopt.ScapeAdamS([p], density=0.1, total_steps=total)._buckets
    assert density_at(bucket, start) == 1 and density_at(bucket, start + ramp + 1) == 0.1
    assert 0.1 < density_at(bucket, start + ramp // 2) < 0.5


def test_density_falls_over_a_share_too():
    p = nn.Parameter(torch.zeros(64, 64))
    options = dict(density=0.1, dense_steps=10)
    (share,) = compopt.ScapeAdamS([p], density_steps=0.2, total_steps=100, **options)._buckets
    (steps,) = compopt.ScapeAdamS([p], density_steps=20, **options)._buckets
    assert [density_at(share, t) for t in range(50)] == [density_at(steps, t) for t in range(50)]
    with pytest.raises(ValueError, match=r"density_steps=0\.2 is a share"):
        compopt.ScapeAdamS([p], density_steps=0.2)


def test_a_run_of_known_length_starts_with_a_share_of_it():
    p = nn.Parameter(torch.zeros(64, 64))
    for cls, steps in ((compopt.RadiusAdamW, 1000), (compopt.TagcAdamW, 0)):
        assert cls([p]).param_groups[0]["dense_steps"] == steps
        assert cls([p], total_steps=400).param_groups[0]["dense_steps"] == 0.15
