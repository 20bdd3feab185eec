"""FSDP2 inside a node, compopt between nodes: what is exchanged while backward runs."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import loss, whole
from hsdp_models import differences, make
from ranks import run_ranks
from table import CASES, by_name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def cut(mesh) -> nn.Module:
    model = make()
    for part in (model.up, model.down, model.flat):
        fully_shard(part, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def run(name: str, mesh, overlapped: bool, backwards: int, steps: int) -> tuple[list, torch.Tensor]:
    """Steps in buckets of a module each; the optimizer's stats of every one, and its parameters."""
    model, rank = cut(mesh), mesh.get_rank()
    groups = [{"params": list(part.named_parameters())} for part in (model.up, model.norm, model.down, model.flat)]
    optimizer = by_name[name].make(groups, process_group=mesh.get_group("replicate"))
    optimizer._session.overlap.is_stopped = not overlapped
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(backwards):
            loss(model, 10 * step + part, rank).backward()
        optimizer.step()
        results.append(optimizer.stats)
    return results, whole(model)


def both(rank: int) -> dict[str, list[tuple[list[bool], bool, float]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {case.name: beside(case.name, mesh) for case in CASES}


def beside(name: str, mesh) -> list[tuple[list[bool], bool, float]]:
    """Compare which buckets left in backward, and whether that changes anything; of some with two backwards a step too.

    What replaces a payload in the second is the same for all classes.
    """
    results = []
    for backwards, steps in ((1, 6), (2, 4)) if name in ("RadiusAdamW", "SeparateAdam") else ((1, 6),):
        stats, parameters = run(name, mesh, True, backwards, steps)
        later, wanted = run(name, mesh, False, backwards, steps)
        assert {one.early_buckets for one in later} == {0} and not any(one.resent for one in stats)
        same = torch.equal(parameters, wanted)
        # a step after new masks of Radius begins with a word of every rank
        waits = [True, *("resample" in one.phase for one in stats[:-1])]
        left = [one.early_buckets == (0 if wait else 3) for one, wait in zip(stats, waits, strict=True)]
        results.append((left, same, differences(parameters)))
    return results


def replaced(rank: int) -> tuple[list[int], float]:
    """An optimizer that was made before over the same parameters is alive on rank 0 alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, held = cut(mesh), []
    for turn in range(2):
        groups = [{"params": list(part.named_parameters())} for part in (model.up, model.norm, model.down, model.flat)]
        optimizer = by_name["SeparateAdam"].make(groups, process_group=mesh.get_group("replicate"))
        overlapped = []
        for step in range(3):
            optimizer.zero_grad()
            loss(model, 10 * turn + step, rank).backward()
            optimizer.step()
            overlapped.append(optimizer.stats.early_buckets)
        held += [optimizer] if rank == 0 else []
    return overlapped, differences(whole(model))


def test_an_optimizer_that_was_replaced_sends_nothing_in_backward():
    assert run_ranks(replaced, 4) == [([0, 3, 3], 0.0)] * 4


@pytest.fixture(scope="module")
def runs():
    return run_ranks(both, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_buckets_leave_in_backward_and_the_step_is_the_same(runs, name):
    for results in runs:
        for left, same, apart in results[name]:
            assert all(left), "the first step gets acquainted, and the last bucket waits for step()"
            assert same and apart == 0
