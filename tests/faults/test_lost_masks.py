"""A mask that real ranks send each other behind the commit, and that one of them does not get."""

from __future__ import annotations

import time

import torch
from ranks import run_ranks
from torch import nn

import compopt
from compopt._wire.comm import Pending


def lose_a_mask(rank: int) -> dict:
    """Rank 1's wait for the broadcast of step 3 fails, after the message itself has gone its way."""
    wait = Pending.wait

    def failing(self):
        answer = wait(self)
        if rank == 1 and self.what.startswith("Broadcast") and optimizer.stats.step == 3:
            raise compopt.CommunicationError(f"{self.what} was made to fail")
        return answer

    Pending.wait = failing
    torch.manual_seed(0)
    model = nn.Linear(96, 64)
    optimizer = compopt.RadiusAdamW(model.parameters(), density=0.25, interval=100, warmup_steps=3)
    phases, since = [], time.perf_counter()
    for step in range(7):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(optimizer.stats.phase)
    mask = optimizer.state[model.weight]["mask"]
    return {"phases": phases, "mask": mask.tolist(), "sum": float(model.weight.sum()), "s": time.perf_counter() - since}


def test_real_ranks_choose_the_mask_anew_when_one_of_them_lost_it():
    ranks = run_ranks(lose_a_mask, 2)
    for found in ranks:
        assert found["phases"] == ["dense", "dense", "resample", "resample", "sparse", "sparse", "sparse"]
        assert found["mask"] == ranks[0]["mask"] and found["sum"] == ranks[0]["sum"]
        assert found["s"] < 10  # nobody waited for the timeout
