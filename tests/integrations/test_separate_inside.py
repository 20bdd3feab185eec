"""SEPARATE and Average inside FSDP2: real fully_shard over the ranks that average, on gloo processes."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Two, apart, cut, loss, make, train, whole
from ranks import catch_message, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt._state.tensors import to_local

KINDS = {
    # blocks of rows that divide no number of rows; residuals are set to zero after the fourth of five steps
    "gaussian": {"projection": "gaussian", "ratio": 4, "block_rows": 24, "reset_interval": 4},
    "tracked": {"projection": "tracked", "rank": 4},
}


def separate(params, **options) -> compopt.SeparateAdam:
    options = {"dense_steps": 2, "payload_dtype": None, "lr": 1e-2, **options}
    return compopt.SeparateAdam(params, **options)


def around(params, **options) -> compopt.Separate:
    base = torch.optim.SGD([p for _, p in params], lr=1e-3, momentum=0.9)
    return compopt.Separate(base, **{"dense_steps": 2, "payload_dtype": None, **options})


def mean_residuals(optimizer, model: nn.Module) -> dict[str, Tensor]:
    params = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return {n: s["residual"] for n, p in params.items() if "residual" in (s := optimizer.state[p])}


def beside_ddp(who: int, kind=separate, backwards: int = 1, **options) -> dict[str, float]:
    """Beside the same optimizer under DistributedDataParallel: 5 steps, of which 2 are dense."""
    fsdp, ddp = cut(make()), DistributedDataParallel(make())
    inside = kind(list(fsdp.named_parameters()), **options)
    outside = kind(list(ddp.named_parameters()), **options)
    train(fsdp, inside, range(5), who, backwards=backwards)
    train(ddp, outside, range(5), who, backwards=backwards)
    assert inside.stats.phase == outside.stats.phase == "projected"
    values = sum(inside.estimate_values_sent(bucket, dist.get_world_size()) for bucket in inside._buckets)
    ours, theirs = mean_residuals(inside, fsdp), mean_residuals(outside, ddp)
    return {
        "apart": apart(fsdp, ddp),
        # the first line's bytes, of float64, in times those of stats
        "told": 8 * dist.get_world_size() * values * backwards / inside.stats.bytes_sent,
        "owed": max(float((ours[n] - theirs[n]).abs().max()) for n in theirs),
        "norm": abs(inside.stats.grad_norm / outside.stats.grad_norm - 1),
    }


def conserved(rank: int) -> dict[str, float]:
    """A step applies, with what ranks hold back, the mean of their gradients; of these the first waits."""
    results = {}
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, options, policy in (
        ("bfloat16 on the wire", {"payload_dtype": "bfloat16"}, None),
        ("mixed precision", {}, low),
    ):
        more = {} if policy is None else {"mp_policy": policy}
        ours, theirs = (cut(make(dtype=torch.float32), **more) for _ in range(2))
        options = {"projection": "tracked", "payload_dtype": "auto", **options}
        optimizer = separate(list(ours.named_parameters()), **{**options, "dense_steps": 0})
        for model in (ours, theirs):
            for turn in range(2):
                model.set_requires_gradient_sync(turn == 1)
                loss(model, turn, rank, torch.float32).backward()
        optimizer.step()
        results[name] = 0.0
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            got, wanted = p.grad.full_tensor(), q.grad.full_tensor()
            rest = optimizer.state[p].get("residual", torch.zeros_like(got)).clone()
            dist.all_reduce(rest)
            far = (got + rest / dist.get_world_size() - wanted).norm() / wanted.norm()
            results[name] = max(results[name], float(far))
    return results


def cut_otherwise(rank: int) -> float:
    """Matrices cut along their last dimension, groups of one module with options of their own, gradients set to 0, and
    a rank that changes between steps. At last it changes between a backward and its step.
    """
    models, optimizers = [make(Two), make(Two)], []
    fully_shard(models[0], shard_placement_fn=lambda p: Shard(p.dim() - 1))
    models[1] = DistributedDataParallel(models[1])
    for model in models:
        params = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
        groups = [
            {"params": [x for x in params if "down" in x[0]], "rank": 2},
            {"params": [x for x in params if "flat" in x[0]], "dense_steps": 3},
        ]
        optimizer = separate(groups, **KINDS["tracked"])
        for step in range(6):
            optimizer.param_groups[0]["rank"] = 2 if step < 4 else 3
            optimizer.zero_grad(set_to_none=False)
            loss(model, step, rank).backward()
            optimizer.step()
        optimizers.append(optimizer)
    distance = apart(*models)
    for change in ({"rank": 4}, {}, {"projection": "gaussian"}, {"projection": "tracked"}, {}):
        optimizers[0].zero_grad()
        loss(models[0], 6, rank).backward()
        optimizers[0].param_groups[0].update(change)
        optimizers[0].step()
    assert optimizers[0].state[models[0].down.weight]["basis"].count_nonzero() == 4 * 64
    return distance


def cleared_on_one_rank(rank: int) -> float:
    """A gradient that is cleared on one rank only: that rank's shard takes the step of a gradient of zeros."""
    models = [cut(make(Two)), cut(make(Two))]
    for model, is_none in zip(models, (True, False), strict=True):
        optimizer, weight = around(list(model.named_parameters()), **KINDS["tracked"]), model.down.weight
        train(model, optimizer, range(3), rank)
        optimizer.zero_grad()
        loss(model, 3, rank).backward()
        if rank == 1 and is_none:
            weight.grad = None
        elif rank == 1:
            weight.grad.to_local().zero_()
        optimizer.step()
    return apart(*models)


