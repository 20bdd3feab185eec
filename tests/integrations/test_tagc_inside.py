"""TAGC inside FSDP2 is Algorithm 1, on gloo processes; mixed precision, hooks, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Two, apart, cut, loss, make, train
from ranks import catch_message, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt._ops.backends import choose_backend


def tagc(model: nn.Module, **options) -> compopt.TagcAdamW:
    return compopt.TagcAdamW(model.named_parameters(), lr=1e-2, **{"density": 0.1, **options})


def beside_ddp(rank: int, **options) -> dict[str, float]:
    """Beside the form under DistributedDataParallel, its buckets FSDP's modules."""
    fsdp, ddp = cut(make(Two)), DistributedDataParallel(make(Two))
    options = {"density": 0.1, "dense_steps": 2, **options}
    return compare_runs(rank, fsdp, ddp, tagc(fsdp, **options), tagc_in_groups(ddp.module, **options))


def groups_of_one_module(rank: int) -> dict[str, float]:
    """Two groups with other options, whose gradients FSDP reduces together."""
    fsdp, ddp = fully_shard(make(Two)), DistributedDataParallel(make(Two))
    options = {"densities": (0.1, 0.5), "dense_steps": 2}
    return compare_runs(rank, fsdp, ddp, tagc_in_groups(fsdp, **options), tagc_in_groups(ddp.module, **options))


def tagc_in_groups(model: Two, density: float = 0.1, densities: tuple[float, ...] = (), **options) -> compopt.TagcAdamW:
    densities = densities or (density, density)
    groups = [
        {"params": list(part.named_parameters()), "density": share}
        for part, share in zip((model.down, model.flat), densities, strict=True)
    ]
    return compopt.TagcAdamW(groups, lr=1e-2, **options)


def compare_runs(rank: int, fsdp: nn.Module, ddp: nn.Module, inside: compopt.TagcAdamW, outside: compopt.TagcAdamW):
    train(fsdp, inside, range(8), rank)
    train(ddp, outside, range(8), rank)
    pairs = zip(fsdp.parameters(), ddp.parameters(), strict=True)
    residuals = [(inside.state[a].get("residual"), outside.state[b].get("residual")) for a, b in pairs]
    return {
        "apart": apart(fsdp, ddp),
        "owed": max(float((a - b).abs().max()) for a, b in residuals if a is not None),
        "density": abs(inside.stats.density - outside.stats.density),
        "norm": abs(inside.stats.grad_norm / outside.stats.grad_norm - 1),
    }


class Oracle:
    """Algorithm 1 with AdamW in one process: all ranks' gradients of a whole model, cut as fully_shard cuts them."""

    def __init__(self, ranks: int, density: float):
        self.model, self.ranks, self.density, self.t = make(), ranks, density, 0
        parts = [list(self.model.down.parameters()), list(self.model.flat.parameters())]
        nested = {p for part in parts for p in part}
        self.parts = [[p for p in self.model.parameters() if p not in nested], *parts]
        zeros = {p: torch.zeros_like(p) for p in self.model.parameters()}
        self.acc = [{p: zeros[p].clone() for p in zeros} for _ in range(ranks)]
        self.m, self.v = dict(zeros), {p: z.clone() for p, z in zeros.items()}

    def compressed(self, p: Tensor) -> bool:
        return p.dim() >= 2 and p.numel() >= 4096

    @torch.no_grad()
    def step(self, number: int) -> None:
        grads = []
        for who in range(self.ranks):
            with torch.enable_grad():
                value = loss(self.model, number, who)
            local = torch.autograd.grad(value, list(self.model.parameters()))
            grads.append(dict(zip(self.model.parameters(), local, strict=True)))
        mean = {p: sum(g[p] for g in grads) / self.ranks for p in self.model.parameters()}
        for part in self.parts:
            for rank in range(self.ranks):
                self.reduce(part, rank, grads, mean)
        self.t += 1
        for p, g in mean.items():
            p.mul_(1 - 1e-2 * 1e-2)
            self.m[p] = 0.9 * self.m[p] + 0.1 * g
            self.v[p] = 0.999 * self.v[p] + 0.001 * g * g
            root = (self.v[p] / (1 - 0.999**self.t)).sqrt()
            p.sub_(1e-2 * (self.m[p] / (1 - 0.9**self.t)) / (root + 1e-8))

    def reduce(self, part: list[Tensor], rank: int, grads: list, mean: dict) -> None:
        """Lines 1 to 10 for the shard of one rank."""
        mine = [p for p in part if self.compressed(p) and len(p.chunk(self.ranks)) > rank]
        if not mine:
            return
        rows = []
        for who in range(self.ranks):
            acc = [(grads[who][p] + self.acc[who][p]).chunk(self.ranks)[rank].reshape(-1) for p in mine]
            rows.append(torch.cat(acc))
        keep = int(round(self.density * len(rows[0]), 6))
        sent = []
        for row in rows:
            at = row.abs().topk(keep).indices
            sent.append(torch.zeros_like(row).index_copy(0, at, row[at]))
        sizes = [p.chunk(self.ranks)[rank].numel() for p in mine]
        average = (sum(sent) / self.ranks).split(sizes)
        for p, a in zip(mine, average, strict=True):
            mean[p].chunk(self.ranks)[rank].copy_(a.view_as(p.chunk(self.ranks)[rank]))
        for who, (row, out) in enumerate(zip(rows, sent, strict=True)):
            for p, rest in zip(mine, (row - out).split(sizes), strict=True):
                self.acc[who][p].chunk(self.ranks)[rank].copy_(rest.view_as(p.chunk(self.ranks)[rank]))


