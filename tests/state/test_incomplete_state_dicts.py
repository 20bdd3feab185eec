"""A state dict that lacks what other ranks have says so when it is made, once; and never asks them."""

from __future__ import annotations

import copy
import warnings

import fsdp_models
import pytest
from conformance import every, loss, make_ranks, some_average, through_a_file
from ranks import run_ranks
from sim import SimCommunicator
from test_separate_inside import around, separate

import compopt

LEVEL = "is incomplete"


def state_and_warnings(optimizer) -> tuple[dict, list[str]]:
    """A state dict, and the warnings that came with it, all of which must name this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = optimizer.state_dict()
    assert {w.filename for w in caught} <= {__file__}
    return saved, [str(w.message) for w in caught]


@every
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_is_missing(case):
    """Before the first step, alone, after consolidation; nor when that is loaded, on another rank."""
    ranks = make_ranks(case, 2)
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does, which prepares it
    ranks.optimizers[1].load_state_dict(ranks.optimizers[0].state_dict())
    ranks.train(loss, 7)
    ranks.world.consolidate(ranks.optimizers)
    ranks.optimizers[1].load_state_dict(through_a_file(ranks.optimizers[0].state_dict()))

    single = make_ranks(case, 1)
    single.train(loss, 7)
    single.optimizers[0].load_state_dict(single.optimizers[0].state_dict())


@every
def test_in_a_dense_start_only_shards_are_missing(case):
    ranks = make_ranks(case, 2)
    if "dense_steps" not in case.compressed or case.cls is compopt.LocalSteps:
        pytest.skip("has no dense start")
    ranks.train(loss, 1)
    saved, words = state_and_warnings(ranks.optimizers[0])
    assert len(words) == case.sharded
    assert all("of the moments (exp_avg" in one and "back" not in one for one in words)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.optimizers[1].load_state_dict(saved)
    assert len(caught) == case.sharded


@every
def test_what_is_missing_is_said_once_by_the_rank_that_saves(case):
    ranks = make_ranks(case, 3)
    ranks.train(loss, 7)
    optimizer = ranks.optimizers[1]
    if not optimizer.rank_local_state:
        assert state_and_warnings(optimizer)[1] == []
        return
    _, words = state_and_warnings(optimizer)
    assert len(words) == 1 and f"{type(optimizer).__name__} is incomplete: it " in words[0]
    assert "it lacks the residuals of the other 2 ranks (residual)" in words[0]
    assert ("holds rank 1's 33% of the moments (exp_avg" in words[0]) == case.sharded
    assert words[0].endswith("Call consolidate_state() on all ranks before rank 0 saves.")
    ranks.train(loss, 1)
    assert state_and_warnings(optimizer)[1] == [] and len(state_and_warnings(ranks.optimizers[0])[1]) == 1


@some_average("ScapeAdamS", "SeparateAdam", "TagcAdamW", "LocalSteps")
def test_a_state_dict_never_communicates(case, monkeypatch):
    """Whenever it is asked for: also with masks on their way, in a trial, after a consolidation."""
    ranks = make_ranks(case, 2)
    started = SimCommunicator.start

    def refused(comm, request):
        raise AssertionError(f"state_dict() started {type(request).__name__}")

    def save() -> None:
        monkeypatch.setattr(SimCommunicator, "start", refused)
        for optimizer in ranks.optimizers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
        monkeypatch.setattr(SimCommunicator, "start", started)

    save()
    for _ in range(8):
        ranks.train(loss, 1)
        save()
        ranks.world.consolidate(ranks.optimizers)
        save()
    ranks.assert_replicas_equal()


def warnings_inside(rank: int) -> dict[str, list[list[str]]]:
    """Of each class inside FSDP2, before the first step and after a compressed one."""
    results = {}
    for name, make_optimizer in (("TagcAdamW", compopt.TagcAdamW), ("SeparateAdam", separate), ("Separate", around)):
        model = fsdp_models.cut(fsdp_models.make())
        optimizer = make_optimizer(list(model.named_parameters()), dense_steps=0)
        before = state_and_warnings(optimizer)[1]
        fsdp_models.train(model, optimizer, range(2), rank)
        results[name] = [before, state_and_warnings(optimizer)[1]]
    return results


def test_inside_fsdp_only_residuals_are_missing():
    """FSDP's shards, of the moments too, are saved by torch; no optimizer of a rank's own steps there."""
    for results in run_ranks(warnings_inside, 2):
        for name, (before, after) in results.items():
            assert before == [], name
            assert len(after) == 1 and "lacks the residuals of the other rank (residual). Call" in after[0], name
