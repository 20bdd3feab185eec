"""Local steps where ranks fail, come, go, differ or are frozen in part."""

from __future__ import annotations

import copy
import re
import signal
import warnings
from functools import partial

import pytest
import torch
from local_runs import adamw, are_equal, end_round, train
from problems import SHAPES, gradients, step, weights
from ranks import run_ranks
from sim import SimCommunicator, World, noting

import compopt
from compopt.local_steps.anchors import Anchors
from compopt.local_steps.fragment_sync import FragmentSync


def test_a_failed_exchange_leaves_the_inner_step_and_is_tried_again():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    alone = [[p.detach().clone() for p in own] for own in params]
    inner = [torch.optim.AdamW(own, lr=1e-2) for own in alone]
    for optimizer, other in zip(optimizers, inner, strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    for own, other, grads in zip(alone, inner, gradients(2, 3), strict=True):
        for p, g in zip(own, grads, strict=True):
            p.grad = g
        other.step()
    world.failing_everywhere.add(world.comms[0].started)
    with pytest.raises(compopt.CommunicationError, match="step 4 was taken on rank 0, but not the sync") as told:
        step(world, params, optimizers, gradients(2, 3))
    assert re.findall(r"step \d+", str(told.value)) == ["step 4"]
    for own, expected in zip(params, alone, strict=True):
        assert all(map(torch.equal, own, expected))
    step(world, params, optimizers, gradients(2, 4))
    assert all(map(torch.equal, *params)) and optimizers[0].stats.phase == "exchanged"


def test_a_failed_exchange_is_repeated_where_the_round_is_ended():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    world.failing_everywhere.add(world.comms[0].started)
    with pytest.raises(compopt.CommunicationError):
        step(world, params, optimizers, gradients(2, 3))
    end_round(optimizers)
    assert are_equal(params) and exchanges_of(optimizers[0]) == 1


def test_after_a_failed_exchange_anchors_are_compared_anew():
    params, optimizers = train(2, 7)
    world = optimizers[0].comm.world
    for optimizer in optimizers:
        optimizer.check_replicas_every = 0  # which would see it, too
    world.failing_everywhere.add(world.comms[0].started)
    with pytest.raises(compopt.CommunicationError):
        step(world, params, optimizers, gradients(2, 7))
    optimizers[1].state_dict()["state"][0]["outer"]["anchor"].add_(
        1
    )  # as an exchange would that rank 0 has not applied
    with pytest.raises(ValueError, match="checksum of its values: rank 0 has"):
        step(world, params, optimizers, gradients(2, 8))


def test_survivors_and_newcomers_go_on_from_the_anchors():
    params, optimizers = train(3, 6)
    before = [p.detach().clone() for p in params[0]]
    world = World(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = list(zip(optimizers[:2], world.comms, strict=True))
        world.run([partial(optimizer.rebind, comm) for optimizer, comm in pairs])
        assert all(map(torch.equal, params[0], before))  # what a rank has moved stays
        step(world, params[:2], optimizers[:2], gradients(2, 6))
        step(world, params[:2], optimizers[:2], gradients(2, 7))
        assert all(map(torch.equal, params[0], params[1])) and optimizers[0].stats.round == 2

        world = World(3)
        own = [torch.nn.Parameter(torch.zeros_like(w)) for w in weights()]
        new = compopt.LocalSteps(adamw(own), 4, growth_steps=0, payload_dtype=None, process_group=World(1).comms[0])
        ranks, theirs = [*optimizers[:2], new], [*params[:2], own]
        world.run([partial(optimizer.rebind, comm) for optimizer, comm in zip(ranks, world.comms, strict=True)])
    assert all(map(torch.equal, own, params[0]))
    for t in range(8, 12):
        step(world, theirs, ranks, gradients(3, t))
    assert all(map(torch.equal, own, params[0])) and new.stats.round == 3 == optimizers[0].stats.round


def test_a_rank_whose_parameters_are_not_finite_takes_the_others_average_and_says_so():
    params, optimizers = train(3, 3)
    world = optimizers[0].comm.world
    params[1][2].data[0, 0] = float("nan")
    optimizers[1].inner.state[params[1][2]]["exp_avg"][0, 0] = float("nan")
    before = optimizers[1].inner.state[params[1][0]]["exp_avg"].clone()
    with pytest.warns(UserWarning, match="rank 1 had parameters that are not finite"):
        step(world, params, optimizers, gradients(3, 3))
    assert all(p.isfinite().all() for p in params[0])
    assert all(map(torch.equal, params[0], params[1]))
    assert optimizers[1].inner.state[params[1][2]]["exp_avg"].isfinite().all()
    finite = torch.lerp(before, gradients(3, 3)[1][0], 0.1)
    torch.testing.assert_close(optimizers[1].inner.state[params[1][0]]["exp_avg"], finite)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(4, 12):
            step(world, params, optimizers, gradients(3, t))
    assert all(map(torch.equal, params[0], params[1])) and optimizers[1].stats.round == 3


def test_a_gradient_that_is_not_finite_makes_that_rank_skip_its_own_step_only():
    params, optimizers = train(2, 2)
    world = optimizers[0].comm.world
    grads = gradients(2, 2)
    grads[1][3][0, 0, 0] = float("inf")
    before = [[p.detach().clone() for p in own] for own in params]
    step(world, params, optimizers, grads)
    assert [optimizer.stats.phase for optimizer in optimizers] == ["local", "skipped"]
    assert all(map(torch.equal, params[1], before[1])) and not torch.equal(params[0][0], before[0][0])
    step(world, params, optimizers, gradients(2, 3))
    assert all(map(torch.equal, *params)) and optimizers[1].stats.round == 1 and optimizers[1].stats.skipped == 1


def test_ranks_that_differ_are_told_at_the_end_of_a_round():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    optimizers[1].param_groups[0]["lr"] = 0.25
    with pytest.raises(ValueError, match=r"base's group 0, lr: rank 0 has 0\.01, rank 1 has 0\.25"):
        step(world, params, optimizers, gradients(2, 3))


def test_ranks_that_took_unequal_numbers_of_steps_are_told_so():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    for group in optimizers[1].option_groups:
        group["step"] += 4
    optimizers[1]._counts.begun += 4
    message = r"Rank 0 has taken 4 steps, rank 1 has taken 8 \(group 0\): call step\(\) equally often"
    with pytest.raises(ValueError, match=message):
        step(world, params, optimizers, gradients(2, 3))


def test_ranks_that_end_a_round_after_unequal_numbers_of_steps_are_told_so():
    params, optimizers = train(2, 2, every=100)
    world = optimizers[0].comm.world
    for p, g in zip(params[1], gradients(2, 2)[1], strict=True):
        p.grad = g
    world.run([optimizers[1].step])
    with pytest.raises(ValueError, match=r"Rank 0 has taken 2 steps, rank 1 has taken 3 \(group 0\)"):
        end_round(optimizers)


def test_a_frozen_layer_is_not_sent_and_joins_when_it_is_trained():
    params, optimizers = train(2, 4)
    world = optimizers[0].comm.world
    for own in params:
        own[2].requires_grad_(False)
    sent = []
    for t in range(4, 20):
        if t == 12:
            sent.append(optimizers[0].stats.bytes_sent)
            for own in params:
                own[2].requires_grad_(True)
        grads = [[g if p.requires_grad else None for p, g in zip(own, given, strict=True)]
                 for own, given in zip(params, gradients(2, t), strict=True)]  # fmt: skip
        step(world, params, optimizers, grads)
    assert all(map(torch.equal, *params))
    assert sent[0] == optimizers[0].stats.bytes_sent - 8 * 8192


@pytest.mark.parametrize("options", [{}, {"delay": 2}, {"fragments": 2, "delay": 1}])
@pytest.mark.parametrize("at", [9, 10, 12, 15])
def test_what_a_layer_moved_before_it_was_frozen_is_averaged_too(at, options):
    """Frozen on all ranks within a round, or at its end; rounds are of 4 steps, and end at 20 and 24."""
    params, optimizers = train(2, at, **options)
    world = optimizers[0].comm.world
    for own in params:
        own[2].requires_grad_(False)
    for t in range(at, 24):
        grads = gradients(2, t)
        for given in grads:
            given[2] = None
        step(world, params, optimizers, grads)
    if options.get("delay"):
        world.run([optimizer.end_round for optimizer in optimizers])
    assert all(map(torch.equal, *params))
    if not options:
        (as_it_was, *_), _ = train(2, at - at % 4)
        assert torch.equal(params[0][2], as_it_was[2]) == (at % 4 == 0)
    state = optimizers[0].state_dict()["state"]
    sent = [bool(state[i]["outer"]["is_sent"]) for i in range(5)]
    assert sent == [True, True, False, True, True], "and is sent no more"


class Alarm(Exception):
    pass


def test_a_signal_in_a_ranks_own_step_is_handled_when_it_is_counted():
    params, optimizers = train(2, 4)
    inner, own = optimizers[1].inner, params[1]
    stepped = inner.step

    def interrupted():
        stepped()
        signal.raise_signal(signal.SIGALRM)

    def handler(number, frame):
        raise Alarm

    inner.step, before = interrupted, signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Alarm):
            step(optimizers[0].comm.world, params, optimizers, gradients(2, 4))
    finally:
        inner.step = stepped
        signal.signal(signal.SIGALRM, before)
    assert optimizers[1].option_groups[0]["step"] == inner.state[own[0]]["step"] == 5


def test_what_is_done_to_a_frozen_layer_stays():
    params, optimizers = train(2, 4)
    for own in params:
        own[2].requires_grad_(False)
        own[2].data.fill_(3.0)
    for t in range(4, 12):
        grads = gradients(2, t)
        for given in grads:
            given[2] = None
        step(optimizers[0].comm.world, params, optimizers, grads)
    assert optimizers[0].stats.round == 3 and all(bool((own[2] == 3).all()) for own in params)


def test_ranks_that_freeze_other_layers_are_told_when_they_exchange():
    params, optimizers = train(2, 4)
    params[0][2].requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad: rank 0 has False, rank 1 has True"):
        for t in range(4, 8):
            step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
    assert optimizers[0].option_groups[0]["step"] == 8, "the rank's own step was taken"


@pytest.mark.parametrize("begins_frozen", [False, True])
def test_ranks_that_freeze_other_layers_are_told_though_only_some_have_sent_their_payload(begins_frozen):
    """With a delay those that send the same tensors as before have; it never completes."""
    params, optimizers = train(2, 0, delay=2)
    world = optimizers[0].comm.world

    def freeze(is_frozen: bool, *ranks: int) -> None:
        for rank in ranks:
            params[rank][2].requires_grad_(not is_frozen)

    def take(steps: range) -> None:
        for t in steps:
            frozen = [not own[2].requires_grad for own in params]
            grads = gradients(2, t)
            for given, is_frozen in zip(grads, frozen, strict=True):
                given[2] = None if is_frozen else given[2]
            step(world, params, optimizers, grads)

    freeze(begins_frozen, 0, 1)
    take(range(7))
    freeze(not begins_frozen, 1)
    with pytest.raises(compopt.CommunicationError, match=r"requires_grad: rank 0 has .* and call rebind") as told:
        take(range(7, 16))
    if begins_frozen:  # rank 1 has another anchor, so they go on from a checkpoint
        return
    assert "step 14 was taken" in str(told.value)
    freeze(False, 0, 1)
    world = World(2)
    world.run([partial(o.rebind, comm) for o, comm in zip(optimizers, world.comms, strict=True)])
    take(range(16, 24))
    end_round(optimizers)
    assert are_equal(params)


def test_a_rank_that_ends_a_round_while_others_have_sent_their_payload_is_told_so():
    params, optimizers = train(2, 7, delay=2)
    world = optimizers[0].comm.world

    def train_on() -> None:
        for t in range(7, 11):
            for p, g in zip(params[0], gradients(2, t)[0], strict=True):
                p.grad = g
            optimizers[0].step()

    with pytest.raises(compopt.CommunicationError, match="Rank 0 has taken 10 steps, rank 1 has taken 7"):
        world.run([train_on, optimizers[1].end_round])


def test_after_a_sync_that_was_given_up_payloads_wait_until_ranks_agree():
    """Both ranks have frozen something, and so neither has sent its payload; what they would send differs."""
    params, optimizers = train(2, 5, delay=2)
    for rank, own in enumerate(params):
        own[2 + rank].requires_grad_(False)
    errors = []
    for t in range(5, 16):
        grads = gradients(2, t)
        for rank, given in enumerate(grads):
            given[2 + rank] = None
        world = optimizers[0].comm.world
        try:
            step(world, params, optimizers, grads)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) >= 2 and all("requires_grad: rank 0 has" in text for text in errors)
    for own in params:
        own[2].requires_grad_(True), own[3].requires_grad_(True)
    for t in range(16, 24):
        step(world, params, optimizers, gradients(2, t))
    end_round(optimizers)
    assert are_equal(params)


