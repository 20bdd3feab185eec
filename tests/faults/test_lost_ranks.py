"""Ranks that die, stop or differ, in real processes: the others raise in time, are as they were, and go on."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from lossy import CASES, Training, announce, attempt, connect, limit_waits, run_lossy, same, state, train
from slow_rows import slow_but

from compopt._engine.step import Step

BEFORE = 6  # steps all three take: the next is a sparse one
DYING = 1
TIMEOUT = 5  # seconds, of a group: a rank that waits for another survivor hears of a death no sooner


class Dead(Exception):
    """Stands for a process's end between two lines."""


def die(trainings: list[Training], rank: int, when: str) -> None:
    """Take the step's way up to ``when``, for all classes, and be gone."""
    for training in trainings:
        training.backward(rank)
    if when == "in the exchange":
        for training in trainings:
            next(training.optimizer.step_as_generator())
    elif when == "before the commit":

        def commit(*args):
            raise Dead

        Step._commit_buckets = commit
        for training in trainings:
            with pytest.raises(Dead):
                training.optimizer.step()
    elif when == "masks in flight":
        for training in trainings:
            training.optimizer.step()
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def limit_waits_after_commits(trainings: list[Training]) -> Iterator[None]:
    """Ranks may get no answer any more to what they exchange after a commit."""
    commit = Step._commit_buckets

    def limiting(self, *args):
        limit_waits(
            TIMEOUT, but=[training for training in trainings if training.optimizer._session is not self.session]
        )
        return commit(self, *args)

    Step._commit_buckets = limiting
    yield
    Step._commit_buckets = commit


def survive(rank: int, trainings: list[Training], file: str, when: str) -> dict:
    train(trainings, rank, 3)
    for training in trainings:
        training.optimizer.consolidate_state()
    # A state dict holds the very tensors that go on being trained, as torch.optim's does: a checkpoint is a copy of it.
    saved = [copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict())) for t in trainings]
    train(trainings, rank, BEFORE - 3)
    if rank == DYING:
        die(trainings, rank, when)

    takes_part = when in ("before the commit", "masks in flight")  # in the step that comes
    if not takes_part:
        limit_waits(TIMEOUT)
    left = trainings
    while left:  # at most twice: the step may have been complete on this rank when the other died
        before = [state(training) for training in left]
        for training in left:
            training.report["steps"] = training.steps_taken
            training.backward(rank)
        with limit_waits_after_commits(trainings) if takes_part else contextlib.nullcontext():
            attempt(left)
        failed = [training for training in left if "error" in training.report]
        for training, old in zip(left, before, strict=True):
            if training in failed:
                training.report["as it was"] = same(old, state(training))
        left = [training for training in left if training not in failed]
        takes_part = False
        limit_waits(TIMEOUT)

    dist.destroy_process_group()
    place = rank - (rank > DYING)
    for training, group in zip(trainings, connect(file + "2", place, 2), strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.wrap(group)
        training.report["warned"] = [str(warning.message) for warning in caught]
        training.report["level"] = training.steps_taken
        train([training], rank, 3)
        training.report.update(then=training.steps_taken, sum=training.checksum(), phase=training.optimizer.stats.phase)

    for training, (weights, optimizer) in zip(trainings, saved, strict=True):
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(optimizer)
        train([training], rank, 2)
        training.report.update(resumed=training.steps_taken, resumed_sum=training.checksum())
    return {training.case.name: training.report for training in trainings}


MOMENTS = ["before the step", "in the exchange", "before the commit", "masks in flight"]


@pytest.mark.parametrize("when", slow_but(lambda when: when == "before the commit", MOMENTS))
def test_a_killed_rank(when):
    answers = run_lossy(survive, 3, when, dying=DYING)
    assert sorted(answers) == [0, 2]
    for case in CASES:
        report = [answers[rank][case.name] for rank in (0, 2)]
        warned = [any("1 of 3 ranks are gone" in words for words in one["warned"]) for one in report]
        assert warned == [bool(case.cls.rank_local_state), False]  # once, on rank 0
        for rank, one in zip((0, 2), report, strict=True):
            assert one["as it was"]
            assert one["error"].startswith(f"step {one['steps'] + 1} was not applied on rank {rank}: ")
            assert one["steps"] in ((BEFORE,) if when == "before the step" else (BEFORE, BEFORE + 1))
            if when in ("before the commit", "masks in flight"):
                assert one["steps"] == BEFORE + 1
        assert {one["level"] for one in report} == {max(one["steps"] for one in report)}
        for what in ("then", "sum", "resumed", "resumed_sum"):
            assert report[0][what] == report[1][what], (case.name, what, report)
        assert report[0]["then"] == report[0]["level"] + 3 and report[0]["resumed"] == 5


def stop(rank: int, trainings: list[Training], file: str) -> dict:
    train(trainings, rank, BEFORE)
    for name in ("waits", "has waited"):
        before = [state(training) for training in trainings]
        if name == "has waited" and rank == DYING:
            limit_waits(
                20
            )  # gloo may miss that a peer left while this rank was stopped, with its exchanges of backward
        for training in trainings:
            training.backward(rank)
        if name == "has waited":
            limit_waits(2)
        if rank == DYING:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "waits":
            announce(file, name)
        attempt(trainings)
        announce(file, name)
        for training, old in zip(trainings, before, strict=True):
            training.report["as it was"] = same(old, state(training))
            training.report.setdefault("late", training.checksum())
    return {training.case.name: training.report for training in trainings}


def test_a_rank_that_stops_is_waited_for_until_the_groups_timeout():
    answers = run_lossy(stop, 2, resume_at=("waits", "has waited"))
    for case in CASES:
        awake, stopped = (answers[rank][case.name] for rank in (0, 1))
        assert awake["late"] == stopped["late"]
        for rank, one in enumerate((awake, stopped)):
            assert one["as it was"] and f"step {BEFORE + 2} was not applied on rank {rank}: " in one["error"]
        assert awake["seconds"] > 1.5


def differ(rank: int, trainings: list[Training], file: str) -> dict:
    """Half of the classes find that one rank has loaded a checkpoint, or changed an option of what is sent."""
    train(trainings, rank, BEFORE)
    for training in trainings:
        if rank == 1 and "density" in training.optimizer._option_groups[0]:
            training.optimizer._option_groups[0]["density"] = 0.2
        elif rank == 1:
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.backward(rank)
    before = [state(training) for training in trainings]
    limit_waits(2)
    attempt(trainings)
    for training, old in zip(trainings, before, strict=True):
        training.report["as it was"] = same(old, state(training))
    return {training.case.name: training.report for training in trainings}


def test_ranks_that_do_different_things_raise_at_the_timeout_and_none_aborts():
    answers = run_lossy(differ, 2)
    for case in CASES:
        for rank in (0, 1):
            report = answers[rank][case.name]
            assert report["as it was"] and f"step {BEFORE + 1} was not applied on rank {rank}: " in report["error"]
