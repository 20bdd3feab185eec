"""After a loss, on simulated ranks: a step that only some had applied, masks that only some received, what is owed."""

from __future__ import annotations

import contextlib
import copy
from functools import partial

import pytest
import torch
from conformance import AVERAGING, assert_same, every, every_average, loss, make_ranks, snapshot
from pairs import name_of
from sim import Ranks, World
from slow_rows import in_turn
from table import by_name

import compopt

pytestmark = pytest.mark.filterwarnings("ignore:.* ranks are gone")


def fail_the_step(ranks: Ranks, on: list[int], first: int = 0) -> None:
    """A step whose collectives, from the first of these on, fail on some ranks after the others have their answers."""
    ranks.backward(loss)
    start = ranks.world.comms[0].started + first
    ranks.world.failing.update((rank, number) for rank in on for number in range(start, start + 9))
    with pytest.raises(compopt.CommunicationError, match=rf"step \d+ was (not applied|taken) on rank {on[0]}"):
        ranks.world.step(ranks.optimizers)
    ranks.steps += 1


def settled(ranks: Ranks) -> None:
    for optimizer in ranks.optimizers:
        optimizer.state_dict()  # waits for masks, which the failures to come are not to meet


@pytest.mark.parametrize(("case", "at"), in_turn(AVERAGING, (2, 4, 6)), ids=name_of)
def test_ranks_behind_take_the_step_over(case, at):
    """Rank 3 dies; the step is complete on ranks 0 and 2, not on rank 1."""
    ranks = make_ranks(case, 4)
    ranks.train(loss, at)
    settled(ranks)
    before = snapshot(ranks.optimizers[1])
    alike = make_ranks(case, 4)
    alike.train(loss, at)
    settled(alike)
    started = alike.world.comms[0].started
    alike.train(loss, 1)
    first = 0
    if ranks.optimizers[0].sharded:  # the last message that the step waits for brings the parameters
        first = alike.world.comms[0].started - started - len(alike.optimizers[0]._engine.post_commit.exchanges) - 1
    fail_the_step(ranks, on=[1, 3], first=first)
    assert_same(before, snapshot(ranks.optimizers[1]))
    ahead = [p.detach().clone() for p in ranks.models[0].parameters()]
    with pytest.warns(UserWarning, match=rf"rank 1 had not applied step {at + 1}, and took it over from rank 0"):
        ranks.shrink([0, 1, 2])
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        assert_same(ahead, [p.detach() for p in model.parameters()])
        assert optimizer.option_groups[0]["step"] == at + 1
    a, b = (optimizer.state_dict()["state"] for optimizer in ranks.optimizers[:2])
    for key, name in ((key, name) for key in a for name in ("exp_avg", "exp_avg_sq") if name in a[key]):
        assert ranks.optimizers[0].sharded or torch.equal(a[key][name], b[key][name])
    assert ranks.optimizers[1].stats.residual_norm() == 0
    ranks.train(loss, 6)
    ranks.assert_replicas_equal()


def miss_a_step(ranks: Ranks, rank: int) -> None:
    """A step that all ranks but this one apply."""
    late = copy.deepcopy((ranks.models[rank], ranks.optimizers[rank]))
    ranks.train(loss, 1)
    ranks.models[rank], ranks.optimizers[rank] = late


