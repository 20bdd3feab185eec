"""Defaults of each class; each paper's settings; options that are refused because they have no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conformance import Small, loss
from sim import Ranks
from torch import nn

import compopt

RESULTS = Path(__file__).parents[2] / "bench" / "RESULTS.md"


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(64, 80))]


def around(ps, **options):
    return compopt.Separate(torch.optim.AdamW(ps, lr=1e-3), **options)


both = pytest.mark.parametrize("make", [compopt.SeparateAdam, around], ids=["SeparateAdam", "Separate"])


@both
def test_nothing_said_is_what_is_recommended(make):
    (group,) = make(params())._option_groups
    message = {name: group[name] for name in ("projection", "rank", "payload_dtype")}
    assert message == {"projection": "tracked", "rank": 16, "payload_dtype": "int8"}
    assert 0 <= group["dense_steps"] <= 10


@both
def test_a_random_projection_is_the_papers(make):
    (group,) = make(params(), projection="gaussian")._option_groups
    assert (group["ratio"], group["payload_dtype"], group["dense_steps"]) == (16, None, 0)


@both
def test_what_was_said_stays(make):
    (group,) = make(params(), rank=4, payload_dtype=None, dense_steps=7)._option_groups
    assert (group["rank"], group["payload_dtype"], group["dense_steps"]) == (4, None, 7)


@both
def test_a_size_that_says_nothing_is_refused_in_a_sentence(make):
    with pytest.raises(ValueError, match=r"ratio=64 is for random projections.*projection='gaussian'"):
        make(params(), ratio=64)
    with pytest.raises(ValueError, match=r"ratio=16 is for random projections"):
        make(params(), ratio=16, projection="tracked", rank=4)
    with pytest.raises(ValueError, match=r"rank=4 is for tracked projections.*gaussian.*ratio="):
        make(params(), rank=4, projection="gaussian")


@both
def test_so_it_is_in_a_group(make):
    prefix = "compopt_" if make is around else ""  # in the groups of a base
    with pytest.raises(ValueError, match="ratio=8 is for random"):
        make([{"params": params(), f"{prefix}ratio": 8}])
    with pytest.raises(ValueError, match="rank=8 is for tracked"):
        make([{"params": params(), f"{prefix}rank": 8}], projection="gaussian")
    optimizer = make(params())
    with pytest.raises(ValueError, match="ratio=8 is for random"):
        optimizer.add_param_group({"params": params(), f"{prefix}ratio": 8})
    assert len(optimizer.param_groups) == 1
    make([{"params": params(), f"{prefix}rank": 8}])


def test_groups_of_another_optimizer_are_taken():
    compopt.SeparateAdam([{**compopt.SeparateAdam(params()).param_groups[0], "params": params()}])


def settings() -> list[str]:
    """The calls in the table of papers."""
    lines = RESULTS.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and "compopt." in line and "(params" in line]
    return [re.search(r"`(compopt\..*\))`", line).group(1).replace("\\|", "|") for line in rows]


def test_all_five_papers_are_in_the_table():
    names = {re.match(r"compopt\.(\w+)", call).group(1) for call in settings()}
    assert names == {"RadiusAdamW", "ScapeAdamS", "AdamS", "SeparateAdam", "TagcAdamW"} and len(settings()) >= 5


@pytest.mark.parametrize("call", settings())
def test_a_papers_settings_are_one_call(call):
    def make(ps, process_group):
        optimizer = eval(call, {"compopt": compopt, "torch": torch, "params": ps})
        optimizer._session.switch_group(optimizer, process_group)
        return optimizer

    ranks = Ranks(2, Small, make)
    ranks.train(loss, 3)
    ranks.assert_replicas_equal()