def test_a_group_added_within_a_round_is_exchanged():
    params, optimizers = train(2, 5)
    world = optimizers[0].comm.world
    for own, optimizer in zip(params, optimizers, strict=True):
        own.append(torch.nn.Parameter(torch.ones(64, 80, dtype=torch.float64)))
        optimizer.add_param_group({"params": [own[-1]], "lr": 0.1})
    for t in range(5, 8):
        step(world, params, optimizers, gradients(2, t, [*SHAPES, (64, 80)]))
    assert all(map(torch.equal, *params)) and not torch.equal(params[0][-1], torch.ones(64, 80, dtype=torch.float64))


def test_a_rank_whose_step_failed_gets_the_anchors_that_others_began_in_it():
    """A rebind would find the outer optimizers unlike each other."""
    params, optimizers = train(2, 5)
    world = optimizers[0].comm.world
    for own, optimizer in zip(params, optimizers, strict=True):
        own.append(torch.nn.Parameter(torch.ones(64, 80, dtype=torch.float64)))
        optimizer.add_param_group({"params": [own[-1]]})
    world.failing.add((1, world.comms[1].started))
    errors: list = []
    for own, given in zip(params, gradients(2, 6, [*SHAPES, (64, 80)]), strict=True):
        for p, g in zip(own, given, strict=True):
            p.grad = g
    world.run([noting(optimizer.step, errors, compopt.CommunicationError) for optimizer in optimizers])
    assert len(errors) == 1 and [len(o._anchors.groups) for o in optimizers] == [2, 1]
    rebind(optimizers, world := World(2))
    for t in range(7, 12):
        step(world, params, optimizers, gradients(2, t, [*SHAPES, (64, 80)]))
    end_round(optimizers)
    assert are_equal(params)


