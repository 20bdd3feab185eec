"""DDP inside a site, compopt between sites: two sites of two gloo processes each."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import loss, whole
from hsdp_models import Net, differences, hsdp
from ranks import catch_message, run_ranks
from sim import Ranks
from table import CASES, FORMS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine.module_hooks import copy_first_parameters
from compopt._engine.resharding import average_state

TRACKED = dict(lr=1e-2, rank=4, dense_steps=2)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def in_sites(mesh: DeviceMesh, make_optimizer, model: nn.Module | None = None, **options):
    model = DDP(model or make(), process_group=mesh.get_group("shard"))
    return model, make_optimizer(model.parameters(), process_group=mesh.get_group("replicate"), **options)


def train(model: nn.Module, optimizer, steps, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


def loss_of_site(model: nn.Module, site: int, step: int) -> torch.Tensor:
    return (loss(model, step, 2 * site) + loss(model, step, 2 * site + 1)) / 2


def simulated(make_optimizer, steps: int) -> list[torch.Tensor]:
    """Two ranks, each with the batches of a site: their parameters."""
    sites = Ranks(2, make, make_optimizer)
    sites.train(loss_of_site, steps)
    return [whole(model) for model in sites.models]


def tracked(params, **options) -> compopt.SeparateAdam:
    return compopt.SeparateAdam(params, **TRACKED | options)


IN_INT8 = functools.partial(tracked, residual_dtype="int8")
MAKES = {"tracked": tracked, "residual in int8": IN_INT8, **{case.name: case.make for case in CASES + FORMS}}
MAIN = ["residual in int8", "Average", "LocalSteps, rounds"]


def every_method(rank: int, wanted: dict[str, list[torch.Tensor]]) -> dict[str, dict[str, float]]:
    mesh, results = make_mesh(), {}
    for name, parameters in wanted.items():
        model, optimizer = in_sites(mesh, MAKES[name])
        train(model, optimizer, range(7), rank)
        site = whole(model)
        dist.broadcast(site, 2 * (rank // 2), group=mesh.get_group("shard"))
        results[name] = {
            "far": float((whole(model) - parameters[rank // 2]).abs().max()),
            "inside": float((whole(model) - site).abs().max()),
        }
    return results


def check_methods(names: list[str]) -> None:
    for rank in run_ranks(every_method, 4, {name: simulated(MAKES[name], 7) for name in names}):
        for name, found in rank.items():
            assert found["far"] < 1e-6 and found["inside"] == 0, (name, found)


def test_two_sites_are_two_ranks_with_the_batches_of_a_site():
    check_methods(MAIN)


@pytest.mark.slow
def test_all_other_classes_and_forms_are_too():
    check_methods([name for name in MAKES if name not in MAIN])


def beside_hsdp(rank: int) -> dict[str, float]:
    """FSDP2 and DDP inside the site are equal where nothing depends on how tensors are cut."""
    mesh, results = make_mesh(), {}
    for name, make_optimizer in {
        "SeparateAdam": lambda params, **options: tracked(params, dense_steps=9, payload_dtype=None, **options),
        "LocalSteps": lambda params, **options: compopt.LocalSteps(
            torch.optim.AdamW(params, lr=1e-2), every=3, growth_steps=0, payload_dtype=None, **options
        ),
    }.items():
        model, optimizer = in_sites(mesh, make_optimizer, max_grad_norm=0.5)
        shards, beside = hsdp(mesh, make_optimizer, make(), max_grad_norm=0.5)
        for one in ((model, optimizer), (shards, beside)):
            train(*one, range(7), rank)
        results[name] = float((whole(model) - whole(shards)).abs().max())
        results[f"{name}, norm"] = abs(optimizer.stats.grad_norm / beside.stats.grad_norm - 1)
    return results


def faults(rank: int) -> dict[str, object]:
    mesh, results = make_mesh(), {}

    torch.manual_seed(rank)  # every rank begins with other parameters
    model, optimizer = in_sites(mesh, tracked, Net().double())
    train(model, optimizer, range(4), rank)
    results["other starts"] = differences(whole(model))

    before = whole(model)
    optimizer.zero_grad()
    loss(model, 4, rank).backward()
    if rank == 3:  # behind DDP's own average, so that the rest of the site cannot see it
        model.module.up.weight.grad[0, 0] = float("nan")
    optimizer.step()
    results["skipped"] = optimizer.stats.phase == "skipped" and torch.equal(whole(model), before)

    optimizer.zero_grad()
    loss(model, 5, rank).backward()
    if rank == 1:
        model.module.up.weight.grad = model.module.up.weight.grad.to_sparse()
    results["error"] = catch_message(Exception, optimizer.step)
    results["unchanged"] = torch.equal(whole(model), before)

    for step, flag in ((6, False), (8, True)):
        model.module.down.weight.requires_grad_(flag)
        frozen = model.module.down.weight.detach().clone()
        model = DDP(model.module, process_group=mesh.get_group("shard"))
        train(model, optimizer, range(step, step + 2), rank)
        has_moved = not torch.equal(frozen, model.module.down.weight)
        results[f"trained {flag}"] = has_moved == flag
    results["frozen and back"] = differences(whole(model))
    return results


def resumed(rank: int, folder: str) -> dict[str, float]:
    """Saved by two sites with torch.distributed.checkpoint, loaded by them, and by four ranks under a DDP of all."""
    mesh = make_mesh()
    model, optimizer = in_sites(mesh, IN_INT8)
    train(model, optimizer, range(4), rank)
    optimizer.consolidate_state()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    again, same = in_sites(mesh, IN_INT8)
    flat = DDP(make())
    over_all = IN_INT8(flat.parameters())
    for one in ((again, same), (flat, over_all)):
        weights, state = get_state_dict(*one)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(*one, model_state_dict=weights, optim_state_dict=state)
    for one in ((model, optimizer), (again, same), (flat, over_all)):
        train(*one, range(4, 7), rank)
    return {"same": float((whole(model) - whole(again)).abs().max()), "all": differences(whole(flat))}


def in_groups(params, **options) -> compopt.SeparateAdam:
    params = list(params)
    return tracked([{"params": params[n::2]} for n in range(2)], **options)


def several_buckets(rank: int) -> tuple[float, bool]:
    """Nothing is sent before DDP has averaged it, and then sent again."""
    model, optimizer = in_sites(make_mesh(), in_groups)
    again = False
    for step in range(5):
        train(model, optimizer, range(step, step + 1), rank)
        again |= optimizer.stats.resent or optimizer.stats.early_buckets > 0
    assert optimizer.stats.buckets == 2
    return float((whole(model) - simulated(in_groups, 5)[rank // 2]).abs().max()), again


def refused(rank: int) -> str:
    pair, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank > 1:
        return ""
    model = DDP(make(), process_group=pair)
    optimizer = tracked(model.parameters(), process_group=three)
    return catch_message(ValueError, lambda: compopt.attach(model, optimizer))


def used(rank: int, folder: str) -> dict[str, object]:
    return {
        "hsdp": beside_hsdp(rank),
        "faults": faults(rank),
        "resumed": resumed(rank, folder),
        "several buckets": several_buckets(rank),
        "refused": refused(rank),
    }


@pytest.fixture(scope="module")
def uses(tmp_path_factory):
    return run_ranks(used, 4, str(tmp_path_factory.mktemp("sites")))


@pytest.mark.slow
def test_it_is_what_hsdp_is(uses):
    for rank in uses:
        assert max(rank["hsdp"].values()) < 1e-9, rank["hsdp"]


def test_nan_errors_and_frozen_parameters_concern_all_sites(uses):
    for rank in uses:
        found = rank["faults"]
        assert found["other starts"] == found["frozen and back"] == 0, found
        assert found["skipped"] and found["error"] and found["unchanged"], found
        assert found["trained False"] and found["trained True"], found


def test_checkpoints_go_on_in_sites_and_without(uses):
    for rank in uses:
        assert rank["resumed"] == {"same": 0, "all": 0}


def test_gradients_leave_after_ddp_has_averaged_them(uses):
    for rank in uses:
        far, again = rank["several buckets"]
        assert far < 1e-6 and not again


def test_groups_that_share_more_ranks_are_refused(uses):
    for rank in uses[:2]:
        assert "process_group of the optimizer has ranks [0, 1, 2]" in rank["refused"]
        assert "groups with one rank in common" in rank["refused"]


def strides_of_a_rank(rank: int) -> list[bool]:
    """Rank 1 has a parameter in another order in memory than rank 0; another one has gaps on both."""
    ordered = torch.arange(20.0).view(5, 4)
    gapped = torch.full((4, 10), -1.0)
    params = [ordered.t().contiguous().t() if rank else ordered, gapped[:, :5]]
    wanted = [ordered.clone(), ordered.view(4, 5).clone()]
    for p, values in zip(params, wanted, strict=True):
        p.copy_(values + 100 * rank)
    optimizer = compopt.SeparateAdam(map(torch.nn.Parameter, params))
    copy_first_parameters(optimizer._engine)
    results = [torch.equal(p, values) for p, values in zip(params, wanted, strict=True)]
    params[0].add_(2 * rank)
    average_state(params[0], torch.device("cpu"), optimizer.comm)
    return [*results, torch.equal(params[0], wanted[0] + 1), bool((gapped[:, 5:] == -1).all())]


def test_ranks_may_hold_parameters_with_other_strides():
    assert run_ranks(strides_of_a_rank, 2) == [[True] * 4] * 2
