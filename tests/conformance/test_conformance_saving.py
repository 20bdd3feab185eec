"""The promises of every optimizer here, over the table of classes: checkpoints and copies."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from conformance import (
    EVERY_FORM,
    Small,
    assert_same,
    every,
    every_form,
    every_form_at,
    loss,
    make_ranks,
    mean_residual,
    snapshot,
    through_a_file,
)
from slow_rows import slow_but
from table import CASES, INT8


@every_form_at(2, 4, 5, 7)
def test_resumed_on_the_same_ranks_it_continues_to_the_bit(case, at):
    whole = make_ranks(case, 2)
    whole.train(loss, at)
    saved = [
        (copy.deepcopy(model.state_dict()), through_a_file(optimizer.state_dict())) for _, model, optimizer in whole
    ]
    whole.train(loss, 6)

    resumed = make_ranks(case, 2)
    resumed.steps = at
    for (weights, state), (_, model, optimizer) in zip(saved, resumed, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    resumed.train(loss, 6)
    for a, b in zip(whole.optimizers, resumed.optimizers, strict=True):
        assert_same(snapshot(a), snapshot(b))


@pytest.mark.parametrize("case", slow_but(lambda case: case in CASES + INT8, EVERY_FORM), ids=lambda case: case.name)
def test_consolidated_it_resumes_on_any_number_of_ranks_with_the_mean_residual(case):
    ranks = make_ranks(case, 4, torch.float64, **case.averaging)
    if not ranks.optimizers[0].rank_local_state:
        pytest.skip("keeps no residual")
    ranks.train(loss, 7)
    if case.sharded:  # what is common to all ranks goes to the owner alone, until then
        ranks.world.consolidate(ranks.optimizers)
    wanted = mean_residual(ranks)
    assert wanted.any()
    for size in (2, 3):
        ranks.world.consolidate(ranks.optimizers)
        weights, state = ranks.models[0].state_dict(), through_a_file(ranks.optimizers[0].state_dict())
        ranks = make_ranks(case, size, torch.float64, **case.averaging)
        for _, model, optimizer in ranks:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        off = 1e-15 if case.keeps_exactly else float(wanted.abs().max()) / 60  # each mean is rounded to 127 levels
        torch.testing.assert_close(mean_residual(ranks), wanted, rtol=1e-12, atol=off)
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("case", [case for case in CASES if not case.build], ids=lambda case: case.name)
def test_loaded_or_saved_in_inference_mode_it_can_be_trained(case):
    """As in an evaluation, which saves; a new option lays out state anew."""
    ranks = make_ranks(case, 2)
    ranks.train(loss, 3)
    with torch.inference_mode():
        for optimizer in ranks.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ranks.train(loss, 3)
    for optimizer in ranks.optimizers:
        optimizer.param_groups[0].update(projection="tracked", rank=2, payload_dtype=None)
        with torch.inference_mode():
            optimizer.state_dict()
    ranks.train(loss, 3)
    ranks.assert_replicas_equal()


@every
def test_a_residual_of_another_rank_is_loaded_with_a_warning(case):
    ranks = make_ranks(case, 2)
    if not ranks.optimizers[0].rank_local_state:
        pytest.skip("keeps no residual")
    ranks.train(loss, 7)
    with pytest.warns(UserWarning, match="rank 0 of 2"):
        ranks.optimizers[1].load_state_dict(ranks.optimizers[0].state_dict())


@every_form
def test_deepcopy_and_pickle_continue_alike(case):
    torch.manual_seed(0)
    model = Small()
    simulated = {"simulate": True} if "simulate" in inspect.signature(case.cls).parameters else {}  # it compresses
    optimizer = case.make(model.parameters(), **simulated)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()
    for copied_model, copied in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert_same(snapshot(optimizer), snapshot(copied))
        copied.zero_grad()
        loss(copied_model, 0, 6).backward()
        copied.step()
    optimizer.zero_grad()
    loss(model, 0, 6).backward()
    optimizer.step()
    assert_same(snapshot(optimizer), snapshot(copied))