def test_gradients_that_something_else_averages_are_told_at_the_end_of_a_round():
    params, optimizers = train(2, 0)
    with pytest.raises(RuntimeError, match="bit-identical gradients"):
        for t in range(4):
            step(optimizers[0].comm.world, params, optimizers, [gradients(2, t)[0]] * 2)


def test_ranks_that_move_alike_by_gradients_that_differ_are_not():
    """AdamW's first step is as long for every gradient of one sign."""
    grads = [[torch.tensor(2.0)], [torch.tensor(3.0)]]
    params, optimizers = train(2, 0, torch.float32, every=1, shapes=[()])
    step(optimizers[0].comm.world, params, optimizers, grads)
    assert torch.equal(*(own[0] for own in params)) and optimizers[0].stats.round == 1


def exchanges_of(optimizer) -> int:
    """Return the number of exchanges of fragments."""
    entries = [entry["outer"] for entry in optimizer.state_dict()["state"].values()]
    return sum({int(e["fragment"]): int(e["optimizer"]["step"]) for e in entries}.values())


def test_a_delayed_exchange_that_failed_is_applied_before_the_next_begins():
    """Fragment 1 is exchanged after steps 2 and 6, fragment 0 after 4 and 8, each applied two steps later."""
    params, optimizers = train(2, 0, every=4, fragments=2, delay=2)
    world = optimizers[0].comm.world
    for t in range(12):
        if t + 1 == 2:  # the payload of the first, which begins now, behind the message in front
            world.beside.failing_everywhere.add(1)
        try:
            step(world, params, optimizers, gradients(2, t))
            assert t + 1 != 4
        except compopt.CommunicationError:
            assert t + 1 == 4
            world.beside.failing_everywhere.clear()
    assert exchanges_of(optimizers[0]) == exchanges_of(optimizers[1]) == 5
    end_round(optimizers)
    assert are_equal(params)


