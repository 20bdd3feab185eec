"""Uses of TAGC inside FSDP2: mixed precision, hooks, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import apart, cut, loss, make, train
from ranks import catch_message, run_ranks
from test_tagc_inside import tagc
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import compopt
from compopt._ops.backends import choose_backend


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("backend", [None, "torch"], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_is_among_the_largest(dtype, backend, wrong, monkeypatch):
    """So it is sent, and no rank has to look for it."""
    if backend:
        monkeypatch.setenv("COMPOPT_BACKEND", backend)
    ops = choose_backend({"cpu"})
    for n, count in itertools.product((100, 16384, 16385, 70000), (1, 3, 2000)):
        for k in (1, n // 80 + 1, n // 3):
            x = torch.randn(n, dtype=dtype)
            x[torch.randperm(n)[:count]] = wrong
            results = ops.top_k_positions(x, k)
            assert len(results) == k and not x[results].isfinite().all()


def as_others_do(rank: int) -> dict[str, object]:
    """Gradients that are set to zero, not None; hooks that read them in backward; parameters that are frozen."""
    plain, zeros, hooked, frozen, wanted = (cut(make()) for _ in range(5))
    one, two, three = tagc(plain), tagc(zeros), tagc(hooked)
    records, results = {}, {}
    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(lambda p: records.__setitem__(p, p.grad.to_local().clone()))
    train(plain, one, range(4), rank)
    for step in range(4):
        two.zero_grad(set_to_none=False)
        loss(zeros, step, rank).backward()
        two.step()
    train(hooked, three, range(4), rank)
    results["zeros"], results["hooked"] = apart(plain, zeros), apart(plain, hooked)
    results["seen"] = max(float((records[p] - p.grad.to_local()).abs().sum()) for p in hooked.parameters())

    for model in (frozen, wanted):
        for p in (model.up.weight, model.down.bias):
            p.requires_grad_(False)
    train(frozen, tagc(frozen, density=1), range(3), rank)
    trained = [p for p in wanted.parameters() if p.requires_grad]
    train(wanted, torch.optim.AdamW(trained, lr=1e-2), range(3), rank)
    results["frozen"] = apart(frozen, wanted)
    return results


def in_low_precision(rank: int) -> dict[str, float]:
    """FSDP's mixed precision: what a step applies and what ranks owe is the mean of their gradients."""
    results = {}
    for name, policy in {
        "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }.items():
        for density, payload in ((0.1, None), (0.1, "bfloat16"), (1, "bfloat16")):
            ours = cut(make(dtype=torch.float32), mp_policy=policy)
            theirs = cut(make(dtype=torch.float32), mp_policy=MixedPrecisionPolicy(policy.param_dtype, torch.float32))
            optimizer = tagc(ours, density=density, payload_dtype=payload)
            worst = 0.0
            for model in (ours, theirs):
                loss(model, 0, rank, torch.float32).backward()
            optimizer.step()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                if "residual" not in optimizer.state[p]:
                    continue
                got, residuals = p.grad.full_tensor(), optimizer.state[p]["residual"].clone()
                dist.all_reduce(residuals)
                wanted = q.grad.full_tensor()
                far = (got + residuals / dist.get_world_size() - wanted).norm() / wanted.norm()
                worst = max(worst, float(far))
            results[f"{name}, {payload} {density}"] = worst
    return results


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def refused(rank: int) -> dict[str, str]:
    results, model = {}, cut(make())
    with_options = (
        dict(params=list(model.down.named_parameters())),
        dict(params=[(n, p) for n, p in model.named_parameters() if not n.startswith("down")], density=0.5),
    )
    apart = compopt.TagcAdamW([*with_options], lr=1e-2, density=0.1)
    train(model, apart, range(1), rank)  # other options in another module are fine
    results["fine"] = apart.stats.phase

    model = fully_shard(make())
    names = dict(model.named_parameters())
    groups = [{"params": [("down", names.pop("down.weight"))], "density": 0.5}, {"params": list(names.items())}]
    mixed = compopt.TagcAdamW(groups, lr=1e-2)
    train(model, mixed, range(1), rank)  # nor within one
    results["options"] = mixed.stats.phase

    model = fully_shard(make())
    results["auto"] = catch_message(ValueError, lambda: tagc(model, when="auto"))
    results["updates"] = catch_message(ValueError, lambda: tagc(fully_shard(make()), update_dtype="int4"))
    part = make()
    fully_shard(part.down)
    results["part"] = catch_message(ValueError, lambda: tagc(part))

    model = fully_shard(make(Skipping))
    optimizer = tagc(model)
    results["unused"] = catch_message(RuntimeError, lambda: train(model, optimizer, range(1), rank))
    model = fully_shard(make(Skipping))
    model.set_reduce_scatter_unused_params(True)
    optimizer = tagc(model)
    train(model, optimizer, range(2), rank)
    results["zeros"] = optimizer.stats.phase

    model = cut(make(dtype=torch.float32))
    optimizer, scaler = tagc(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(model, 0, rank, torch.float32)).backward()
    results["scaler"] = catch_message(RuntimeError, lambda: scaler.step(optimizer))

    model = cut(make())
    model.set_gradient_divide_factor(1.0)
    optimizer = tagc(model)
    results["factor"] = catch_message(RuntimeError, lambda: train(model, optimizer, range(1), rank))
    return results


def all_of(rank: int) -> dict[str, object]:
    return {
        "others": as_others_do(rank),
        "low precision": in_low_precision(rank),
        "refused": refused(rank),
    }


@pytest.fixture(scope="module")
def runs():
    return run_ranks(all_of, 2)


def test_zeroed_gradients_hooks_that_read_and_frozen_parameters(runs):
    for rank in runs:
        assert max(rank["others"].values()) < 1e-12, rank["others"]


def test_nothing_is_lost_in_mixed_precision(runs):
    """But what FSDP itself rounds: gradients of bfloat16, where it is told to reduce in that."""
    for results in (rank["low precision"] for rank in runs):
        assert max(far for name, far in results.items() if "reduced" in name and "None" in name) < 1e-6
        assert max(far for name, far in results.items()) < 4e-3


def test_refusals_say_what_to_do(runs):
    for results in (rank["refused"] for rank in runs):
        assert results["fine"] == results["zeros"] == results["options"] == "sparse"
        assert "when='auto'" in results["auto"] and "compare two runs" in results["auto"]
        assert "update_dtype='int4' cannot be followed inside FSDP" in results["updates"]
        assert (
            "not among those that FSDP2 shards" in results["part"]
            and "fully_shard on the whole model" in results["part"]
        )
        assert "set_reduce_scatter_unused_params(True)" in results["unused"]
        assert "without a scaler" in results["scaler"] and "scale the loss" in results["factor"]
