"""The promises of every optimizer here, over the table of classes: bad gradients, lost ranks, wrong options."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from conformance import assert_same, every, every_form_at, loss, make_ranks, snapshot
from pairs import name_of
from slow_rows import in_turn
from table import CASES, FORMS, by_name
from torch import nn

import compopt


# all kinds, at ten steps in a row: faults/test_gradients.py
@pytest.mark.parametrize(
    ("case", "bad_at"), in_turn(CASES + FORMS, ((float("inf"), 4), (float("nan"), 8))), ids=name_of
)
def test_a_bad_gradient_on_one_rank_makes_all_skip_and_changes_nothing(case, bad_at):
    bad, at = bad_at
    ranks = make_ranks(case, 3, **case.averaging)
    ranks.train(loss, at)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    ranks.models[1].up.weight.grad[5, 7] = bad
    ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
        assert optimizer.stats.phase == "skipped" and optimizer.stats.skipped == 1
        assert "non-finite" in optimizer.stats.reason

    untroubled = make_ranks(case, 3, **case.averaging)
    untroubled.train(loss, at)
    for both in (ranks, untroubled):  # the step after is the step that would have been
        both.train(loss, 3)
    assert_same(snapshot(untroubled.optimizers[0]), snapshot(ranks.optimizers[0]))


@every_form_at(1, 3, 5)
def test_a_collective_that_fails_changes_nothing(case, at):
    ranks = make_ranks(case, 2, **case.averaging)
    ranks.train(loss, at)
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    ranks.world.failing_everywhere.add(ranks.world.comms[0].started)
    with pytest.raises(compopt.CommunicationError, match=f"step {at + 1} was not applied"):
        ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))
    ranks.train(loss, 1)
    ranks.assert_replicas_equal()


@every
def test_bad_options_are_refused_by_name_and_value(case):
    p = nn.Parameter(torch.zeros(64, 64))
    for option, values in case.bad.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=option) as caught:
                case.new([p], **{option: value})
            assert repr(value) in str(caught.value)
    with pytest.raises(TypeError, match="complex"):
        case.new([nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))])
    optimizer = case.new([p])
    p.grad = torch.zeros(64, 64).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()


@every
def test_an_option_that_is_changed_to_something_bad_is_refused_by_name_and_nothing_is_lost(case):
    if case.cls is compopt.LocalSteps:
        pytest.skip("its options are in no group that users have")
    ranks, untroubled = (make_ranks(case, 2) for _ in range(2))
    for both in (ranks, untroubled):
        both.train(loss, 4)
    groups = [optimizer.option_groups[0] for optimizer in ranks.optimizers]
    wrong = {name: ["x", None] for name in ("lr", "eps", "weight_decay", "betas") if name in groups[0]}
    for option, values in {**case.bad, **wrong}.items():
        for value in values:
            if option in ("lr", "weight_decay") and not isinstance(value, str | None):
                continue  # torch's take less than 0, to which schedulers may round
            right = groups[0][option]
            ranks.backward(loss)
            before = [snapshot(optimizer) for optimizer in ranks.optimizers]
            for group in groups:
                group[option] = value
            with pytest.raises(ValueError, match=option):
                ranks.world.step(ranks.optimizers)
            for group in groups:
                group[option] = right
            for old, optimizer in zip(before, ranks.optimizers, strict=True):
                assert_same(old, snapshot(optimizer))
    for both in (ranks, untroubled):
        both.train(loss, 3)
    assert_same(snapshot(untroubled.optimizers[0]), snapshot(ranks.optimizers[0]))


def test_an_option_that_is_changed_to_something_bad_on_one_rank_is_told_to_the_others():
    ranks = make_ranks(by_name["RadiusAdamW"], 2)
    ranks.train(loss, 2)
    ranks.optimizers[1].param_groups[0]["lr"] = "x"
    ranks.backward(loss)
    with pytest.raises(compopt.CommunicationError, match=r"rank 1 \(ValueError: Invalid learning rate: 'x'"):
        ranks.world.step(ranks.optimizers)


def test_a_rate_that_a_scheduler_rounds_to_less_than_0_is_taken():
    p = nn.Parameter(torch.ones(4))
    optimizer = compopt.AdamS([p], lr=-0.0)
    optimizer.param_groups[0].update(lr=-1e-20, weight_decay=-1e-20)
    p.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == -1e-20


@every
def test_ranks_that_differ_are_told_which_and_how(case):
    ranks = make_ranks(case, 3)
    ranks.optimizers[2].param_groups[0]["lr"] = 0.25
    ranks.backward(loss)
    with pytest.raises(ValueError, match=r"group 0, lr: rank 0 has .* rank 2 has 0\.25"):
        ranks.world.step(ranks.optimizers)

    ranks = make_ranks(case, 3, **case.averaging)
    ranks.train(loss, 5)
    ranks.optimizers[1].param_groups[0]["weight_decay"] = 0.75  # later: seen in the payload's control words
    ranks.backward(loss)
    before = [snapshot(optimizer) for optimizer in ranks.optimizers]
    with pytest.raises(ValueError, match=r"group 0, weight_decay: rank 0 has .* rank 1 has 0\.75"):
        ranks.world.step(ranks.optimizers)
    for old, optimizer in zip(before, ranks.optimizers, strict=True):
        assert_same(old, snapshot(optimizer))


@every_form_at(2, 4, 6)
def test_survivors_go_on_over_a_smaller_group_from_memory(case, at):
    ranks = make_ranks(case, 3, **case.averaging)
    ranks.train(loss, at)
    ranks.backward(loss)
    ranks.world.failing_everywhere.update(range(ranks.world.comms[0].started, ranks.world.comms[0].started + 9))
    before = [p.detach().clone() for p in ranks.models[0].parameters()]
    with pytest.raises(compopt.CommunicationError):
        ranks.world.step(ranks.optimizers)
    assert_same(before, [p.detach() for p in ranks.models[0].parameters()])
    ranks.shrink([0, 2])
    ranks.train(loss, 5)
    ranks.assert_replicas_equal()
    assert ranks.optimizers[0].stats.applied_steps == at + 5


@every
def test_endless_skipping_is_an_error(case):
    ranks = make_ranks(case, 2)
    for optimizer in ranks.optimizers:
        optimizer.max_skipped = 3
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped"):
        ranks.train(lambda model, rank, step: loss(model, rank, step) * float("nan"), 4)


@every
def test_replicas_that_part_are_found(case):
    ranks = make_ranks(case, 3, **case.averaging)
    for optimizer in ranks.optimizers:
        optimizer.check_replicas_every = 4
    ranks.train(loss, 5)
    with torch.no_grad():
        ranks.models[2].up.bias[3] += 1e-6
    if case.sharded and not case.sends_updates:  # the owner's take the place of those that part
        with suppress(ValueError):
            ranks.train(loss, 4)
        ranks.assert_replicas_equal()
        return
    with pytest.raises(ValueError, match=r"checksum of its values: .* rank 2 has .* equal before.* p.grad"):
        ranks.train(loss, 4)
