"""Refusals, and what docs/ddp.md and docs/huggingface.md say to write in their place, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import catch_message, run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

import compopt


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.policy, self.value = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.trunk(x).tanh())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def groups(model: TwoHeads) -> list[dict]:
    parts = [{"params": [*part.parameters()]} for part in model.children()]
    parts[2]["lr"] = 3e-3
    return parts


def heads_in_turns(model, optimizer, rank: int | None, steps: int = 6) -> torch.Tensor:
    """``rank`` None: a single process, on the mean over both ranks."""
    for step in range(steps):
        head = ("policy", "value")[step % 2]
        optimizer.zero_grad()
        for r in (0, 1) if rank is None else (rank,):
            loss = model(batch(r, step), head).square().mean()
            (loss / 2 if rank is None else loss).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def recipes(rank: int) -> dict[str, torch.Tensor | str]:
    from torch.distributed._composable import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp

    results: dict[str, torch.Tensor | str] = {}
    model = DDP(TwoHeads(), find_unused_parameters=True)
    base = torch.optim.AdamW(groups(model.module), lr=1e-3)
    results["one for both"] = heads_in_turns(model, compopt.Average(base, payload_dtype="float32"), rank)

    model = DDP(TwoHeads(), find_unused_parameters=True)
    first, second, third = ([*part.parameters()] for part in model.module.children())
    optimizers = [compopt.SeparateAdam([*first, *head]) for head in (second, third)]
    results["trunk"] = catch_message(RuntimeError, lambda: heads_in_turns(model, optimizers[1], rank))

    model = TwoHeads()
    replicate(model, find_unused_parameters=True)
    optimizer = compopt.SeparateAdam(model.parameters())
    results["replicate"] = catch_message(RuntimeError, lambda: heads_in_turns(model, optimizer, rank))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    model = replicate_by_fsdp(TwoHeads(), mesh=mesh)
    results["replicate by FSDP"] = catch_message(ValueError, lambda: compopt.SeparateAdam(model.parameters()))

    model = DDP(TwoHeads(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    optimizer = compopt.SeparateAdam(model.parameters())
    results["mixed precision"] = catch_message(RuntimeError, lambda: model(batch(rank, 0), "policy"))
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = compopt.SeparateAdam(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = heads_in_turns(model, optimizer, rank)
    first_rank = mine.clone()
    dist.broadcast(first_rank, 0)
    results["autocast"] = mine - first_rank
    return results


@pytest.fixture(scope="module")
def runs() -> list[dict]:
    return run_ranks(recipes, 2)


def test_one_optimizer_with_groups_steps_heads_in_turns_as_adamw_does(runs):
    model = TwoHeads()
    expected = heads_in_turns(model, torch.optim.AdamW(groups(model), lr=1e-3), None)
    for results in runs:
        torch.testing.assert_close(results["one for both"], expected, rtol=0, atol=1e-6)
        assert "make one optimizer, with a group for each part" in results["trunk"]


def test_refusals_name_what_to_write(runs):
    for results in runs:
        assert "replicate() does, use DistributedDataParallel in its place" in results["replicate"]
        assert "use DistributedDataParallel in place of replicate()" in results["replicate by FSDP"]
        assert "leave mixed_precision out, and call the model within torch.autocast" in results["mixed precision"]
        assert not results["autocast"].any()


def one_site(rank: int) -> list[float]:
    """In an HSDP mesh of one site: how far a simulated run of LocalSteps ends from one without."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("sites", "ranks"))

    def train(simulate: bool, **options) -> torch.Tensor:
        model = fully_shard(TwoHeads(), mesh=mesh["ranks"])
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = compopt.LocalSteps(
            inner, every=2, growth_steps=0, outer_lr=1.0, outer_momentum=0.0, payload_dtype="float32",
            process_group=mesh.get_group("sites"), simulate=simulate, **options,
        )  # fmt: skip
        for step in range(6):
            optimizer.zero_grad()
            model(batch(rank, step), "policy").square().mean().backward()
            optimizer.step()
        optimizer.end_round()
        optimizer.consolidate_state()
        return torch.cat([p.full_tensor().detach().view(-1) for p in model.parameters()])

    plain = train(False)
    return [float((train(True, **options) - plain).abs().max()) for options in ({}, {"delay": 1}, {"fragments": 2})]


def test_simulated_rounds_on_one_site_of_hsdp_average_what_the_site_has_moved():
    for distances in run_ranks(one_site, 2):
        assert max(distances) < 1e-6, distances


class TwoModes(torch.optim.SGD):
    """A base with train() and eval(), in which parameters are elsewhere: as Schedule-Free."""

    is_training = True

    def train(self) -> None:
        self._move(not self.is_training)

    def eval(self) -> None:
        self._move(self.is_training)

    def _move(self, is_other: bool) -> None:
        if is_other:
            self.is_training = not self.is_training
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(2.0 if self.is_training else 0.5)

    def step(self, closure=None):
        assert self.is_training
        return super().step(closure)


def joined(rank: int) -> list[float]:
    """LocalSteps with fragments and a delay in a Join of unequal data, evaluated and saved in eval mode."""
    far = []
    for options in ({"delay": 2}, {"fragments": 2, "delay": 1}):
        model = DDP(TwoHeads(), find_unused_parameters=True)
        optimizer = compopt.LocalSteps(TwoModes(model.parameters(), lr=1e-2), every=4, growth_steps=0, **options)
        for epoch in range(2):
            optimizer.train()
            with Join([model, optimizer]):
                for step in range(5 + 3 * rank + epoch):
                    optimizer.zero_grad()
                    model(batch(rank, 10 * epoch + step), "policy").square().mean().backward()
                    optimizer.step()
            optimizer.end_round()
            for change in (optimizer.eval, optimizer.consolidate_state):
                change()
                mine = nn.utils.parameters_to_vector(model.parameters()).detach()
                first = mine.clone()
                dist.broadcast(first, 0)
                far.append(float((mine - first).abs().max()))
            optimizer.load_state_dict(optimizer.state_dict())
    return far


def test_join_delay_fragments_and_two_modes_go_together():
    for far in run_ranks(joined, 2):
        assert far == [0.0] * 8