def beside_oracle(rank: int) -> dict[str, float]:
    oracle, model = Oracle(dist.get_world_size(), 0.1), cut(make())
    optimizer = tagc(model)
    for step in range(6):
        oracle.step(step)
        train(model, optimizer, [step], rank)
    residuals = [
        float((optimizer.state[p]["residual"] - oracle.acc[rank][q]).abs().max())
        for p, q in zip(model.parameters(), oracle.model.parameters(), strict=True)
        if oracle.compressed(q)
    ]
    return {"apart": apart(model, oracle.model), "owed": max(residuals)}


def all_of(rank: int) -> dict[str, object]:
    return {
        "ddp": beside_ddp(rank),
        "ddp, sketch": beside_ddp(rank, codec="sketch", sketch_ratio=4),
        "ddp, float32": beside_ddp(rank, payload_dtype="float32"),
        "ddp, groups": groups_of_one_module(rank),
        "oracle": beside_oracle(rank),
    }


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def runs(request):
    return run_ranks(all_of, request.param)


@pytest.mark.parametrize("name", ["ddp", "ddp, sketch", "ddp, groups"])
def test_it_is_what_it_is_under_ddp(runs, name):
    assert max(value for rank in runs for value in rank[name].values()) < 1e-12


def test_what_rounding_takes_off_is_owed_as_under_ddp(runs):
    # the mean of float32 is rounded where FSDP's gradient is of float64
    assert max(value for rank in runs for value in rank["ddp, float32"].values()) < 1e-6


def test_it_is_algorithm_1(runs):
    assert max(value for rank in runs for value in rank["oracle"].values()) < 1e-12


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


def all_uses(rank: int) -> dict[str, object]:
    return {
        "others": as_others_do(rank),
        "low precision": in_low_precision(rank),
        "refused": refused(rank),
    }


@pytest.fixture(scope="module")
def uses():
    return run_ranks(all_uses, 2)


def test_zeroed_gradients_hooks_that_read_and_frozen_parameters(uses):
    for rank in uses:
        assert max(rank["others"].values()) < 1e-12, rank["others"]


def test_nothing_is_lost_in_mixed_precision(uses):
    """But what FSDP itself rounds: gradients of bfloat16, where it is told to reduce in that."""
    for results in (rank["low precision"] for rank in uses):
        assert max(far for name, far in results.items() if "reduced" in name and "None" in name) < 1e-6
        assert max(far for name, far in results.items()) < 4e-3


def test_refusals_say_what_to_do(uses):
    for results in (rank["refused"] for rank in uses):
        assert results["fine"] == results["zeros"] == results["options"] == "sparse"
        assert "when='auto'" in results["auto"] and "compare two runs" in results["auto"]
        assert "update_dtype='int4' cannot be followed inside FSDP" in results["updates"]
        assert (
            "not among those that FSDP2 shards" in results["part"]
            and "fully_shard on the whole model" in results["part"]
        )
        assert "set_reduce_scatter_unused_params(True)" in results["unused"]
        assert "without a scaler" in results["scaler"] and "scale the loss" in results["factor"]