@every_average
def test_a_rank_that_dies_while_others_take_its_step_over_leaves_them_as_they_were(case):
    """Rank 0 alone has applied the step, and rank 3 is gone. Ranks 1 and 2 have then to go on by themselves."""
    ranks = make_ranks(case, 4)
    ranks.train(loss, 4)
    settled(ranks)
    late = copy.deepcopy((ranks.models[1:3], ranks.optimizers[1:3]))
    ranks.train(loss, 1)
    ranks.models[1:3], ranks.optimizers[1:3] = late
    before = [snapshot(optimizer) for optimizer in late[1]]
    world = World(3)
    world.failing_everywhere.add(4)  # behind their step counts: the third tensor
    with pytest.raises(compopt.CommunicationError):
        pairs = zip(ranks.optimizers[:3], world.comms, strict=True)
        world.run([partial(optimizer.rebind, comm) for optimizer, comm in pairs])
    parameters = len([*ranks.models[1].parameters()])
    for optimizer, old in zip(late[1], before, strict=True):
        assert_same(old[:parameters], [p.detach() for group in optimizer.param_groups for p in group["params"]])
    with pytest.warns(UserWarning) if case.cls.rank_local_state else contextlib.nullcontext() as caught:
        ranks.shrink([1, 2])
    assert caught is None or "2 of 4 ranks are gone" in str(caught[0].message), "also of a rebind that failed"
    for optimizer, old in zip(late[1], before, strict=True):
        now = snapshot(optimizer)
        assert_same(old[:parameters], now[:parameters])
        assert_same(old[-1:], now[-1:])
    ranks.steps -= 1
    ranks.train(loss, 3)
    ranks.assert_replicas_equal()


@pytest.mark.filterwarnings("ignore:rank 1 had not applied step")
def test_ranks_behind_take_over_the_ratios_that_the_missed_step_has_adapted():
    options = dict(projection="gaussian", ratio=4, adaptive=True, adapt_interval=4, dense_steps=0)
    ranks = make_ranks(by_name["SeparateAdam"], 3, **options)
    ranks.train(loss, 3)
    miss_a_step(ranks, 1)
    ranks.shrink([0, 1, 2])
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()


@pytest.mark.filterwarnings("ignore:rank 1 had not applied step")
def test_ranks_behind_take_over_the_result_of_a_trial():
    ranks = make_ranks(by_name["RadiusAdamW"], 3, dense_steps=0)
    ranks.train(loss, 3)
    miss_a_step(ranks, 1)
    for rank in (0, 2):  # as the end of a trial sets them
        ranks.optimizers[rank].param_groups[0].update(pays=True, dense_until=9)
    ranks.shrink([0, 1, 2])
    ranks.train(loss, 2)
    ranks.assert_replicas_equal()
    group = ranks.optimizers[1].param_groups[0]
    assert (group["pays"], group["dense_until"]) == (True, 9)


@every_average
def test_ranks_that_are_further_apart_are_refused(case):
    ranks = make_ranks(case, 2)
    ranks.train(loss, 3)
    for optimizer, steps in zip(ranks.optimizers, (3, 7), strict=True):
        for group in optimizer.option_groups:
            group["step"] = steps
    with pytest.raises(ValueError, match=r"ranks have taken \[3, 7\] steps"):
        ranks.shrink([0, 1])


@every
def test_masks_that_reached_some_ranks_only_never_meet_payloads_of_another_length(case):
    """Rank 1 misses what was sent behind the commit. Until all have asked each other, no payload leaves it."""
    ranks = make_ranks(case, 3)
    ranks.train(loss, 5)
    ranks.backward(loss)
    tails = [exchange.in_flight for exchange in ranks.optimizers[1]._engine.post_commit.exchanges]
    if not tails or ranks.optimizers[1]._engine.post_commit.unconfirmed:
        pytest.skip("sends nothing behind the commit, or asks before it relies on it")
    ranks.world.failing.update((1, pending.number) for pending in tails)
    before = snapshot(ranks.optimizers[0])[: len(list(ranks.models[0].parameters()))]
    with pytest.raises(
        AssertionError, match=r"different collectives.*AllGather.*(AllReduceMean|ReduceScatterMean)"
    ):  # gloo: a timeout
        ranks.world.step(ranks.optimizers)
    assert_same(before, [p.detach() for p in ranks.models[0].parameters()])
    ranks.shrink([0, 1])
    ranks.train(loss, 5)
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("on", [[0], [2], [1, 2]])
def test_a_mask_of_radius_lost_on_one_rank_is_chosen_anew_by_all(on):
    """Without an error: one word of every rank in the step after the mask was sent."""
    ranks = make_ranks(by_name["RadiusAdamW"], 3, interval=4)
    phases = []
    for _ in range(11):
        ranks.backward(loss)
        tails = [exchange.in_flight for exchange in ranks.optimizers[0]._engine.post_commit.exchanges]
        if ranks.steps == 4:
            assert len(tails) > 0
            ranks.world.failing.update((rank, pending.number) for rank in on for pending in tails)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1
        phases.append(ranks.optimizers[0].stats.phase)
        assert len({optimizer.stats.phase for optimizer in ranks.optimizers}) == 1
    assert phases[3:] == ["resample", "resample", "sparse", "sparse", "resample", "sparse", "sparse", "sparse"]
    ranks.assert_replicas_equal()