def rebind(optimizers, world) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip(optimizers, world.comms, strict=True)
        world.run([partial(optimizer.rebind, comm) for optimizer, comm in pairs])


def test_a_rank_that_lacks_an_exchange_takes_it_over_and_does_not_repeat_it():
    """Rank 1 did not hear the last word of an exchange that rank 0 has applied."""
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    world.failing.add((1, world.comms[1].started + 1))  # behind the message in front
    with pytest.raises(compopt.CommunicationError, match="rank 1, but not the sync"):
        step(world, params, optimizers, gradients(2, 3))
    assert [exchanges_of(optimizer) for optimizer in optimizers] == [1, 0]
    rebind(optimizers, World(2))
    assert [exchanges_of(optimizer) for optimizer in optimizers] == [1, 1] and are_equal(params)
    step(optimizers[0].comm.world, params, optimizers, gradients(2, 4))
    assert optimizers[0].stats.phase == optimizers[1].stats.phase == "local"


def test_a_layer_that_is_frozen_when_an_exchange_was_taken_over_has_moved_on_no_rank():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    world.failing.add((1, world.comms[1].started + 1))
    with pytest.raises(compopt.CommunicationError):
        step(world, params, optimizers, gradients(2, 3))
    rebind(optimizers, World(2))
    assert not any(t.has_moved for optimizer in optimizers for t in optimizer._anchors.tensors)
    for own in params:
        own[2].requires_grad_(False)
    for t in range(4, 8):
        grads = [[None if i == 2 else g for i, g in enumerate(given)] for given in gradients(2, t)]
        step(optimizers[0].comm.world, params, optimizers, grads)
    assert are_equal(params) and optimizers[0].stats.round == 2


def test_a_rank_that_lacks_an_exchange_of_the_second_fragment_takes_it_over():
    """The first exchange of a round, which the outer optimizer's first group has no part in."""
    params, optimizers = train(2, 1, fragments=2)
    world = optimizers[0].comm.world
    world.failing.add((1, world.comms[1].started + 1))
    with pytest.raises(compopt.CommunicationError, match="rank 1, but not the sync"):
        step(world, params, optimizers, gradients(2, 1))
    assert [exchanges_of(optimizer) for optimizer in optimizers] == [1, 0]
    rebind(optimizers, World(2))
    assert [exchanges_of(optimizer) for optimizer in optimizers] == [1, 1]
    for t in range(2, 6):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
    end_round(optimizers)
    assert are_equal(params)


