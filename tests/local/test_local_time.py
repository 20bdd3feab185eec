"""Rounds that end by time, and ranks that are weighted by their steps or samples, simulated and real ones."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from functools import partial

import pytest
import torch
from greenlet import getcurrent, greenlet
from local_runs import adamw, are_equal, end_round
from oracles import local as oracle
from problems import gradients, replicas, weights
from ranks import run_ranks
from sim import World

import compopt
from compopt._engine.module_hooks import end_open_rounds

COUNTS = [[3, 2, 4], [1, 1, 4], [2, 3, 1], [5, 1, 1]]  # steps of three ranks in four rounds


class Clock:
    """Seconds that pass when a test says so, on each simulated rank by itself while ranks run."""

    def __init__(self, monkeypatch):
        self.common, self.own = 100.0, {}
        monkeypatch.setattr("compopt.local_steps.rounds.monotonic", lambda: self.now)

    @property
    def now(self) -> float:
        for rank in [rank for rank in self.own if rank.dead]:
            self.common = max(self.common, self.own.pop(rank))
        return self.own.get(getcurrent(), self.common)

    @now.setter
    def now(self, seconds: float) -> None:
        if getcurrent().parent is not None:
            self.own[getcurrent()] = seconds
        else:
            self.common = seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def make_ranks(ranks: int, dtype=torch.float64, **options):
    options = {"round_seconds": 10, "growth_steps": 0, "payload_dtype": None, **options}

    def make(params, process_group):
        return compopt.LocalSteps(adamw(params), process_group=process_group, **options)

    return replicas(ranks, weights(dtype=dtype), make)


def gradient(rank: int, t: int, dtype=torch.float64) -> list[torch.Tensor]:
    """Of a rank's step t."""
    return gradients(rank + 1, t, dtype=dtype)[rank]


def give(params, optimizer, rank: int) -> None:
    """The gradients of a rank's coming step."""
    t = optimizer.option_groups[0]["step"]
    for p, g in zip(params[rank], gradient(rank, t, params[rank][0].dtype), strict=True):
        p.grad = g


def take_steps(clock, params, optimizer, rank: int, steps: int, samples=None, is_round=True):
    """Take a rank's steps; time is over before the last of a round. Ranks have clocks of their own."""
    for n in range(steps):
        give(params, optimizer, rank)
        clock.now += 11 * (is_round and n == steps - 1)
        optimizer.step(samples=samples)
        assert optimizer.stats.phase in ("exchanged" if is_round and n == steps - 1 else "local", "skipped", "dense")


def take_alone(clock, world, params, optimizers, rank: int, steps: int) -> None:
    """Steps of one rank, within a round, when ranks know each other."""
    world.run([partial(take_steps, clock, params, optimizers[rank], rank, steps, is_round=False)])


