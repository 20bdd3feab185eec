"""An optimizer that is made, saved or loaded before torch.distributed is initialised still averages, over all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import FOREVER, run_ranks
from torch import nn

import compopt

MAKE = {
    "RadiusAdamW": lambda ps: compopt.RadiusAdamW(ps, lr=1e-2, density=1.0, dense_steps=0, interval=2),
    "SeparateAdam": lambda ps: compopt.SeparateAdam(ps, lr=1e-2, projection="gaussian", ratio=1),
    "TagcAdamW": lambda ps: compopt.TagcAdamW(ps, lr=1e-2, density=1.0),
    "bfloat16": lambda ps: compopt.TagcAdamW([p.data.bfloat16().requires_grad_() for p in ps], lr=1e-2, density=0.5),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 3)).double()


def gradients(params: list[torch.Tensor], step: int, rank: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(p.shape, generator=drawn, dtype=torch.float64) for p in params]


def train(optimizer: torch.optim.Optimizer, steps: range, rank: int, averaged: bool) -> torch.Tensor:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        local = gradients(params, step, rank)
        both = [(a + b) / 2 for a, b in zip(local, gradients(params, step, 1 - rank), strict=True)]
        for p, g in zip(params, both if averaged else local, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return nn.utils.parameters_to_vector(params).detach().double()


def late(rank: int, folder: str) -> dict[str, list]:
    """How far each class ends from AdamW on averaged gradients, and from the other rank."""
    dist.barrier()
    dist.destroy_process_group()
    made = {name: make(list(net().parameters())) for name, make in MAKE.items()}
    for name, optimizer in made.items():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if name != "AdamW":
            assert optimizer.stats.residual_norm() == 0 and optimizer.comm.size == 1
        train(optimizer, range(2), 0, averaged=False)  # alone: two steps, of the same data on all ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2, timeout=FOREVER)
    assert made["RadiusAdamW"].state_dict()["param_groups"][0]["residuals"] == f"rank {rank} of 2"
    wanted = train(made["AdamW"], range(2, 5), rank, averaged=True)
    results = {}
    for name in list(MAKE)[:-1]:
        got = train(made[name], range(2, 5), rank, averaged=False)
        theirs = got.clone()
        dist.broadcast(theirs, 0)
        sizes = [entry["exp_avg"].numel() for entry in made[name].state.values()]
        results[name] = [
            made[name].comm.size,
            float((got - theirs).abs().max()),
            float((got - wanted).abs().max()),
            sizes,
        ]
    return results


def test_ranks_that_meet_after_the_optimizer_was_made(tmp_path):
    first, second = run_ranks(late, 2, str(tmp_path))
    for name in list(MAKE)[:-1]:
        for ranks, from_rank_0, from_adamw, _ in (first[name], second[name]):
            assert ranks == 2, f"{name} stayed alone"
            assert from_rank_0 == 0, f"{name}: replicas differ"
            assert from_adamw < 1e-12 or name == "bfloat16"
    for name in ("TagcAdamW", "bfloat16"):  # moments were cut for two ranks
        owned = sorted(a + b for a, b in zip(first[name][3], second[name][3], strict=True))
        assert owned == [3, 80, 240, 5600]


@pytest.mark.parametrize("name", ["RadiusAdamW", "TagcAdamW"])
def test_one_process_trains_without_torch_distributed(name):
    optimizer = MAKE[name](list(net().parameters()))
    comm = optimizer.comm
    train(optimizer, range(3), 0, averaged=False)
    assert optimizer.comm is comm and comm.size == 1
