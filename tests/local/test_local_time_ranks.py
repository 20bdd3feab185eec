"""Rounds by time on real ranks of unequal speed."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from local_runs import adamw
from oracles import local as oracle
from problems import gradients, weights
from ranks import run_ranks

import compopt
from compopt.integrations._shared import end_open_rounds

ROUNDS, SECONDS = 6, 0.4


def gradient(rank: int, t: int) -> list[torch.Tensor]:
    return gradients(rank + 1, t)[rank]


def unequal(rank: int, ranks: int) -> dict:
    """The last rank is slowed to a third."""
    params = [torch.nn.Parameter(w) for w in weights()]
    optimizer = compopt.LocalSteps(adamw(params), round_seconds=SECONDS, growth_steps=0, payload_dtype=None)
    found: dict = {"steps": [], "waits": [], "seconds": [], "weights": []}
    while optimizer.stats.round < ROUNDS:
        begun, rounds = time.perf_counter(), optimizer.stats.round
        time.sleep(0.09 if rank == ranks - 1 else 0.03)
        for p, g in zip(params, gradient(rank, optimizer.stats.applied_steps), strict=True):
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_averaged_by_its_steps(ranks):
    runs = run_ranks(unequal, ranks, ranks)
    counts = [list(row) for row in zip(*(run["steps"] for run in runs), strict=True)]
    assert any(row[0] > 1.5 * row[-1] for row in counts), counts  # a busy machine slows the others in some rounds
    for number, row in enumerate(counts):
        assert [run["weights"][number] for run in runs] == pytest.approx([n / sum(row) for n in row])
    for p, q in zip(runs[0]["params"], oracle.train_rounds(weights(), counts, gradient, adamw), strict=True):
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
            for p, g in zip(params, gradient(rank, optimizer.stats.applied_steps), strict=True):
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