@pytest.mark.parametrize("payload_dtype", [None, "int4"])
def test_a_rank_that_takes_an_exchange_over_keeps_moves_and_residuals_of_other_fragments(payload_dtype):
    """Fragment 1 is exchanged after steps 2 and 6, fragment 0 after 4 and 8. The rank has made the step that fails."""
    options = dict(every=4, fragments=2, payload_dtype=payload_dtype)
    expected, _ = train(2, 8, **options)
    params, optimizers = train(2, 5, **options)
    world = optimizers[0].comm.world
    world.failing.add((1, world.comms[1].started + 1))  # behind the message in front
    with pytest.raises(compopt.CommunicationError, match="rank 1, but not the sync"):
        step(world, params, optimizers, gradients(2, 5))
    rebind(optimizers, World(2))
    for t in (6, 7):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
    fragment_of = [int(entry["outer"]["fragment"]) for entry in optimizers[0].state_dict()["state"].values()]
    first = [i for i, n in enumerate(fragment_of) if n == 0]
    assert 0 < len(first) < len(fragment_of)
    for actual, undisturbed in zip(params, expected, strict=True):
        assert all(torch.equal(actual[i], undisturbed[i]) for i in first)


def test_ranks_an_exchange_apart_are_told_to_rebind():
    params, optimizers = train(2, 3, every=1)
    world = optimizers[0].comm.world
    world.failing.add((1, world.comms[1].started + 1))  # behind the message in front
    with pytest.raises(compopt.CommunicationError, match="step 4 was taken on rank 1"):
        step(world, params, optimizers, gradients(2, 3))
    with pytest.raises(compopt.CommunicationError, match=r"rank 1 lacks a sync .* call rebind\(\)"):
        step(world, params, optimizers, gradients(2, 4))


