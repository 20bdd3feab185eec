"""Under the real DistributedDataParallel, two gloo processes: the swap of the class is the only change; refusals."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from ddp_models import Net, batch, plain, radius
from ranks import catch_message, run_ranks
from slow_rows import selected, slow_but
from torch import nn
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
SLOW += ["compiled"]  # test_lifetime.py compiles models under and around DDP


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


def whole_step_compiled(rank: int) -> list:
    """The distance of a compiled step from an eager one, buckets not sent in backward, and what Dynamo traced of us."""
    _buckets.BUCKET_BYTES = 80_000  # several buckets
    ends, traced = [], set()

    def compiler(graph, inputs):
        traced.update(line for node in graph.graph.nodes for line in (node.stack_trace or "").splitlines())
        return graph.forward

    def train(around):
        torch.manual_seed(0)
        model = DDP(Net())
        optimizer = compopt.Average(torch.optim.SGD(model.parameters(), lr=0.1), payload_dtype="int8")
        compopt.attach(model, optimizer)

        @around
        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(3):
            step(batch(number))
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        return optimizer.stats

    train(lambda step: step)
    stats = train(torch.compile(backend=compiler))
    package = os.path.dirname(compopt.__file__)
    ours = [line for line in traced if package in line]
    return [float((ends[0] - ends[1]).abs().max()), stats.buckets - stats.early_buckets, len(traced) > 0, ours]


@pytest.mark.slow
def test_of_a_step_that_is_compiled_whole_no_hook_of_ours_is():
    for distance, late, is_traced, ours in run_ranks(whole_step_compiled, 2):
        assert distance == 0 and late == 1 and is_traced and not ours


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