def take_round(clock, world, params, optimizers, counts, samples=None) -> None:
    """A round in which ranks take so many steps."""
    samples = samples or [None] * len(counts)
    turns = [
        partial(take_steps, clock, params, optimizer, rank, *pair)
        for (rank, optimizer), pair in zip(enumerate(optimizers), zip(counts, samples, strict=True), strict=True)
    ]
    world.run(turns)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_weighted_by_their_steps(clock, ranks):
    counts = [row[:ranks] for row in COUNTS]
    world, params, optimizers = make_ranks(ranks)
    for row in counts:
        take_round(clock, world, params, optimizers, row)
        assert [o.stats.round_steps for o in optimizers] == row
        assert [o.stats.weight for o in optimizers] == pytest.approx([n / sum(row) for n in row])
        assert all(o.stats.phase == "exchanged" and o.stats.steps_into_round == 0 for o in optimizers)
    wanted = oracle.train_rounds(weights(), counts, gradient, adamw)
    assert are_equal(params) and [o.stats.round for o in optimizers] == [4] * ranks
    for p, q in zip(params[0], wanted, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_ranks_are_weighted_by_their_samples(clock):
    world, params, optimizers = make_ranks(2)
    samples = [[8, 4.5], [3, 2], [0, 7], [0, 0]]  # in every step of a round
    counts = [row[:2] for row in COUNTS]
    for row, given in zip(counts, samples, strict=True):
        take_round(clock, world, params, optimizers, row, given)
    weighed = [[n * s for n, s in zip(*pair, strict=True)] for pair in zip(counts, samples, strict=True)]
    weighed[-1] = [1, 1]  # where nobody has any weight
    wanted = oracle.train_rounds(weights(), counts, gradient, adamw, weighed)
    for p, q in zip(params[1], wanted, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("payload", ["bfloat16", "int8", "int4", "int2"])
def test_a_weighted_mean_loses_nothing_in_any_codec(clock, payload):
    """Anchors have moved by all weighted means, but for the mean of the residuals."""
    world, params, optimizers = make_ranks(3, torch.float32, payload_dtype=payload, outer_lr=1, outer_momentum=0)
    total = [torch.zeros_like(w) for w in weights()]
    ends: dict[int, list[torch.Tensor]] = {}  # where a rank's last step has led
    for rank, (own, optimizer) in enumerate(zip(params, optimizers, strict=True)):
        optimizer.inner.register_step_post_hook(
            lambda *_, rank=rank, own=own: ends.update({rank: [p.detach().double() for p in own]})
        )
    for row in COUNTS:
        before = [p.detach().double() for p in params[0]]
        take_round(clock, world, params, optimizers, row)
        for rank in range(3):
            for sum_, a, p in zip(total, before, ends[rank], strict=True):
                sum_ += row[rank] / sum(row) * (a - p)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    saved = [[state[i]["outer"] for i in range(len(state))] for state in states]
    anchors = [entry["anchor"] for entry in saved[0]]
    residuals = [
        torch.stack([entry["optimizer"]["residual"].double() for entry in entries]).mean(0)
        for entries in zip(*saved, strict=True)
    ]
    for start, anchor, moved, residual in zip(weights(dtype=torch.float32), anchors, total, residuals, strict=True):
        tolerance = 5e-4 if payload == "bfloat16" else 1e-5  # sums of bfloat16 are rounded by whoever adds them
        torch.testing.assert_close(start.double() - anchor.double() + residual, moved, rtol=0, atol=tolerance)


@pytest.mark.parametrize("payload", [None, "int4"])
def test_equal_weights_are_no_weights_to_the_bit(clock, payload):
    runs, every = [], dict(round_seconds=None, every=3)
    for options in (dict(round_seconds=10), every, dict(weighted=True, **every)):
        world, params, optimizers = make_ranks(2, torch.float32, payload_dtype=payload, **options)
        for _ in range(4):
            if options["round_seconds"]:
                take_round(clock, world, params, optimizers, [3, 3])
            else:
                for _ in range(3):
                    for rank, optimizer in enumerate(optimizers):
                        give(params, optimizer, rank)
                    world.step(optimizers)
        assert optimizers[0].stats.round == 4
        runs.append(params[1])
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


def test_a_step_that_a_rank_skips_has_no_weight():
    """As GradScaler makes it; every=3, and the second of rank 1's steps is not taken."""
    world, params, optimizers = make_ranks(2, round_seconds=None, every=3, weighted=True)
    for t in range(3):
        for rank, optimizer in enumerate(optimizers):
            give(params, optimizer, rank)
        if t == 1:
            params[1][3].grad[0, 0, 0] = math.inf
        world.step(optimizers)
    wanted = oracle.train_rounds(weights(), [[3, 2]], lambda rank, t: gradient(rank, t + (rank == t == 1)), adamw)
    assert optimizers[1].stats.weight == pytest.approx(0.4)
    for p, q in zip(params[1], wanted, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_weights_of_every_round_are_its_own():
    world, params, optimizers = make_ranks(2, round_seconds=None, every=2, weighted=True)
    for t in range(6):
        for rank, optimizer in enumerate(optimizers):
            give(params, optimizer, rank)
        world.step(optimizers, [1 + t, 2])
    assert optimizers[0].stats.weight == pytest.approx(11 / 15)


def test_a_weighted_rank_that_lacks_an_exchange_begins_with_no_weight():
    world, params, optimizers = make_ranks(2, round_seconds=None, every=3, weighted=True)
    for t in range(7):
        if t == 3:
            rebind(World(2), optimizers)
            world = optimizers[0].comm.world
        if t == 2:
            world.failing.add((1, world.comms[1].started + 1))  # behind the message in front
        for rank, optimizer in enumerate(optimizers):
            give(params, optimizer, rank)
        try:
            world.step(optimizers)
            assert t != 2
        except compopt.CommunicationError:
            assert t == 2
    assert are_equal(params) is False and optimizers[1].stats.weight == optimizers[0].stats.weight == 0.5


def test_time_that_a_rank_waits_is_not_of_the_next_round(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [2, 2])
    clock.now += 11
    give(params, optimizers[0], 0)
    waiting = greenlet(optimizers[0].step)
    with torch.no_grad():
        waiting.switch()
    clock.now += 100
    give(params, optimizers[1], 1)
    world.run([waiting, optimizers[1].step])
    assert [optimizer.stats.phase for optimizer in optimizers] == ["exchanged"] * 2
    take_alone(clock, world, params, optimizers, 0, 1)


def test_the_wait_of_a_round_is_that_of_its_exchange_alone(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [2, 2])
    for optimizer in optimizers:
        optimizer._engine.waits.add_wait(100.0)  # of earlier exchanges; simulated ranks wait for nothing
    take_round(clock, world, params, optimizers, [2, 2])
    assert [optimizer.stats.round_wait_seconds for optimizer in optimizers] == [0.0, 0.0]


def test_time_between_saving_and_loading_does_not_count(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [2, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    clock.now += 100
    for optimizer, state in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    for rank, optimizer in enumerate(optimizers):
        give(params, optimizer, rank)
    world.step(optimizers)
    assert optimizers[0].stats.phase == "local"


def test_a_round_ends_at_the_first_step_after_its_time(clock):
    world, params, optimizers = make_ranks(2)
    phases = []
    for seconds in (0, 9.9, 0.2, 9.9, 0.2):  # before a step: the clock begins to run in the first
        clock.now += seconds
        for rank, optimizer in enumerate(optimizers):
            give(params, optimizer, rank)
        world.step(optimizers)
        phases.append(optimizers[1].stats.phase)
    assert phases == ["local", "local", "exchanged", "local", "exchanged"]


def test_rounds_grow_with_the_mean_of_the_ranks_steps(clock):
    """Over 20 steps to 10 s; the outer rate and momentum with the logarithm of a round's share in a whole one."""
    world, params, optimizers = make_ranks(2, growth_steps=20)

    def exchange() -> None:
        for rank, optimizer in enumerate(optimizers):
            give(params, optimizer, rank)
        world.step(optimizers)
        assert optimizers[0].stats.phase == "exchanged"

    exchange()  # after a step and no time at all
    outer, rates = optimizers[0]._anchors.outer, []
    outer.register_step_pre_hook(lambda sgd, *_: rates.append([sgd.param_groups[0][k] for k in ("lr", "momentum")]))
    assert [optimizer._counts.mean_step for optimizer in optimizers] == [1, 1]
    clock.now += 0.51  # 10 s / 20
    exchange()
    clock.now += 0.9
    take_alone(clock, world, params, optimizers, 0, 3)
    clock.now += 0.11  # 1.01 s of 10 s: 4 and 1 steps
    exchange()
    share = math.log(2.5) / math.log(2.5 / 0.101)
    assert rates[-1] == pytest.approx([1 - 0.3 * share, 0.9 * share])
    assert [optimizer._counts.mean_step for optimizer in optimizers] == [4.5, 4.5]
    clock.now += 10 * 4.5 / 20 - 0.01
    take_alone(clock, world, params, optimizers, 1, 30)
    clock.now += 0.02
    exchange()  # 1 and 31 steps: the growth is over
    clock.now += 9.9
    take_alone(clock, world, params, optimizers, 0, 1)
    clock.now += 0.11
    exchange()
    assert rates[-1] == pytest.approx([0.7, 0.9])


def test_the_end_of_a_round_waits_for_all_ranks_and_follows_their_rounds(clock):
    """Rank 0 has no more data; rank 1 takes two rounds and a part of one before it comes to the end too."""
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [2, 3])
    take_alone(clock, world, params, optimizers, 0, 2)

    def go_on():
        for steps in (4, 2):
            take_steps(clock, params, optimizers[1], 1, steps)
        take_steps(clock, params, optimizers[1], 1, 2, is_round=False)
        optimizers[1].end_round()

    world.run([optimizers[0].end_round, go_on])
    assert are_equal(params) and [optimizer.stats.round for optimizer in optimizers] == [4, 4]
    before = copy.deepcopy(params[0])
    end_round(optimizers)
    assert all(map(torch.equal, params[0], before)) and optimizers[0].stats.round == 4, "nothing has moved"


def test_residuals_of_a_rank_that_has_ended_are_sent(clock):
    world, params, optimizers = make_ranks(2, torch.float32, payload_dtype="int2")
    take_round(clock, world, params, optimizers, [2, 2])
    before = optimizers[0].stats.residual_norm()
    take_alone(clock, world, params, optimizers, 1, 1)
    end_round(optimizers)
    assert are_equal(params) and optimizers[0].stats.weight == 0 and before != optimizers[0].stats.residual_norm()


def test_nothing_is_exchanged_where_no_rank_has_stepped(clock):
    world, params, optimizers = make_ranks(2, torch.float32, payload_dtype="int2")
    take_round(clock, world, params, optimizers, [2, 2])
    before = copy.deepcopy(params[0])
    end_round(optimizers)
    assert all(map(torch.equal, params[0], before)) and not optimizers[0].round_is_open


@pytest.mark.parametrize("at", [1, 2])
def test_a_checkpoint_of_each_rank_goes_on_to_the_bit(clock, at):
    """Saved within a round, after ``at`` steps of rank 0; learning rates are each rank's own. A clock that
    is resumed runs from the first step on.
    """
    world, params, optimizers = make_ranks(2, torch.float32, payload_dtype="int4")
    optimizers[1].param_groups[0]["lr"] = 0.02
    take_round(clock, world, params, optimizers, [3, 2])
    clock.now += 4
    take_alone(clock, world, params, optimizers, 0, at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        world2, params2, others = make_ranks(2, torch.float32, payload_dtype="int4")
        for mine, theirs, optimizer, state in zip(params2, params, others, saved, strict=True):
            for p, q in zip(mine, theirs, strict=True):
                p.data.copy_(q)
            optimizer.load_state_dict(state)
    for w, own, ours in ((world, params, optimizers), (world2, params2, others)):
        assert ours[0]._counts.seconds == 4
        take_round(clock, w, own, ours, [3, 2])
    for mine, theirs in zip(params2, params, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert others[0].stats.weight == optimizers[0].stats.weight == pytest.approx((at + 3) / (at + 5))


def test_a_consolidated_checkpoint_goes_on_with_any_number_of_ranks(clock):
    world, params, optimizers = make_ranks(2, torch.float32, payload_dtype="int4")
    take_round(clock, world, params, optimizers, [3, 2])
    take_alone(clock, world, params, optimizers, 0, 2)
    end_round(optimizers)
    world.consolidate(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = copy.deepcopy(optimizers[0].state_dict())
        world2, params2, others = make_ranks(3, torch.float32, payload_dtype="int4")
        for own, optimizer in zip(params2, others, strict=True):
            for p, q in zip(own, params[0], strict=True):
                p.data.copy_(q)
            optimizer.load_state_dict(saved)
    take_round(clock, world2, params2, others, [3, 2, 5])
    assert are_equal(params2) and others[2].stats.round == 3
    assert [optimizer.stats.weight for optimizer in others] == pytest.approx([0.3, 0.2, 0.5])


def test_ranks_that_have_not_stepped_since_their_round_are_consolidated_with_those_that_have(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [3, 2])
    take_alone(clock, world, params, optimizers, 0, 2)
    moved = copy.deepcopy(params[0])
    assert [o.round_is_open for o in optimizers] == [True, False]
    world.consolidate(optimizers)
    assert all(map(torch.equal, params[0], moved)) and are_equal(params)
    assert [o.round_is_open for o in optimizers] == [True, True]
    take_round(clock, world, params, optimizers, [1, 2])
    assert are_equal(params) and optimizers[0].stats.round == 2


def test_a_failed_exchange_keeps_its_weight(clock):
    """It is tried again after the next step, whose time is not over."""
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [2, 2])
    world.failing_everywhere.add(world.comms[0].started + 1)  # behind the message in front
    with pytest.raises(compopt.CommunicationError, match="but not the sync"):
        take_round(clock, world, params, optimizers, [3, 1])
    for rank, optimizer in enumerate(optimizers):
        give(params, optimizer, rank)
    world.step(optimizers)
    assert [optimizer.stats.weight for optimizer in optimizers] == pytest.approx([4 / 6, 2 / 6])
    wanted = oracle.train_rounds(weights(), [[2, 2], [4, 2]], gradient, adamw)
    for p, q in zip(params[0], wanted, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def rebind(world, optimizers) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip(optimizers, world.comms, strict=True)
        world.run([partial(optimizer.rebind, comm) for optimizer, comm in pairs])


def test_survivors_keep_their_steps_and_a_new_rank_has_none(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [4, 2])
    take_alone(clock, world, params, optimizers, 0, 2)
    _, params2, new = make_ranks(1)
    ranks, own = [*optimizers, *new], [*params, *params2]
    world = World(3)
    rebind(world, ranks)
    assert [optimizer.option_groups[0]["step"] for optimizer in ranks] == [6, 2, 6]
    take_round(clock, world, own, ranks, [1, 1, 2])
    assert are_equal(own) and [optimizer.stats.round for optimizer in ranks] == [2, 2, 2]
    assert [optimizer.stats.weight for optimizer in ranks] == pytest.approx([3 / 6, 1 / 6, 2 / 6])


def test_a_rank_that_lacks_an_exchange_takes_it_over_with_its_weight(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [2, 2])
    world.failing.add((1, world.comms[1].started + 1))  # behind the message in front
    with pytest.raises(compopt.CommunicationError, match="rank 1, but not the sync"):
        take_round(clock, world, params, optimizers, [3, 1])
    assert [optimizer.stats.round for optimizer in optimizers] == [2, 1]
    world = World(2)
    rebind(world, optimizers)
    counts = [optimizer._counts for optimizer in optimizers]
    assert are_equal(params) and [count.round for count in counts] == [2, 2]
    assert [optimizer.option_groups[0]["step"] for optimizer in optimizers] == [5, 3]
    assert [count.weight for count in counts] == [0, 0]
    take_round(clock, world, params, optimizers, [1, 3])
    assert are_equal(params) and optimizers[1].stats.weight == pytest.approx(3 / 4)
    assert [optimizer._counts.mean_step for optimizer in optimizers] == [6, 6]


@pytest.mark.parametrize("options", [dict(delay=1), dict(fragments=2)])
@pytest.mark.parametrize("by", [dict(round_seconds=10), dict(weighted=True)])
def test_payloads_wait_for_weights(options, by):
    with pytest.raises(ValueError, match=r"(delay|fragments) must be [01] where ranks are weighted"):
        compopt.LocalSteps(adamw([torch.nn.Parameter(torch.ones(3))]), **options, **by)


def test_what_does_not_fit_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="pass one of them"):
        compopt.LocalSteps(adamw([p]), 30, round_seconds=60)
    with pytest.raises(ValueError, match="round_seconds must be None or finite and > 0, got 0"):
        compopt.LocalSteps(adamw([p]), round_seconds=0)
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match="weighted=True or round_seconds="):
        compopt.LocalSteps(adamw([p])).step(samples=3)
    for samples in (-1, math.inf, math.nan, "4", True):
        with pytest.raises(ValueError, match="samples must be a number >= 0"):
            compopt.LocalSteps(adamw([p]), weighted=True).step(samples=samples)


@pytest.mark.parametrize("name", ["weight", "seconds", "mean_step"])
@pytest.mark.parametrize("value", [-1.0, math.nan, "x"])
def test_a_damaged_count_is_refused(clock, name, value):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [3, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = copy.deepcopy(optimizers[0].state_dict())
    saved["state"][0]["outer"][name] = value
    with pytest.raises(ValueError, match=f"loaded state dict .* is damaged.*: {name} is {value!r}"):
        optimizers[0].load_state_dict(saved)


def test_other_settings_are_compared_all_the_same(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [3, 2])
    optimizers[1].param_groups[0]["foreach"] = False
    with pytest.raises(ValueError, match="foreach: rank 0 has None, rank 1 has False"):
        take_round(clock, world, params, optimizers, [1, 1])


def test_on_one_process_it_is_the_inner_optimizer(clock):
    params = [torch.nn.Parameter(w) for w in weights()]
    optimizer = compopt.LocalSteps(adamw(params), round_seconds=10)
    other = [torch.nn.Parameter(w) for w in weights()]
    inner = adamw(other)
    for t in range(4):
        clock.now += 11
        for p, q, g in zip(params, other, gradient(0, t), strict=True):
            p.grad, q.grad = g, g.clone()
        optimizer.step(samples=4)
        inner.step()
    assert all(map(torch.equal, params, other)) and optimizer.stats.steps_into_round == 0


def test_steps_of_the_averaged_start_have_no_weight(clock):
    world, params, optimizers = make_ranks(2, dense_steps=2)
    for _ in range(2):
        for rank, optimizer in enumerate(optimizers):
            give(params, optimizer, rank)
        world.step(optimizers)
        clock.now += 11
    take_round(clock, world, params, optimizers, [3, 2])
    assert [optimizer.stats.weight for optimizer in optimizers] == pytest.approx([3 / 5, 2 / 5])
    assert [optimizer.stats.round for optimizer in optimizers] == [1, 1] and are_equal(params)


def test_a_lost_rank_takes_the_others_average(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [3, 2])
    with torch.no_grad():
        params[1][2][0, 0] = math.nan
    with pytest.warns(UserWarning, match="rank 1 had parameters that are not finite"):
        take_round(clock, world, params, optimizers, [2, 1])
    assert are_equal(params) and all(p.isfinite().all() for p in params[0])


def test_a_copy_goes_on_as_the_original(clock):
    world, params, optimizers = make_ranks(2)
    take_round(clock, world, params, optimizers, [3, 2])
    take_alone(clock, world, params, optimizers, 0, 1)
    twins = copy.deepcopy(list(zip(params, optimizers, strict=True)))
    own, others = zip(*twins, strict=True)
    for w, ps, ours in ((world, params, optimizers), (others[0].comm.world, own, others)):
        take_round(clock, w, ps, ours, [2, 2])
    assert others[0].stats.weight == pytest.approx(3 / 5)
    for mine, theirs in zip(params, own, strict=True):
        assert all(map(torch.equal, mine, theirs))


ROUNDS, SECONDS = 6, 0.4


def gradient_of_rank(rank: int, t: int) -> list[torch.Tensor]:
    return gradients(rank + 1, t)[rank]


def unequal(rank: int, ranks: int) -> dict:
    """The last rank is slowed to a third."""
    params = [torch.nn.Parameter(w) for w in weights()]
    optimizer = compopt.LocalSteps(adamw(params), round_seconds=SECONDS, growth_steps=0, payload_dtype=None)
    found: dict = {"steps": [], "waits": [], "seconds": [], "weights": []}
    while optimizer.stats.round < ROUNDS:
        begun, rounds = time.perf_counter(), optimizer.stats.round
        time.sleep(0.09 if rank == ranks - 1 else 0.03)
        for p, g in zip(params, gradient_of_rank(rank, optimizer.stats.applied_steps), strict=True):
            p.grad = g
        optimizer.step()
        stats = optimizer.stats
        if stats.round == rounds:
            found["seconds"].append(time.perf_counter() - begun)
        else:
            found["steps"].append(stats.round_steps)
            found["waits"].append(stats.round_wait_seconds)
            found["weights"].append(stats.weight)
    return found | {"params": [p.detach() for p in params]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_averaged_by_its_steps(ranks):
    runs = run_ranks(unequal, ranks, ranks)
    counts = [list(row) for row in zip(*(run["steps"] for run in runs), strict=True)]
    assert any(row[0] > 1.5 * row[-1] for row in counts), counts  # a busy machine slows the others in some rounds
    for number, row in enumerate(counts):
        assert [run["weights"][number] for run in runs] == pytest.approx([n / sum(row) for n in row])
    for p, q in zip(runs[0]["params"], oracle.train_rounds(weights(), counts, gradient_of_rank, adamw), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0]["params"], run["params"]))
    # What all ranks wait is the exchange itself, which takes long on a busy machine; the rest is for the slow rank.
    rounds = list(zip(*(run["waits"] for run in runs), strict=True))
    slow = statistics.mean(runs[-1]["seconds"])
    apart = [(max(waits) - min(waits)) / slow for waits in rounds]
    print(f"{ranks} ranks: steps {counts}; waited for the slow rank: {statistics.mean(apart):.2f} of its steps a round")
    assert min(apart) <= 1.5  # of the calmest round: a rank that waited for a whole round would do so in all


def under_ddp(rank: int) -> dict:
    """Rank 0 is slow; rank 1 comes to its end first."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    adamw = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(adamw, 3, 0.9)
    optimizer = compopt.LocalSteps(adamw, round_seconds=0.2, dense_steps=2, growth_steps=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    rounds = 0
    for t in range(25):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * t + rank))
        optimizer.zero_grad()
        scaler.scale((ddp(x) - x.flip(1)).square().mean()).backward()
        scaler.step(optimizer, samples=16)
        scaler.update()
        scheduler.step()
        if t > 4:
            time.sleep(0.06 if rank == 0 else 0.02)
        rounds = optimizer.stats.round
    optimizer.end_round()
    flat = torch.cat([p.detach().view(-1) for p in ddp.parameters()])
    optimizer.consolidate_state()
    return {"flat": flat, "rounds": (rounds, optimizer.stats.round), "lr": adamw.param_groups[0]["lr"]}


def test_ranks_with_equal_data_and_unequal_speed_end_together_under_ddp():
    first, second = run_ranks(under_ddp, 2)
    assert torch.equal(first["flat"], second["flat"]) and first["flat"].isfinite().all()
    assert first["rounds"][1] == second["rounds"][1] > second["rounds"][0], "the fast rank has followed the slow one"


def before_an_evaluation(rank: int) -> list[bool]:
    """As trainers call it; rank 1 takes no step between two evaluations."""
    params = [torch.nn.Parameter(w) for w in weights()]
    optimizer = compopt.LocalSteps(adamw(params), round_seconds=1000, growth_steps=0, payload_dtype="int8")
    found = []
    for steps in ([2, 1][rank], [1, 0][rank], 0):
        for _ in range(steps):
            for p, g in zip(params, gradient_of_rank(rank, optimizer.stats.applied_steps), strict=True):
                p.grad = g
            optimizer.step()
        end_open_rounds([optimizer])
        mine = torch.cat([p.detach().view(-1) for p in params])
        other = mine.clone()
        torch.distributed.broadcast(other, 0)
        found.append(torch.equal(mine, other))
    return found


def test_trainers_end_rounds_on_ranks_that_have_not_stepped():
    assert run_ranks(before_an_evaluation, 2) == [[True] * 3] * 2