@every
def test_ranks_that_meet_again_after_some_lost_their_masks_choose_them_anew(case):
    """After the timeouts that a lost mask may end in, every rank begins with a handshake: it tells."""
    ranks = make_ranks(case, 3)
    ranks.train(loss, 5)
    tails = [exchange.in_flight for exchange in ranks.optimizers[1]._engine.post_commit.exchanges]
    if not tails:
        pytest.skip("sends nothing behind the commit")
    ranks.world.failing.update((1, pending.number) for pending in tails)
    for optimizer in ranks.optimizers:
        optimizer._engine.peers_verified = False
    ranks.train(loss, 1)
    assert {optimizer.stats.phase for optimizer in ranks.optimizers} <= {"dense", "resample"}
    ranks.train(loss, 4)
    ranks.assert_replicas_equal()


@every
def test_what_survivors_owe_stays_and_what_is_gone_is_told(case):
    ranks = make_ranks(case, 3, torch.float64)
    ranks.train(loss, 7)
    settled(ranks)
    fail_the_step(ranks, on=[0, 1, 2])
    residuals = [optimizer.stats.residual_norm() for optimizer in ranks.optimizers]
    kept = [snapshot(ranks.optimizers[rank]) for rank in (0, 2)]
    if case.cls.rank_local_state:
        with pytest.warns(UserWarning, match=rf"1 of 3 ranks are gone.*norm {residuals[0]:.3g}"):
            ranks.shrink([0, 2])
    else:
        ranks.shrink([0, 2])
    for old, optimizer, norm in zip(kept, ranks.optimizers, (residuals[0], residuals[2]), strict=True):
        assert optimizer.stats.residual_norm() == norm
        now = snapshot(optimizer)
        parameters = len(optimizer.param_groups[0]["params"])
        assert_same(old[:parameters], now[:parameters])


@every
def test_ranks_may_also_join_an_equal_group_anew(case):
    """The group was made again with the same ranks: nobody is told of a loss, and the run goes on."""
    ranks = make_ranks(case, 2)
    ranks.train(loss, 6)
    ranks.shrink([0, 1])
    ranks.train(loss, 4)
    ranks.finish_round(loss)
    ranks.assert_replicas_equal()
    assert ranks.optimizers[0].stats.applied_steps == ranks.steps >= 10


@every_average
def test_ranks_clip_alike_although_only_some_owe_for_a_tensor_without_a_gradient(case):
    """The rank that joins owes nothing. What the other owes is neither applied nor counted, on both."""
    ranks = make_ranks(case, 2, max_grad_norm=0.1)
    ranks.train(loss, 6)
    first = ranks.optimizers[0]
    if first.sharded:
        pytest.skip("nobody joins shards")
    ranks.models[1] = copy.deepcopy(ranks.models[0])
    new = case.make(ranks.models[1].parameters(), process_group=World(1).comms[0], max_grad_norm=0.1)
    new.load_state_dict(first.state_for_joiner())
    ranks.optimizers[1] = new
    ranks.shrink([0, 1])
    ranks.backward(loss)
    for model in ranks.models:
        model.up.weight.grad = None
    ranks.world.step(ranks.optimizers)
    assert first.stats.grad_norm == new.stats.grad_norm
    ranks.assert_replicas_equal()
