"""Ranks that die, stop or differ, in real processes, also inside FSDP2; masks that one of them does not get."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import cut, make, whole
from fsdp_models import train as train_model
from lossy import CASES, Training, announce, attempt, connect, limit_waits, run_lossy, same, state, train
from ranks import FOREVER, run_ranks
from sim import Begun
from slow_rows import slow_but
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine import missing_ranks
from compopt._engine.step import Step
from compopt._fsdp import fsdp_gather as _fsdp_gather
from compopt._fsdp.fsdp_backward import FSDPBackward
from compopt._state.tensors import to_local
from compopt._wire.in_flight import PendingCollective

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
        _ = [Begun(training.optimizer.take_step) for training in trainings]
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
        limit_waits(TIMEOUT, but=[training for training in trainings if training.optimizer._engine is not self.engine])
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
        if rank == 1 and "density" in training.optimizer.option_groups[0]:
            training.optimizer.option_groups[0]["density"] = 0.2
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


OPTIONS = dict(lr=1e-2, rank=4, dense_steps=2, residual_dtype="int8")


def connect_ranks(file: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=FOREVER)


def begin_inside() -> tuple[nn.Module, compopt.SeparateAdam]:
    model = cut(make())
    return model, compopt.SeparateAdam(model.parameters(), gather_dtype="int8", **OPTIONS)


def begin_in_sites() -> tuple[nn.Module, compopt.SeparateAdam]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = DDP(make(), process_group=mesh.get_group("shard"))
    return model, compopt.SeparateAdam(model.parameters(), process_group=mesh.get_group("replicate"), **OPTIONS)


def begin_without_sites() -> tuple[nn.Module, compopt.SeparateAdam]:
    model = DDP(make())
    return model, compopt.SeparateAdam(model.parameters(), **OPTIONS)


def save(model: nn.Module, optimizer: compopt.SeparateAdam, folder: str) -> None:
    optimizer.consolidate_state()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: compopt.SeparateAdam, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def held(optimizer: compopt.SeparateAdam) -> list[torch.Tensor]:
    """Copies of all that this rank holds and a step may change. A module has gathered parameters after an error."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [to_local(x.detach()).clone() for x in (*params, *state)]


def kill_in_call(holder: object, name: str, number: int) -> None:
    """This process ends in a call of a function, of which there were ``number`` before."""
    function, calls = getattr(holder, name), iter(range(number))

    def call(*args):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    setattr(holder, name, call)


INSIDE: dict[str, Callable[[], None]] = {  # three modules are gathered in forward, two of them in backward again
    "a gather in forward": lambda: kill_in_call(_fsdp_gather, "gather_into", 1),
    "a gather in backward": lambda: kill_in_call(_fsdp_gather, "gather_into", 3),
    "a reduce-scatter": lambda: kill_in_call(FSDPBackward, "reduce", 1),
    "the step": lambda: kill_in_call(compopt.SeparateAdam, "step", 0),
}
IN_SITES: dict[str, Callable[[], None]] = {
    "DDP's average": lambda: kill_in_call(torch.Tensor, "backward", 0),
    "the step": INSIDE["the step"],
}


KINDS = {
    "inside": (begin_inside, begin_inside, INSIDE),
    "sites": (begin_in_sites, begin_without_sites, IN_SITES),
}


def survive_kill(rank: int, _: None, file: str, kind: str, folder: str, when: str, dying: int) -> dict[str, object]:
    ranks, (begin, begin_again, deaths) = dist.get_world_size(), KINDS[kind]
    model, optimizer = begin()
    train_model(model, optimizer, range(4), rank)
    save(model, optimizer, folder)
    train_model(model, optimizer, range(4, 6), rank)
    limit_waits(TIMEOUT)
    before = held(optimizer)
    if rank == dying:
        deaths[when]()
    results: dict[str, object] = {}
    try:
        train_model(model, optimizer, range(6, 7), rank)
    except RuntimeError as error:
        results["error"] = f"{type(error).__name__}: {error}"
    results["as it was"] = all(map(torch.equal, before, held(optimizer)))
    dist.destroy_process_group()
    connect_ranks(file + "2", rank - (rank > dying), ranks - 1)
    model, optimizer = begin_again()
    load(model, optimizer, folder)
    residuals = [entry["residual"] for entry in optimizer.state.values() if "residual" in entry]
    results["residual"] = sum(int(stored.sum()) for stored in residuals)
    train_model(model, optimizer, range(4, 7), dist.get_rank())
    return {**results, "sum": float(whole(model).sum())}


