"""Under the real DistributedDataParallel: the swap of the class is the only change, refusals, DDP inside a site."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_models import Net, batch, plain, radius
from fsdp_models import loss, whole
from hsdp_models import Net as CutNet
from hsdp_models import differences, hsdp
from ranks import catch_message, run_ranks
from sim import Ranks
from slow_rows import selected, slow_but
from table import CASES, FORMS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._state import buckets as _buckets


def lossless(params):
    return radius(params, density=1.0)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def accumulated(model, optimizer, step, made):
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            (model(batch(step, micro)).square().mean() / 3).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_locally(model, optimizer, step, made):
    model(batch(step)).square().mean().backward()
    for p in model.parameters():  # the same factor everywhere, so that the mean of clipped is the clipped mean
        p.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def skipped_loss(model, optimizer, step, made):
    if step % 3 == 2:
        model(100 * batch(step)).square().mean().backward()
        optimizer.zero_grad()
    plain(model, optimizer, step, made)


def set_to_zero(model, optimizer, step, made):
    optimizer.zero_grad(set_to_none=False)
    model(batch(step)).square().mean().backward()
    optimizer.step()


def some_unused(model, optimizer, step, made):
    model(batch(step), branch=(step + dist.get_rank()) % 3 > 0).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def none_use_it(model, optimizer, step, made):
    model(batch(step), branch=step % 2 > 0).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


SCRIPTS = {
    "plain": (plain, {}),
    "accumulated": (accumulated, {}),
    "changed after backward": (clipped_locally, {}),
    "skipped loss": (skipped_loss, {}),
    "grads set to zero": (set_to_zero, {}),
    "some ranks do not use a layer": (some_unused, {"find_unused_parameters": True}),
    "no rank uses a layer": (none_use_it, {"find_unused_parameters": True}),
    "static graph": (plain, {"static_graph": True}),
    "bucket views": (plain, {"gradient_as_bucket_view": True}),
    "bucket views, accumulated": (accumulated, {"gradient_as_bucket_view": True}),
    "small DDP buckets": (plain, {"bucket_cap_mb": 0.05}),
    "compiled": (plain, {"compiled": True}),
}
SLOW = ["skipped loss", "grads set to zero", "no rank uses a layer", "bucket views", "bucket views, accumulated"]


def train(script, options: dict, make_optimizer, steps: int = 7, optimizer_first: bool = False):
    options = dict(options)
    compiled = options.pop("compiled", False)
    torch.manual_seed(0)
    net = Net()
    optimizer = make_optimizer(net.parameters()) if optimizer_first else None
    model = DDP(net, **options)
    optimizer = optimizer or make_optimizer(model.parameters())
    model = torch.compile(model, backend="eager") if compiled else model
    for step in range(steps):
        script(model, optimizer, step, None)
    return nn.utils.parameters_to_vector(net.parameters()).detach(), optimizer


def all_scripts(rank: int, names: list[str]) -> dict[str, list[float]]:
    """For each script: the lossless run's distance from DDP + AdamW, the compressed run's from rank 0's, and stats."""
    torch.set_default_dtype(torch.float64)  # AdamW turns rounding of tiny gradients into steps of size lr
    _buckets.BUCKET_BYTES = 160_000  # several buckets
    results = {}
    for name, (script, options) in ((name, SCRIPTS[name]) for name in names):
        wanted, _ = train(script, options, adamw)
        got, _ = train(script, options, lossless, optimizer_first=name == "plain")
        mine, optimizer = train(script, options, radius)
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        stats = optimizer.stats
        distance = float((got - wanted).abs().max()), float((mine - theirs).abs().max())
        results[name] = [*distance, stats.early_buckets, stats.buckets, stats.bytes_sent / stats.bytes_dense]
        gc.collect()
    return results


@pytest.fixture(scope="module")
def scripts(request):
    return run_ranks(all_scripts, 2, selected(request, "name"))


@pytest.mark.parametrize("name", slow_but(lambda name: name not in SLOW, SCRIPTS))
def test_a_script_written_for_adamw_trains_the_same(scripts, name):
    for rank in scripts:
        from_adamw, from_rank_0, overlapped_buckets, buckets, share = rank[name]
        assert from_adamw < 1e-9, "lossless RadiusAdamW is not DDP + AdamW"
        assert from_rank_0 == 0, "replicas differ"
        assert share < 0.6 or name in ("changed after backward", "skipped loss")  # those were sent twice
        overlapped = name not in ("changed after backward",)
        assert overlapped_buckets == (buckets - 1 if overlapped else 0)


def when_the_optimizer_is_gone(rank: int) -> float:
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = radius(model.parameters())
    plain(model, optimizer, 0, None)
    del optimizer
    gc.collect()
    dense = torch.optim.AdamW(model.parameters())
    plain(model, dense, 1, None)
    return float(nn.utils.parameters_to_vector(model.parameters()).double().sum())


def test_ddp_averages_again_when_the_optimizer_is_gone():
    first, second = run_ranks(when_the_optimizer_is_gone, 2)
    assert first == second


