"""All ranks train on the same data: under DDP one warning that names the cause, without it a refusal. Real ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_models import Net
from ranks import run_ranks
from sim import Ranks
from table import CASES
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt

MAKERS = {
    "SeparateAdam": compopt.SeparateAdam,
    "RadiusAdamW": lambda params: compopt.RadiusAdamW(params, dense_steps=2),
    "TagcAdamW": lambda params: compopt.TagcAdamW(params, dense_steps=2),
    "Average": lambda params: compopt.Average(torch.optim.AdamW(params)),
    "LocalSteps": lambda params: compopt.LocalSteps(torch.optim.AdamW(params), 2, fragments=2, growth_steps=0),
    "LocalSteps, averaged start": lambda params: compopt.LocalSteps(torch.optim.AdamW(params), 2, dense_steps=2),
}


def train(model, optimizer, seed: int, steps: int = 8) -> list[str]:
    """The warnings about data of so many steps on data drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.randn(8, 96, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "DistributedSampler" in str(w.message)]


def train_under_ddp(rank: int) -> dict[str, list[list[str]]]:
    results = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        model = DDP(Net())
        same = train(model, make(model.parameters()), seed=0)
        model = DDP(Net())
        results[name] = [same, train(model, make(model.parameters()), seed=rank)]
    return results


def test_the_same_data_under_ddp_is_warned_of_once():
    first, second = run_ranks(train_under_ddp, 2)
    for name in MAKERS:
        same, different = first[name]
        assert len(same) == 1, (name, same)
        assert "the same data" in same[0] and "DistributedSampler" in same[0] and "seed" in same[0]
        assert different == [] and second[name] == [[], []]


def train_without_ddp(rank: int) -> dict[str, str]:
    results = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        model = Net()
        try:
            train(model, make(model.parameters()), seed=0)
        except RuntimeError as error:
            results[name] = str(error)
        dist.barrier()
    return results


def test_the_same_data_without_ddp_is_refused():
    for results in run_ranks(train_without_ddp, 2):
        for name in MAKERS:
            assert "all ranks hold bit-identical gradients" in results[name], name
            assert "compopt.attach" in results[name] and "Accelerator(cpu=True)" in results[name]


def start_without_gradients(rank: int) -> list[str]:
    """The first step is skipped everywhere, the second has nothing but zeros: neither shows anything."""
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = compopt.SeparateAdam(model.parameters())
    for factor in (float("nan"), 0.0):
        (factor * model(torch.randn(8, 96, generator=torch.Generator().manual_seed(0))).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return train(model, optimizer, seed=0)


def test_gradients_are_compared_in_the_first_step_that_has_some():
    first, second = run_ranks(start_without_gradients, 2)
    assert len(first) == 1 and second == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_that_were_averaged_before_are_refused(case, dtype):
    """In the first step that has gradients; steps of zeros before it show nothing. Later steps do not look."""
    ranks = Ranks(2, lambda: nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3)).to(dtype), case.make)

    def step(same: bool, scale: float = 1.0) -> None:
        for rank, model, _ in ranks:
            drawn = torch.Generator().manual_seed(10 * ranks.steps + (0 if same else rank))
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=drawn).mul_(scale).to(dtype)
        ranks.world.step(ranks.optimizers)
        ranks.steps += 1

    step(True, scale=0.0)
    with pytest.raises(RuntimeError, match=r"bit-identical.*compopt\.attach"):
        for _ in range(5):  # local steps look when they first exchange
            step(True)
    if not isinstance(ranks.optimizers[0], compopt.LocalSteps):
        assert {optimizer._session.steps for optimizer in ranks.optimizers} == {1}
    step(False)
    step(True)
    step(False)
    ranks.assert_replicas_equal()