def test_a_rank_that_joins_in_the_first_round_begins_at_the_anchors():
    start = weights()
    params, optimizers = train(2, 2)
    new = [torch.nn.Parameter(torch.zeros_like(w)) for w in start]
    options = dict(every=4, growth_steps=0, payload_dtype=None)
    optimizers.append(compopt.LocalSteps(adamw(new), process_group=World(1).comms[0], **options))
    params.append(new)
    world = World(3)
    rebind(optimizers, world)
    assert all(map(torch.equal, new, start)), "no exchange has moved them yet"
    for t in range(2, 8):
        step(world, params, optimizers, gradients(3, t))
    assert are_equal(params) and optimizers[2].stats.round == 2


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("steps", [2, 9])
def test_a_rank_that_joins_may_do_so_again_where_its_first_rebind_failed(steps, at):
    """In the first round, and after two; from its first collective on."""
    params, optimizers = train(2, steps)
    anchors = [t.anchor.detach().clone() for t in optimizers[0]._anchors.tensors]
    new = [torch.nn.Parameter(torch.zeros_like(w)) for w in weights()]
    options = dict(every=4, growth_steps=0, payload_dtype=None)
    optimizers.append(compopt.LocalSteps(adamw(new), process_group=World(1).comms[0], **options))
    params.append(new)
    failing = World(3)
    failing.failing_everywhere.add(at)
    with pytest.raises(compopt.CommunicationError):
        rebind(optimizers, failing)
    world = World(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of a new rank is lost
        world.run([partial(o.rebind, comm) for o, comm in zip(optimizers, world.comms, strict=True)])
    assert all(map(torch.equal, new, anchors))
    for t in range(steps, 12):
        step(world, params, optimizers, gradients(3, t))
    assert are_equal(params) and optimizers[2].stats.round == 3


def test_a_rank_that_joins_may_do_so_again_where_its_group_could_not_be_made(monkeypatch):
    """With a delay every rank makes a process group for it before it takes anchors over."""
    _, optimizers = train(2, 9, delay=1)
    anchors = [t.anchor.detach().clone() for t in optimizers[0]._anchors.tensors]
    new = [torch.nn.Parameter(torch.zeros_like(w)) for w in weights()]
    options = dict(every=4, growth_steps=0, payload_dtype=None, delay=1)
    optimizers.append(compopt.LocalSteps(adamw(new), process_group=World(1).comms[0], **options))

    def fail(*args, **options):
        raise compopt.CommunicationError("no group")

    with monkeypatch.context() as patched, pytest.raises(compopt.CommunicationError, match="no group"):
        patched.setattr(FragmentSync, "connect", fail)
        rebind(optimizers, World(3))
    rebind(optimizers, World(3))
    assert all(map(torch.equal, new, anchors))


def test_a_signal_during_a_takeover_leaves_parameters_at_their_anchors(monkeypatch):
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    world.failing.add((1, world.comms[1].started + 1))  # as above: rank 0 has applied the exchange
    with pytest.raises(compopt.CommunicationError, match="rank 1, but not the sync"):
        step(world, params, optimizers, gradients(2, 3))

    become_anchors = Anchors._become_anchors
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        become_anchors(*args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Anchors, "_become_anchors", interrupted)
        world = World(2)
        calls = [partial(o.rebind, comm) for o, comm in zip(optimizers, world.comms, strict=True)]
        world.run([calls[1], calls[0]])  # the late rank is interrupted, not closed because the other was
    signal.signal(signal.SIGINT, before)
    assert exchanges_of(optimizers[1]) == 1, "it was taken over as a whole before the signal was handled"
    rebind(optimizers, World(2))
    assert [exchanges_of(optimizer) for optimizer in optimizers] == [1, 1] and are_equal(params)


def test_a_rank_that_is_left_alone_trains_as_its_inner_optimizer():
    (own, _), (optimizer, _) = train(2, 5)
    rebind([optimizer], World(1))
    alone = [torch.nn.Parameter(p.detach().clone()) for p in own]
    inner = adamw(alone)
    inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    for t in range(5, 13):
        (grads,) = gradients(1, t)
        for p, g in zip(alone, grads, strict=True):
            p.grad = g.clone()
        inner.step()
        step(optimizer.comm.world, [own], [optimizer], [grads])
    assert all(map(torch.equal, own, alone))


def test_what_was_due_among_ranks_that_are_gone_is_not_among_new_ones():
    """A rank is left alone with an exchange on its way. Another one goes on from its state dict, and joins."""
    options = dict(every=4, growth_steps=0, payload_dtype=None, delay=2)
    params, optimizers = train(2, 5, delay=2)
    params, optimizers = params[:1], optimizers[:1]
    rebind(optimizers, World(1))
    step(optimizers[0].comm.world, params, optimizers, gradients(1, 5))
    new = [torch.nn.Parameter(p.detach().clone()) for p in params[0]]
    optimizers.append(compopt.LocalSteps(adamw(new), process_group=World(1).comms[0], **options))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    params.append(new)
    world = World(2)
    rebind(optimizers, world)
    phases = []
    for t in range(6, 14):
        step(world, params, optimizers, gradients(2, t))
        phases.append(optimizers[0].stats.phase)
    end_round(optimizers)
    assert phases == ["local"] * 5 + ["exchanged"] + ["local"] * 2 and are_equal(params)


def test_a_round_begins_where_processes_that_trained_alone_meet():
    params, optimizers = [], []
    for _ in range(2):
        (own,), (optimizer,) = train(1, 0)
        optimizer.simulate = False
        params.append(own), optimizers.append(optimizer)
        for t in range(6):
            step(optimizer.comm.world, [own], [optimizer], gradients(1, t))
    world = World(2)
    rebind(optimizers, world)
    phases = []
    for t in range(6, 10):
        step(world, params, optimizers, gradients(2, t))
        phases.append(optimizers[0].stats.phase)
    assert phases == ["local"] * 3 + ["exchanged"] and are_equal(params)


def test_a_rank_that_joins_takes_part_where_an_exchange_that_failed_is_repeated():
    params, optimizers = train(2, 3)
    world = optimizers[0].comm.world
    world.failing_everywhere.add(world.comms[0].started)
    with pytest.raises(compopt.CommunicationError):
        step(world, params, optimizers, gradients(2, 3))
    new = [torch.nn.Parameter(torch.zeros_like(w)) for w in weights()]
    options = dict(every=4, growth_steps=0, payload_dtype=None)
    optimizers.append(compopt.LocalSteps(adamw(new), process_group=World(1).comms[0], **options))
    params.append(new)
    world = World(3)
    rebind(optimizers, world)
    step(world, params, optimizers, gradients(3, 4))
    assert are_equal(params) and optimizers[2].stats.phase == "exchanged"


def test_a_rank_that_joins_has_the_fragments_of_the_others():
    """A group that they added is one."""
    params, optimizers = train(2, 5, fragments=2)
    for rank, optimizer in zip(params, optimizers, strict=True):
        rank.append(torch.nn.Parameter(torch.ones(64, 80, dtype=torch.float64)))
        optimizer.add_param_group({"params": rank[5:]})
    world, shapes = optimizers[0].comm.world, [*SHAPES, (64, 80)]
    for t in range(5, 9):
        step(world, params, optimizers, gradients(2, t, shapes))
    new = [torch.nn.Parameter(torch.zeros_like(p)) for p in params[0]]
    inner = torch.optim.AdamW([{"params": new[:5]}, {"params": new[5:]}], lr=1e-2)
    options = dict(every=4, growth_steps=0, payload_dtype=None, fragments=2)
    optimizers.append(compopt.LocalSteps(inner, process_group=World(1).comms[0], **options))
    params.append(new)
    world = World(3)
    rebind(optimizers, world)
    for t in range(9, 13):
        step(world, params, optimizers, gradients(3, t, shapes))
    end_round(optimizers)
    assert are_equal(params)


def test_options_that_change_are_compared_where_ranks_exchange():
    params, optimizers = train(2, 5)
    world = optimizers[0].comm.world
    optimizers[1].option_groups[0]["outer_momentum"] = 0.25
    with pytest.raises(ValueError, match=r"group 0, outer_momentum: rank 0 has 0\.9, rank 1 has 0\.25"):
        for t in range(5, 8):
            step(world, params, optimizers, gradients(2, t))


def test_ranks_that_begin_with_other_weights_are_told_before_a_step_is_taken():
    params, optimizers = train(2, 0)
    params[1][2].data.add_(1)
    with pytest.raises(ValueError, match="checksum of its values"):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, 0))
    assert optimizers[0].option_groups[0]["step"] == 0