def copied() -> bool:
    """A state dict is copied and saved by torch: the local parts of its DTensors begin their storages."""
    model = cut(make(Two))
    optimizer = separate(list(model.named_parameters()), **KINDS["tracked"])
    train(model, optimizer, range(4), dist.get_rank())
    state, file = optimizer.state_dict(), io.BytesIO()
    torch.save(state, file)
    pairs = zip(state["state"].values(), copy.deepcopy(state)["state"].values(), strict=True)
    return all(torch.equal(to_local(one[name]), to_local(other[name])) for one, other in pairs for name in one)


def resumed(rank: int) -> float:
    """Loaded after the dense steps, rounded to int8; the distance from the run that was not interrupted."""
    models = [cut(make()) for _ in range(2)]
    first, second = (separate(list(m.named_parameters()), payload_dtype="int8", rank=4) for m in models)
    train(models[0], first, range(3), rank)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(first.state_dict())
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(3, 5), rank)
    return apart(*models)


def compiled_in_place(rank: int) -> tuple[str, float]:
    """No hook of a module runs before the first forward of such a model; and the distance from one not compiled."""
    models = [cut(make()) for _ in range(2)]
    models[1].compile(backend="eager")
    for model in models:
        train(model, optimizer := separate(list(model.named_parameters())), range(4), rank)
    return optimizer.stats.phase, apart(*models)


def refused(rank: int) -> dict[str, str]:
    results, model = {}, cut(make())
    params = list(model.named_parameters())
    for name, options in (
        ("adaptive", {"adaptive": True, "projection": "gaussian"}),
        ("auto", {"when": "auto"}),
    ):
        results[name] = catch_message(ValueError, lambda options=options: separate(params, **options))
    model = cut(make(dtype=torch.float32))
    optimizer, scaler = separate(list(model.named_parameters())), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(model, 0, rank, torch.float32)).backward()
    results["scaler"] = catch_message(RuntimeError, lambda: scaler.step(optimizer))
    return results