def check(answers: dict[int, dict[str, object]], when: str) -> None:
    for answer in answers.values():
        assert answer["as it was"] and "error" in answer, answer
        if when == "the step":
            assert str(answer["error"]).startswith("CommunicationError: step 7 was not applied"), answer
    assert len({(answer["sum"], answer["residual"]) for answer in answers.values()}) == 1, answers
    assert answers[0]["residual"]


@pytest.mark.slow
@pytest.mark.parametrize("when", INSIDE)
def test_a_rank_that_is_killed_inside_fsdp2(when, tmp_path):
    check(run_lossy(survive_kill, 3, "inside", str(tmp_path), when, 1, dying=1, begin=connect_ranks), when)


@pytest.mark.slow
@pytest.mark.parametrize("when", IN_SITES)
def test_a_rank_that_is_killed_in_a_site(when, tmp_path):
    check(run_lossy(survive_kill, 4, "sites", str(tmp_path), when, 3, dying=3, begin=connect_ranks), when)


def lose_a_mask(rank: int) -> dict:
    """Rank 1's wait for the broadcast of step 3 fails, after the message itself has gone its way."""
    wait = PendingCollective.wait

    def failing(self):
        answer = wait(self)
        if rank == 1 and self.description.startswith("Broadcast") and optimizer.stats.applied_steps == 3:
            raise compopt.CommunicationError(f"{self.description} was made to fail")
        return answer

    PendingCollective.wait = failing
    torch.manual_seed(0)
    model = nn.Linear(96, 64)
    optimizer = compopt.RadiusAdamW(model.parameters(), density=0.25, interval=100, dense_steps=3)
    phases = []
    for step in range(7):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(optimizer.stats.phase)
    mask = optimizer.state[model.weight]["mask"]
    return {"phases": phases, "mask": mask.tolist(), "sum": float(model.weight.sum())}


def lose_a_gathered_mask(rank: int) -> dict:
    """SCAPE's: the ranks do not ask each other. One raises where the other would wait for ever."""
    missing_ranks.LOOK_AFTER = 0.3
    groups = [dist.new_group(timeout=FOREVER) for _ in range(2)]
    wait = PendingCollective.wait

    def failing(self):
        answer = wait(self)
        if rank == 1 and self.description.startswith("AllGather") and optimizer.stats.applied_steps == 4:
            raise compopt.CommunicationError(f"{self.description} was made to fail")
        return answer

    torch.manual_seed(0)
    model = nn.Linear(96, 64)
    options = dict(density=0.25, dense_steps=1, density_steps=0)
    optimizer = compopt.ScapeAdamS(model.parameters(), process_group=groups[0], **options)

    def train(steps) -> None:
        for step in steps:
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(range(4))
    PendingCollective.wait, before, message = failing, model.weight.clone(), ""
    try:
        train(range(4, 5))
    except compopt.CommunicationError as error:
        message = str(error)
    PendingCollective.wait = wait
    same = torch.equal(before, model.weight)
    optimizer.rebind(groups[1])
    train(range(4, 8))
    sums = [float(t.detach().double().sum()) for t in (model.weight, model.bias)]
    return {"said": message, "same": same, "sums": sums, "phase": optimizer.stats.phase}


def test_real_ranks_leave_a_step_when_one_of_them_lost_a_gathered_mask():
    ranks = run_ranks(lose_a_gathered_mask, 2)
    for rank, results in enumerate(ranks):
        assert results["said"] == (
            f"step 5 was not applied on rank {rank}: rank 1 lost the masks that followed step 4, and others have them. "
            "Make a new process group on all ranks and call rebind()"
        )
        assert results["same"] and results["sums"] == ranks[0]["sums"] and results["phase"] == "sparse"


def test_real_ranks_choose_the_mask_anew_when_one_of_them_lost_it():
    ranks = run_ranks(lose_a_mask, 2)
    for results in ranks:
        assert results["phases"] == ["dense", "dense", "resample", "resample", "sparse", "sparse", "sparse"]
        assert results["mask"] == ranks[0]["mask"] and results["sum"] == ranks[0]["sum"]
