"""A mask that real ranks send each other behind the commit, and that one of them does not get."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import FOREVER, run_ranks
from torch import nn

import compopt
from compopt._engine import missing_ranks
from compopt._wire.collectives import PendingCollective


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
