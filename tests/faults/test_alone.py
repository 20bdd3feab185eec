"""``consolidate_state()`` on some ranks only, on real ranks: a sentence, and no collective is out of step."""

from __future__ import annotations

import os
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from lossy import run_lossy
from ranks import HANG_GUARD, run_ranks
from table import by_name
from torch import nn

import compopt
from compopt._engine import meeting

OPTIONS = dict(density=0.3, interval=3, warmup_steps=1)


class Run:
    def __init__(self, rank: int, name: str = "RadiusAdamW"):
        torch.manual_seed(0)
        self.rank, self.t = rank, 0
        self.model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        self.optimizer = by_name[name].make(self.model.parameters())

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * self.t + self.rank))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.t += 1

    def sum(self) -> float:
        return float(nn.utils.parameters_to_vector(self.model.parameters()).double().sum())


def consolidate(run: Run, **options) -> str:
    try:
        run.optimizer.consolidate_state(**options)
    except (compopt.CommunicationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mixed(rank: int) -> dict:
    """Rank 0 is alone: while the others step, while they are in a barrier; then all come, and training goes on."""
    meeting.LOOK_AFTER = 0.3
    found = {}
    for name in ("RadiusAdamW", "TagcAdamW", "AdamS"):
        run, told = Run(rank, name), []
        run.train(4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank == 0:
                told.append(consolidate(run))
            run.train()
        told += [(str(w.message), os.path.basename(w.filename)) for w in caught if "consolidate" in str(w.message)]
        if rank == 0:
            told.append(consolidate(run, patience=0.5))
        dist.barrier()
        run.train(2)
        if rank != 0 and name == "RadiusAdamW":  # the others come first, and wait for rank 0
            told.append(consolidate(run))
        elif name == "RadiusAdamW":
            told.append(consolidate(run, patience=HANG_GUARD))
        whole = consolidate(run)
        run.train(2)
        found[name] = {"told": told, "whole": whole, "sum": run.sum(), "steps": run.optimizer.stats.step}
    a, b = Run(rank), Run(rank, "SeparateAdam")
    found["others"] = consolidate(a if rank == 0 else b), consolidate(a), consolidate(b)
    run = Run(rank)
    run.train(3)
    found["not rank 0"] = consolidate(run, patience=0.5) if rank == 1 else dist.barrier()
    if rank == 1:
        dist.barrier()
    run.train()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_alone_gets_a_sentence_and_training_goes_on(size):
    ranks = run_ranks(mixed, size)
    for name in ("RadiusAdamW", "TagcAdamW"):
        first, *others = (found[name] for found in ranks)
        met, barrier, *_ = first["told"]
        ask = "call it on all ranks, before `if rank == 0:`"
        assert met.startswith("CommunicationError: consolidate_state() was called on rank 0, but rank ")
        assert f"is in step 5: {ask}" in met and "Nothing was changed" in met
        late = "rank 1 did" if size == 2 else "rank 1, rank 2 did"
        assert f"but {late} not come within 0.5 s: {ask}, or wait longer (patience=)" in barrier
        said = {told for found in others for told in found["told"] if told}
        sentence = "rank 0 is in consolidate_state() while rank {} is in step 5: " + ask + "."
        # not on a rank that came late itself: the first that waits tells rank 0, which leaves
        assert said and said <= {(sentence.format(rank), "test_alone.py") for rank in range(1, size)}
        for found in (first, *others):
            assert found["whole"] == "" and found["sum"] == first["sum"] and found["steps"] == 9
    assert all(found["RadiusAdamW"]["told"][-1] == "" for found in ranks)  # who waits for rank 0 is patient
    for found in ranks:
        assert set(found["AdamS"]["told"]) <= {""}  # which has nothing to exchange
        differ, *alike = found["others"]
        assert differ.startswith("ValueError: ranks differ in consolidate_state(): rank 0 has RadiusAdamW, ")
        assert "rank 1 has SeparateAdam, " in differ and alike == ["", ""]
    assert "called on rank 1, but rank 0" in ranks[1]["not rank 0"]


def gone(rank: int, trainings: list, file: str) -> list[str]:
    meeting.LOOK_AFTER = 0.3
    training = trainings[0]
    for _ in range(3):
        training.backward(rank)
        training.optimizer.step()
    if rank == 1:
        os.kill(os.getpid(), 9)
    try:
        training.optimizer.consolidate_state(patience=1.0)
    except compopt.CommunicationError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_have_ended_are_not_waited_for(size):
    for told in run_lossy(gone, size, dying=1).values():
        assert re.search("rank 1(, rank 2)? did not come within 1 s: call it on all ranks", told[0])


def uncaught(rank: int, trainings: list, file: str) -> list[str]:
    meeting.LOOK_AFTER = 0.3
    training = trainings[0]
    for _ in range(3):
        training.backward(rank)
        training.optimizer.step()
    try:
        if rank == 0:
            training.optimizer.consolidate_state()
        training.backward(rank)
        training.optimizer.step()
    except compopt.CommunicationError as error:
        if rank == 0:
            os.kill(os.getpid(), 9)
        return [str(error)]
    return []


def test_the_others_say_why_rank_0_has_ended():
    for rank, told in run_lossy(uncaught, 3, dying=0).items():
        assert told[0].startswith(f"step 4 was not applied on rank {rank}: "), told
        assert told[0].endswith(" (another rank was in consolidate_state(): call it on all ranks)")