def shared(rank: int, kind) -> Tensor:
    """Matrices are averaged by Separate, the rest of the same modules by ``kind``."""
    model = cut(make())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(matrices, lr=1e-2)
    first = compopt.Separate(adamw, dense_steps=2, payload_dtype=None, **KINDS["tracked"])
    second = kind(torch.optim.AdamW(rest, lr=1e-2))
    for step in range(4):
        loss(model, step, rank).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def second_optimizers(rank: int) -> dict[str, object]:
    beside_torch = shared(rank, lambda adamw: adamw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # it averages uncompressed: its own are not matrices
        shared(rank, lambda adamw: compopt.Average(adamw, payload_dtype=None))
    model = cut(make())
    groups = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    both = [torch.optim.AdamW(group, lr=1e-2) for group in groups]
    train(model, compopt.Separate(both, dense_steps=2, payload_dtype=None, **KINDS["tracked"]), range(4), rank)
    return {
        "apart": float((beside_torch - whole(model)).abs().max()),
        "warned": sum("two optimizers of compopt share a module" in str(w.message) for w in caught),
    }


def equal(rank: int) -> dict[str, object]:
    results: dict[str, object] = {name: beside_ddp(rank, **options) for name, options in KINDS.items()}
    if dist.get_world_size() > 2:
        return results
    results["base"] = beside_ddp(rank, around, **KINDS["tracked"])
    results["clipped"] = beside_ddp(rank, max_grad_norm=0.1, **KINDS["tracked"])
    results["two backwards"] = beside_ddp(rank, backwards=2, **KINDS["gaussian"])  # both by the step's matrix
    return results


def used(rank: int) -> dict[str, object]:
    return {
        "conserved": conserved(rank),
        "otherwise": cut_otherwise(rank),
        "cleared": cleared_on_one_rank(rank),
        "copied": copied(),
        "resumed": resumed(rank),
        "compiled": compiled_in_place(rank),
        "refused": refused(rank),
        "second optimizers": second_optimizers(rank),
    }


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def runs(request):
    return run_ranks(equal, request.param)


@pytest.fixture(scope="module")
def uses():
    return run_ranks(used, 2)


@pytest.mark.parametrize("name", [*KINDS, "base", "clipped", "two backwards"])
def test_it_is_what_it_is_under_ddp(runs, name):
    if name not in runs[0]:
        pytest.skip("on two ranks only")
    for rank in runs:
        assert max(rank[name]["apart"], rank[name]["owed"]) < 1e-12, rank
        # of a Gaussian projection each estimates it in its own way
        assert rank[name]["norm"] < (0.2 if name in ("gaussian", "two backwards") else 1e-12)
    assert 0.9 < runs[0][name]["told"] <= 1, runs[0]  # by rank 0, of its shards; headers are not told


def test_nothing_is_lost(uses):
    for rank in uses:
        results = rank["conserved"]
        assert max(far for name, far in results.items() if "bfloat16" not in name) < 2e-6, results
        assert max(results.values()) < 4e-3, results  # an all-reduce in bfloat16 rounds by itself


def test_other_dimensions_may_be_cut_and_groups_have_their_own_options(uses):
    assert max(rank["otherwise"] for rank in uses) < 1e-12


def test_a_gradient_cleared_on_one_rank_is_zeros_there(uses):
    assert [rank["cleared"] for rank in uses] == [0, 0]


def test_state_dicts_are_copied_and_saved_by_torch(uses):
    assert all(rank["copied"] for rank in uses)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(uses):
    assert [rank["resumed"] for rank in uses] == [0, 0]


def test_a_model_that_is_compiled_in_place_is_found(uses):
    for phase, distance in (rank["compiled"] for rank in uses):
        assert phase == "projected" and distance < 1e-12


def test_another_optimizer_may_have_parameters_of_the_same_modules(uses):
    for rank, results in enumerate(one["second optimizers"] for one in uses):
        assert results["apart"] < 1e-12
        assert results["warned"] == int(rank == 0)  # two of this package: one of them compresses nothing


def test_refusals_say_what_to_do(uses):
    for results in (rank["refused"] for rank in uses):
        assert "adaptive=True" in results["adaptive"] and "leave it out" in results["adaptive"]
        assert "compare two runs" in results["auto"]
        assert "SeparateAdam averages inside FSDP's backward" in results["scaler"]


def average(model: nn.Module, **options) -> compopt.Average:
    return compopt.Average(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), **options)


def beside_sgd(rank: int, **options) -> float:
    """Beside FSDP2 and torch's SGD, both clipped from outside: the distance, over the way that SGD went."""
    ours, theirs = cut(make()), cut(make())
    optimizer = average(ours, **options)
    train(ours, optimizer, range(6), rank, clip=0.5)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9), range(6), rank, clip=0.5)
    return apart(ours, theirs) / apart(make(), theirs)


def uses_the_backend(rank: int) -> bool:
    """Quantized means are computed by the backend where it has them, as under DDP."""
    model = cut(make(dtype=torch.float32))
    optimizer = average(model, payload_dtype="int8")
    optimizer.zero_grad()
    loss(model, 0, rank, torch.float32).backward()
    buckets = [bucket for bucket, _ in optimizer.fsdp_backward.buckets_since_step.values()]
    return bool(buckets) and all(bucket.codecs is optimizer.ops.codecs for bucket in buckets)


def all_of_average(rank: int) -> dict[str, float]:
    return {
        "unrounded": beside_sgd(rank),
        "backend": float(not uses_the_backend(rank)),
        **{dtype: beside_sgd(rank, payload_dtype=dtype) for dtype in ("bfloat16", "int8")},
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_fsdp_with_rounded_gradients(ranks):
    for results in run_ranks(all_of_average, ranks):
        rounded = {name: results.pop(name) for name in ("bfloat16", "int8")}
        assert max(results.values()) < 1e-12, results
        assert all(0 < far < 0.05 for far in rounded.values()), rounded