def two_optimizers(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = DDP(Net())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [radius(matrices), compopt.RadiusAdamW(rest, lr=1e-3, density=1.0)]
    for step in range(6):
        model(batch(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [float(p.double().sum()) for p in model.parameters()]


def test_two_optimizers_may_share_one_ddp():
    first, second = run_ranks(two_optimizers, 2)
    assert first == second


def refusals(rank: int) -> dict[str, str]:
    results = {}
    torch.manual_seed(0)

    def forward_backward(model):
        model(batch(0)).square().mean().backward()

    selected = DDP(Net())
    selected.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    optimizer = radius(selected.parameters())
    results["hook taken"] = catch_message(RuntimeError, lambda: forward_backward(selected))

    model = DDP(Net())
    optimizer = radius(list(model.parameters())[:-2])
    results["parameters of nobody"] = catch_message(RuntimeError, lambda: forward_backward(model))

    optimizer = radius(Net().parameters())
    results["no DDP"] = catch_message(ValueError, lambda: compopt.attach(Net(), optimizer))
    del optimizer

    nested = DDP(DDP(Net()))
    optimizer = radius(nested.parameters())
    results["DDP within a DDP"] = catch_message(RuntimeError, lambda: forward_backward(nested))

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DDP(Net())
    optimizer = radius(model.parameters())
    results["reducer in Python"] = catch_message(RuntimeError, lambda: forward_backward(model))

    net = Net()
    optimizer = radius(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    results["averaged before"] = catch_message(RuntimeError, optimizer.step)

    params = list(Net().parameters())[:3]
    optimizer = radius(params if rank == 0 else params[::-1])
    results["other order"] = catch_message(ValueError, optimizer.step)
    results["other shapes"] = catch_message(ValueError, radius(params[:2] if rank == 0 else params[1::-1]).step)
    torch.manual_seed(rank)
    results["other weights"] = catch_message(ValueError, radius(Net().named_parameters()).step)
    optimizer = radius(params, density=0.5 if rank == 0 else 0.25)
    results["other density"] = catch_message(ValueError, optimizer.step)
    return results


def test_refusals_say_what_is_wrong():
    for results in run_ranks(refusals, 2):
        assert "comm hook already" in results["hook taken"]
        assert "belong to no compopt optimizer (branch.weight, branch.bias" in results["parameters of nobody"]
        assert "no DistributedDataParallel" in results["no DDP"]
        assert "set optimize_ddp = 'ddp_optimizer'" in results["reducer in Python"]
        assert (
            "wraps another one" in results["DDP within a DDP"] and "wrap the model once" in results["DDP within a DDP"]
        )
        assert "compopt.attach" in results["averaged before"]
        assert "parameter 0 of group 0, checksum of its values: rank 0 has" in results["other order"]
        assert "shape: rank 0 has (96, 96), rank 1 has (96,). Build the same model" in results["other shapes"]
        assert "layers.0.weight, checksum of its values" in results["other weights"]
        assert "group 0, density: rank 0 has 0.5, rank 1 has 0.25. Make them equal." in results["other density"]


TRACKED = dict(lr=1e-2, rank=4, dense_steps=2)


def make() -> nn.Module:
    torch.manual_seed(0)
    return CutNet().double()


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def in_sites(mesh: DeviceMesh, make_optimizer, model: nn.Module | None = None, **options):
    model = DDP(model or make(), process_group=mesh.get_group("shard"))
    return model, make_optimizer(model.parameters(), process_group=mesh.get_group("replicate"), **options)


def train_in_sites(model: nn.Module, optimizer, steps, rank: int) -> None:
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
        train_in_sites(model, optimizer, range(7), rank)
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
            train_in_sites(*one, range(7), rank)
        results[name] = float((whole(model) - whole(shards)).abs().max())
        results[f"{name}, norm"] = abs(optimizer.stats.grad_norm / beside.stats.grad_norm - 1)
    return results


def faults(rank: int) -> dict[str, object]:
    mesh, results = make_mesh(), {}

    torch.manual_seed(rank)  # every rank begins with other parameters
    model, optimizer = in_sites(mesh, tracked, CutNet().double())
    train_in_sites(model, optimizer, range(4), rank)
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
        train_in_sites(model, optimizer, range(step, step + 2), rank)
        has_moved = not torch.equal(frozen, model.module.down.weight)
        results[f"trained {flag}"] = has_moved == flag
    results["frozen and back"] = differences(whole(model))
    return results


def resumed(rank: int, folder: str) -> dict[str, float]:
    """Saved by two sites with torch.distributed.checkpoint, loaded by them, and by four ranks under a DDP of all."""
    mesh = make_mesh()
    model, optimizer = in_sites(mesh, IN_INT8)
    train_in_sites(model, optimizer, range(4), rank)
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
        train_in_sites(*one, range(4, 7), rank)
    return {"same": float((whole(model) - whole(again)).abs().max()), "all": differences(whole(flat))}


def in_groups(params, **options) -> compopt.SeparateAdam:
    params = list(params)
    return tracked([{"params": params[n::2]} for n in range(2)], **options)


def several_buckets(rank: int) -> tuple[float, bool]:
    """Nothing is sent before DDP has averaged it, and then sent again."""
    model, optimizer = in_sites(make_mesh(), in_groups)
    again = False
    for step in range(5):
        train_in_sites(model, optimizer, range(step, step + 1), rank)
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
