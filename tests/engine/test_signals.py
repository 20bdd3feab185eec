"""Signals while a step is being written: the step is whole, then they are handled. What still breaks it off is told."""

from __future__ import annotations

import copy
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from conformance import Small, assert_same, every_average, loss, make_ranks, snapshot, some_average
from sim import Ranks

import compopt
from compopt._engine.signals import defer_signals
from compopt._engine.step import Step


class Alarm(Exception):
    """The exception of a user's handler."""


def raise_alarm(number: int, frame: object) -> None:
    raise Alarm


@pytest.fixture(autouse=True)
def handlers():
    """Both signals are handled, also where the shell has these tests ignore SIGINT, as it does in the background."""
    handlers = {signal.SIGALRM: raise_alarm, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_when_the_block_has_ended_and_are_what_they_were():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGALRM)
        done.append("all of the block")
    assert done
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_an_error_in_the_block_does_not_swallow_a_signal():
    with pytest.raises(Alarm) as caught, defer_signals():
        signal.raise_signal(signal.SIGALRM)
        raise ValueError("in the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_hold_nothing_back():
    message = []

    def work():
        with defer_signals():
            message.append(signal.getsignal(signal.SIGALRM) is raise_alarm)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert message == [True]


def interrupted_in_the_commit(optimizer) -> None:
    """A signal arrives before the first bucket is updated, and another between the buckets and the count."""
    commit_bucket, after_commit = Step._commit_bucket, optimizer.after_commit

    def after(*args):
        Step._commit_bucket = commit_bucket
        signal.raise_signal(signal.SIGINT)
        commit_bucket(*args)

    def between():
        signal.raise_signal(signal.SIGALRM)
        after_commit()

    Step._commit_bucket, optimizer.after_commit = after, between


@every_average
def test_a_signal_in_the_commit_is_handled_after_it(case):
    ranks, without = make_ranks(case, 1), make_ranks(case, 1)
    for one in (ranks, without):
        one.train(loss, 3)
        one.backward(loss)
    (optimizer,) = ranks.optimizers
    interrupted_in_the_commit(optimizer)
    with pytest.raises((KeyboardInterrupt, Alarm)):
        optimizer.step()
    del optimizer.after_commit
    without.optimizers[0].step()
    assert_same(snapshot(without.optimizers[0]), snapshot(optimizer))
    for one in (ranks, without):
        one.steps += 1
        one.train(loss, 4)
    assert_same(snapshot(without.optimizers[0]), snapshot(optimizer))


class Instructions:
    """Counts the instructions of Python that run inside its block, and raises a signal at one of them."""

    def __init__(self, at: int = 0):
        self.count, self.at = 0, at

    def __enter__(self) -> Instructions:
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGALRM)
        return self.trace


@some_average("SeparateAdam", "ScapeAdamS, sharded", "LocalSteps")
def test_thirty_interrupted_steps_leave_none_torn(case):
    """At any point of a step: it was taken or not, and is tried again where not."""
    dice = random.Random(0)
    ranks, without = make_ranks(case, 1), make_ranks(case, 1)
    for one in (ranks, without):
        one.train(loss, 4)
    (optimizer,), (other,) = ranks.optimizers, without.optimizers
    records = selected = 0
    for _ in range(30):
        for one in (ranks, without):
            one.backward(loss)
        with Instructions() as all_of_them:
            other.step()
        steps = optimizer.option_groups[0]["step"]
        try:
            with Instructions(dice.randint(1, all_of_them.count)):
                optimizer.step()
        except Alarm:
            records += 1
        selected += optimizer.option_groups[0]["step"] > steps
        torch.set_grad_enabled(True)  # torch's own no_grad may be interrupted as well
        if optimizer.option_groups[0]["step"] == steps:
            optimizer.step()
        for one in (ranks, without):
            one.steps += 1
        assert_same(snapshot(other), snapshot(optimizer))
    assert records >= 25, "all, unless the other step had instructions of its own, as of what it collected"
    assert 0 < selected < 30


class Broken(Exception):
    pass


def broken_in(ranks: Ranks, bucket: int) -> None:
    """Rank 0's algorithm raises in the commit of this bucket."""
    engine = ranks.optimizers[0]._engine
    algorithm = engine.algorithm

    def breaking(b):
        generator, answer = algorithm(b), None
        while True:
            try:
                request = generator.send(answer)
            except StopIteration:
                return
            answer = yield request
            if (
                type(request).__name__ == ("ReadyToCommit" if ranks.optimizers[0].sharded else "Agree")
                and b.index == bucket
            ):
                raise Broken("of the test")

    engine.algorithm = breaking


@every_average
def test_a_step_that_breaks_off_is_told_until_a_checkpoint_is_loaded(case, monkeypatch):
    monkeypatch.setattr("compopt._state.buckets.BUCKET_BYTES", 20_000)
    ranks = make_ranks(case, 1)
    ranks.train(loss, 4)
    (optimizer,) = ranks.optimizers
    optimizer.consolidate_state()
    weights = copy.deepcopy(ranks.models[0].state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    algorithm = optimizer._engine.algorithm
    broken_in(ranks, bucket=len(optimizer._buckets) - 1)
    ranks.backward(loss)
    with pytest.raises(Broken):
        optimizer.step()
    optimizer._engine.algorithm = algorithm
    where = f"bucket {len(optimizer._buckets) - 1}"
    what = rf"step 5 was applied in part: Broken was raised in {where} .* Load a checkpoint"
    calls = (optimizer.step, optimizer.state_dict, optimizer.consolidate_state, lambda: copy.deepcopy(optimizer))
    for refuses in calls:
        with pytest.raises(RuntimeError, match=what):
            refuses()
    ranks.models[0].load_state_dict(weights)
    optimizer.load_state_dict(saved)
    ranks.train(loss, 4)

    again = make_ranks(case, 1)
    again.models[0].load_state_dict(weights)
    again.optimizers[0].load_state_dict(saved)
    again.steps = ranks.steps - 4
    again.train(loss, 4)
    assert_same(snapshot(again.optimizers[0]), snapshot(optimizer))


class Raising(torch.optim.SGD):
    raises = False

    def step(self, closure=None):
        if self.raises:
            raise Broken("of the base")
        return super().step(closure)


def test_a_base_that_raises_is_a_step_that_broke_off():
    model = Small()
    base = Raising(model.parameters(), lr=0.1)
    optimizer = compopt.Separate(base, projection="gaussian", ratio=4)
    loss(model, 0, 0).backward()
    optimizer.step()
    base.raises = True
    with pytest.raises(Broken):
        optimizer.step()
    base.raises = False
    with pytest.raises(RuntimeError, match="step 2 was applied in part: Broken was raised after its buckets"):
        optimizer.step()


def test_a_step_that_failed_under_a_grad_scaler_may_be_tried_again(monkeypatch):
    """Its gradients are as they were, so that they are not unscaled twice."""
    ends = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Small()
        optimizer = compopt.RadiusAdamW(model.parameters(), lr=1e-2, dense_steps=1, density=0.3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss(model, 0, step)).backward()
            if fails and step == 2:

                def failing(step):
                    raise compopt.CommunicationError("of the test")

                before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                with monkeypatch.context() as patch, pytest.raises(compopt.CommunicationError):
                    patch.setattr(Step, "_exchange_buckets", failing)
                    scaler.step(optimizer)
                assert_same(before, [p.grad for p in model.parameters() if p.grad is not None])
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach() for p in model.parameters()])
    assert_same(*ends)
