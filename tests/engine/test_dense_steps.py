"""One rule for the start of a run: a number of steps."""

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

WARMED = [
    case
    for case in CASES
    if "dense_steps" in inspect.signature(case.cls).parameters and case.cls is not compopt.LocalSteps
]
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
def test_so_many_steps_are_dense(case):
    ramp = {"density_steps": 0} if "density_steps" in case.compressed else {}
    counted = phases(case, dense_steps=6, **ramp)
    assert 5 <= counted.count("dense") <= 7 and "dense" not in counted[7:]


@classes
def test_what_is_no_number_of_steps_is_refused(case):
    params = [nn.Parameter(torch.zeros(64, 64))]
    names = ["dense_steps", *(name for name in ("density_steps",) if name in case.compressed)]
    for name in names:
        for bad in (-1, 2.5, 0.15, "half", float("nan"), True):
            with pytest.raises(ValueError, match=f"{name} must be a number of steps >= 0, got"):
                case.make(params, **{name: bad})


def test_scapes_density_arrives_early_in_a_run():
    p = nn.Parameter(torch.zeros(64, 64))
    (bucket,) = compopt.ScapeAdamS([p], density=0.1)._buckets
    assert density_at(bucket, 0) == 1 and density_at(bucket, 101) == 0.1
    assert 0.1 < density_at(bucket, 50) < 0.5


def test_defaults_are_the_papers_or_none():
    p = nn.Parameter(torch.zeros(64, 64))
    for cls, steps in ((compopt.RadiusAdamW, 1000), (compopt.TagcAdamW, 0)):
        assert cls([p]).param_groups[0]["dense_steps"] == steps
