"""FSDP2 inside a node, compopt between nodes: real fully_shard on 2 x 2 gloo processes, tensor parallelism on 2 x 2 x 2."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from table import CASES, Case, by_name
from test_ddp import said
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compopt

EVERY = [case.name for case in CASES]


class Net(nn.Module):
    """Two matrices that are compressed, one with an odd number of rows; one whose second shard is empty, as is a bias's."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 99), nn.LayerNorm(99), nn.Linear(99, 64)
        self.wide, self.flat = nn.Linear(64, 4096, bias=False), nn.Linear(4096, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.norm(self.up(x)).tanh())
        return self.flat(self.wide(x).tanh())


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def loss(model: nn.Module, step: int, who: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + who)
    x = torch.randn(4, 64, generator=generator, dtype=dtype)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def hsdp(mesh: DeviceMesh, make_optimizer, model: nn.Module | None = None, **options):
    model = fully_shard(model or make(), mesh=mesh["shard"])
    return model, make_optimizer(model.parameters(), process_group=mesh.get_group("replicate"), **options)


def train(model: nn.Module, optimizer, steps, who: int, dtype: torch.dtype = torch.float64) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, who, dtype).backward()
        optimizer.step()


def whole(model: nn.Module) -> torch.Tensor:
    """All parameters, gathered from the shards."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])


def differences(mine: torch.Tensor) -> float:
    first = mine.clone()
    dist.broadcast(first, 0)
    return float((mine - first).abs().max())


def reference(case: Case, steps: int, ranks: int) -> torch.Tensor:
    """torch's optimizer on the gradient of all ranks' data, in one process."""
    model = make()
    optimizer = case.reference(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, step, who) for who in range(ranks)) / ranks).backward()
        optimizer.step()
    return whole(model)


def trained(rank: int) -> dict[str, dict]:
    """For each class: lossless against torch's, replicas of the compressed run, bytes, skipping on an inf, clipping."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for case in CASES:
        model, optimizer = hsdp(mesh, lambda p, **o: case.make(p, **{**case.lossless, **o}), lr=1e-2)  # noqa: B023
        train(model, optimizer, range(5), rank)
        far = float((whole(model) - reference(case, 5, 4)).abs().max())

        model, optimizer = hsdp(mesh, case.make)
        train(model, optimizer, range(7), rank)
        stats = optimizer.stats
        before = whole(model)
        optimizer.zero_grad()
        (loss(model, 7, rank) * (float("inf") if rank == 3 else 1)).backward()
        optimizer.step()
        found[case.name] = {
            "far": far,
            "apart": differences(before),
            "share": stats.bytes_sent / stats.bytes_dense,
            "local": [p.to_local().numel() for p in model.parameters()],
            "skipped": optimizer.stats.phase,
            "moved": float((whole(model) - before).abs().max()),
            "like": [
                (name, value.placements == p.placements and value.shape == p.shape)
                for p in model.parameters() for name, value in optimizer.state_dict()["state"][0].items()
                if p is next(iter(model.parameters())) and value.dim()
            ],
        }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def runs():
    return run_ranks(trained, 4)


@pytest.mark.parametrize("name", EVERY)
def test_lossless_is_the_reference_on_the_average_of_all_four(runs, name):
    assert all(rank[name]["far"] < 1e-9 for rank in runs)


@pytest.mark.parametrize("name", EVERY)
def test_compressed_replicas_stay_equal_with_empty_shards_too(runs, name):
    assert any(0 in rank[name]["local"] for rank in runs)
    for rank in runs:
        assert rank[name]["apart"] == 0
        assert rank[name]["share"] < (0.7 if name != "AdamS" else 1.01)


@pytest.mark.parametrize("name", EVERY)
def test_an_inf_in_one_shard_makes_every_shard_skip(runs, name):
    assert all(rank[name]["skipped"] == "skipped" and rank[name]["moved"] == 0 for rank in runs)


@pytest.mark.parametrize("name", EVERY)
def test_state_is_laid_out_as_the_parameter(runs, name):
    assert all(same for rank in runs for _, same in rank[name]["like"])
    assert runs[0][name]["like"]