def test_all_ranks_but_one_are_lost():
    """The others count as zero, and one is left, whose step keeps its length."""
    params, optimizers = train(2, 7)
    params[1][2].data[0, 0] = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(optimizers[0].comm.world, params, optimizers, gradients(2, 7))
    assert optimizers[0].stats.step_length == pytest.approx(1)
    assert are_equal(params) and optimizers[0].stats.round == 2


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


@pytest.mark.parametrize("at", [8, 9, 10])
@pytest.mark.parametrize("change", ["unfrozen", "added"])
def test_what_is_trained_for_the_first_time_during_an_exchange_loses_nothing_of_it(at, change):
    """The exchange of 8 steps is applied at step 11: after all, parameters have moved by the mean of all gradients."""
    params, optimizers = train(2, 0, inner=lambda p: sgd(p[:-1]), every=8, delay=3, outer_lr=1.0, outer_momentum=0.0)
    world, before = optimizers[0].comm.world, params[0][0].detach().clone()
    moved = torch.zeros_like(before)
    for own, optimizer in zip(params, optimizers, strict=True):
        own[-1].requires_grad_(change == "added")
        if change == "unfrozen":
            optimizer.add_param_group({"params": [own[-1]]})
    for t in range(24):
        for own, optimizer in zip(params, optimizers, strict=True):
            if t == at and change == "added":
                optimizer.add_param_group({"params": [own[-1]]})
            own[-1].requires_grad_(t >= at or change == "added")
        grads = gradients(2, t)
        for local in grads if t < at else ():
            local[-1] = None
        moved += sum(local[0] for local in grads) / 2
        step(world, params, optimizers, grads)
    end_round(optimizers)
    torch.testing.assert_close(params[0][0].detach(), before - moved, rtol=0, atol=1e-9)
    assert are_equal(params)


def test_an_exchange_that_fails_after_new_parameters_got_anchors_is_tried_again():
    params, optimizers = train(2, 0, inner=sgd, every=8, delay=3, outer_lr=1.0, outer_momentum=0.0)
    world, before, moved = optimizers[0].comm.world, params[0][0].detach().clone(), 0.0
    for own in params:
        own[-1].requires_grad_(False)
    for t in range(20):
        for own in params if t == 9 else ():
            own[-1].requires_grad_(True)
        grads = gradients(2, t)
        if t == 7:  # the payload of the exchange that this step begins
            world.beside.failing_everywhere.add(1)
        moved += sum(local[0] for local in grads) / 2
        if t == 10:
            with pytest.raises(compopt.CommunicationError, match="step 11 was taken on rank 0, but not the sync"):
                step(world, params, optimizers, grads)
            world.beside.failing_everywhere.clear()
            continue
        step(world, params, optimizers, grads)
    end_round(optimizers)
    assert are_equal(params)
    torch.testing.assert_close(params[0][0].detach(), before - moved, rtol=0, atol=1e-9)


def test_a_frozen_layer_with_gradients_left_is_not_stepped():
    params, optimizers = train(2, 4)
    frozen = params[0][0].detach().clone()
    for own in params:
        own[0].requires_grad_(False)
    for t in range(4, 10):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))  # also of the frozen layer
    assert all(own[0].grad is not None for own in params)
    end_round(optimizers)
    assert torch.equal(params[0][0], frozen) and are_equal(params)


def test_consolidation_within_a_round_weighs_ranks_as_the_round_does():
    params, optimizers = train(2, 0, inner=sgd, weighted=True, outer_lr=1.0, outer_momentum=0.0)
    world, before = optimizers[0].comm.world, params[0][0].detach().clone()
    for t in range(4):
        for rank, own in enumerate(params):
            for p in own:
                p.grad = torch.full_like(p, float(rank))
        world.step(optimizers, (3.0, 1.0))
        if t == 2:
            kept = [[p.detach().clone() for p in own] for own in params]
            world.failing_everywhere.add(world.comms[0].started + 1)  # after the weights
            with pytest.raises(compopt.CommunicationError):
                world.consolidate(optimizers)
            world.failing_everywhere.clear()
            assert all(
                torch.equal(p, q) for own, old in zip(params, kept, strict=True) for p, q in zip(own, old, strict=True)
            )
            world.consolidate(optimizers)
    torch.testing.assert_close(params[0][0].detach(), before - 4 / 4, rtol=0, atol=1e-12)


def test_a_round_that_is_ended_in_inference_mode_leaves_memory_that_can_be_trained():
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = compopt.LocalSteps(adamw([parameter]), 4, growth_steps=0, simulate=True)
    for t in range(12):
        parameter.grad = torch.full_like(parameter, t - 5.0)
        optimizer.step()
        if t == 1:
            with torch.inference_mode():
                optimizer.end_round()
                optimizer.consolidate_state()


@pytest.mark.parametrize(("at", "steps"), [(8, 0), (6, 2)])
def test_the_warning_of_an_open_round_counts_from_the_round_of_a_checkpoint(at, steps):
    """Rounds end at steps 4 and 8."""
    params, optimizers = train(2, at)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    for t in range(at, 11):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t))
    assert optimizers[0]._open_round._steps == 3
    for optimizer, state in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    assert optimizers[0]._open_round._steps == steps
    step(optimizers[0].comm.world, params, optimizers, gradients(2, at))
    assert optimizers[0]._open_round._steps == steps + 1


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("where", ["write_pseudo_gradient", "make_sync_payload", "_make_announcement"])
def test_a_rank_that_cannot_begin_an_exchange_tells_the_others(monkeypatch, where, delay):
    """All raise once, in the same exchange, and nobody is a step ahead: the next step repeats it."""
    params, optimizers = train(3, 6, every=4, delay=delay)
    world = optimizers[0].comm.world
    sync = optimizers[1]._sync
    place = sync if where == "_make_announcement" else sync.anchors.buckets[0]
    real, calls = getattr(place, where), []

    def fail(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("no room")
        return real(*args)

    monkeypatch.setattr(place, where, fail)
    errors = []
    for t in range(6, 16):
        try:
            step(world, params, optimizers, gradients(3, t))
        except (MemoryError, compopt.CommunicationError) as error:
            errors.append((t, str(error)))
    assert [t for t, _ in errors] == [7 + delay] and "no room" in errors[0][1]
    assert {optimizer.stats.round for optimizer in optimizers} == {4}
    end_round(optimizers)
    assert are_equal(params)


def load_alone(rank: int, delay: int, at: int) -> str:
    """Rank 1 alone loads a state dict within a round of 4 steps; the error of this rank."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(model.parameters()), 4, growth_steps=0, delay=delay)
    for t in range(22):
        if t == at and rank == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        torch.manual_seed(100 * rank + t)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        try:
            optimizer.step()
        except compopt.CommunicationError as error:
            return str(error)
    return "none"


@pytest.mark.parametrize(("delay", "at"), [(0, 6), (2, 10), pytest.param(2, 14, marks=pytest.mark.slow)])
def test_a_state_dict_that_one_rank_loads_alone_within_a_round_raises_on_all(delay, at):
    """Gloo would pair its handshake with the others' exchange, and abort the process. With a delay the handshake is
    over the group of exchanges, or ranks would wait in two groups; also while payloads are on their way.
    """
    for text in run_ranks(load_alone, 2, delay, at):
        assert "rank 1 compares its optimizer" in text and "Do so on all ranks" in text, text
        assert "call rebind()" in text or "was not applied" in text


def test_a_copy_within_a_delayed_sync_may_be_made_by_one_rank_alone(monkeypatch):
    """To look at it, or to save it. It makes no process group, and dies without a warning."""
    options = {"delay": 2}
    params, optimizers = train(2, 5, torch.float32, **options)
    expected, _ = train(2, 9, torch.float32, **options)
    assert optimizers[0]._sync.running is not None
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(SimCommunicator, "with_own_group", None)
        copied = copy.deepcopy(optimizers[0])
        copied._sync.running.poll()
        assert copied._sync.running.error is None
        del copied
    for t in range(5, 9):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t, dtype=torch.float32))
    for rank, other in zip(params, expected, strict=True):
        assert all(map(torch.equal, rank, other))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_checkpoint_that_is_loaded_in_inference_mode_leaves_memory_that_can_be_trained(delay):
    params, optimizers = train(2, 5, torch.float32, delay=delay, average_anchors=0.2)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for t in range(5, 9):
        step(optimizers[0].comm.world, params, optimizers, gradients(2, t, dtype=torch.float32))
    assert optimizers[0].stats.round == 2


def test_a_round_may_end_right_after_a_rebind_in_which_a_rank_took_over_a_sync():
    """Rank 0 has moved since, and rank 1 has not; both have to exchange."""
    params, optimizers = train(2, 3)
    world, grads = optimizers[0].comm.world, gradients(2, 3)
    world.failing.add((1, world.comms[1].started + 1))
    for own, given in zip(params, grads, strict=True):
        for p, g in zip(own, given, strict=True):
            p.grad = g
    errors = []
    world.run([noting(optimizer.step, errors, compopt.CommunicationError) for optimizer in optimizers])
    optimizers[0].step()
    assert len(errors) == 1 and [o.round_is_open for o in optimizers] == [True, True]
    world = World(2)
    with pytest.warns(UserWarning, match="rank 1 had not applied sync 1"):
        world.run([partial(o.rebind, comm) for o, comm in zip(optimizers, world.comms, strict=True)])
    assert [o.round_is_open for o in optimizers] == [True, True] and not are_equal(params)
    end_round(optimizers)
    assert are_equal(params) and not optimizers[1].round_is_open
