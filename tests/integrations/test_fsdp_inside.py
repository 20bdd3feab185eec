"""SEPARATE, Average and TAGC inside FSDP2: real fully_shard over the ranks that average, on gloo processes."""

from __future__ import annotations

import copy
import io
import itertools
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
from compopt._backends.choice import choose_backend
from compopt._state.tensors import to_local

KINDS = {
    # blocks of rows that divide no number of rows; residuals are set to zero after the fourth of five steps
    "gaussian": {"projection": "gaussian", "ratio": 4, "reset_interval": 4},
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


def on_one_rank(rank: int) -> float:
    """A hook that reads gradients, as one that logs their norms, and gradients cleared between two backwards, on rank 0
    alone: all wait alike. Returns how far a hook leads the parameters away.
    """
    models, norms = [cut(make(Two)), cut(make(Two))], []
    for model, is_hooked in zip(models, (True, False), strict=True):
        if is_hooked and rank == 0:
            weight = model.flat.weight  # the first that backward reduces
            weight.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.grad.to_local().norm())))
        optimizer = around(list(model.named_parameters()), **KINDS["tracked"])
        train(model, optimizer, range(4), rank)
        optimizer.zero_grad()
        for batch in range(4, 6):
            loss(model, batch, rank).backward()
            if rank == 0 and batch == 4:
                optimizer.zero_grad()
        optimizer.step()
    assert len(norms) == (6 if rank == 0 else 0) and all(norms)
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
        "one rank": on_one_rank(rank),
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


@pytest.mark.slow
def test_nothing_is_lost(uses):
    for rank in uses:
        results = rank["conserved"]
        assert max(far for name, far in results.items() if "bfloat16" not in name) < 2e-6, results
        assert max(results.values()) < 4e-3, results  # an all-reduce in bfloat16 rounds by itself


def test_other_dimensions_may_be_cut_and_groups_have_their_own_options(uses):
    assert max(rank["otherwise"] for rank in uses) < 1e-12


def test_a_gradient_cleared_on_one_rank_is_zeros_there(uses):
    assert [rank["cleared"] for rank in uses] == [0, 0]


def test_ranks_wait_alike_for_hooks_and_after_cleared_gradients_of_one_rank(uses):
    assert [rank["one rank"] for rank in uses] == [0, 0]


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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_fsdp_with_rounded_gradients(ranks):
    for results in run_ranks(all_of_average, ranks):
        rounded = {name: results.pop(name) for name in ("bfloat16", "int8")}
        assert max(results.values()) < 1e-12, results
        assert all(0 < far < 0.05 for far in rounded.values()), rounded


def tagc(model: nn.Module, **options) -> compopt.TagcAdamW:
    return compopt.TagcAdamW(model.named_parameters(), lr=1e-2, **{"density": 0.1, **options})


def tagc_beside_ddp(rank: int, **options) -> dict[str, float]:
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
        "ddp": tagc_beside_ddp(rank),
        "ddp, sketch": tagc_beside_ddp(rank, codec="sketch", sketch_ratio=4),
        "ddp, float32": tagc_beside_ddp(rank, payload_dtype="float32"),
        "ddp, groups": groups_of_one_module(rank),
        "oracle": beside_oracle(rank),
    }


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def tagc_runs(request):
    return run_ranks(all_of, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp, sketch", "ddp, groups"])
def test_tagc_is_what_it_is_under_ddp(tagc_runs, name):
    assert max(value for rank in tagc_runs for value in rank[name].values()) < 1e-12


def test_what_rounding_takes_off_is_owed_as_under_ddp(tagc_runs):
    # the mean of float32 is rounded where FSDP's gradient is of float64
    assert max(value for rank in tagc_runs for value in rank["ddp, float32"].values()) < 1e-6


def test_it_is_algorithm_1(tagc_runs):
    assert max(value for rank in tagc_runs for value in rank["oracle"].values()) < 1e-12


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
            worst, owed = 0.0, dict.fromkeys(ours.parameters(), 0.0)
            for step in range(2):  # in the first all averages are waited for in backward
                for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                    q.detach().copy_(p.detach())
                for model in (ours, theirs):
                    model.zero_grad()
                    loss(model, step, rank, torch.float32).backward()
                optimizer.step()
                for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                    if "residual" not in optimizer.state[p]:
                        continue
                    residual = optimizer.state[p]["residual"].clone()
                    dist.all_reduce(residual)
                    before, owed[p] = owed[p], residual / dist.get_world_size()
                    wanted = q.grad.full_tensor() + before
                    far = (p.grad.full_tensor() + owed[p] - wanted).norm() / wanted.norm()
                    worst = max(worst, float(far))
            results[f"{name}, {payload} {density}"] = worst
    return results


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def tagc_refused(rank: int) -> dict[str, str]:
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

    return results


def all_uses(rank: int) -> dict[str, object]:
    return {
        "others": as_others_do(rank),
        "low precision": in_low_precision(rank),
        "refused": tagc_refused(rank),
    }


@pytest.fixture(scope="module")
def tagc_uses():
    return run_ranks(all_uses, 2)


@pytest.mark.slow
def test_zeroed_gradients_hooks_that_read_and_frozen_parameters(tagc_uses):
    for rank in tagc_uses:
        assert max(rank["others"].values()) < 1e-12, rank["others"]


def test_nothing_is_lost_in_mixed_precision(tagc_uses):
    """But what FSDP itself rounds: gradients of bfloat16, where it is told to reduce in that."""
    for results in (rank["low precision"] for rank in tagc_uses):
        assert max(far for name, far in results.items() if "reduced" in name and "None" in name) < 1e-6
        assert max(far for name, far in results.items()) < 4e-3


def test_refusals_of_tagc_say_what_to_do(tagc_uses):
    for results in (rank["refused"] for rank in tagc_uses):
        assert results["fine"] == results["zeros"] == results["options"] == "sparse"
        assert "when='auto'" in results["auto"] and "compare two runs" in results["auto"]
        assert "update_dtype='int4' cannot be followed inside FSDP" in results["updates"]
        assert (
            "not among those that FSDP2 shards" in results["part"]
            and "fully_shard on the whole model" in results["part"]
        )
        assert "set_reduce_scatter_unused_params(True)" in results["unused"]
        assert "without a scaler" in results["scaler"]


def with_a_divisor(rank: int) -> dict[str, float]:
    """Losses that are divided by a number of all ranks: gradients are their sum, as FSDP2's by the same divisor."""
    results = {}
    for dtype in (torch.float32, torch.float64):
        for divisor in (1.0, 2.0, 0.5):
            for is_sum in (False, True):
                ours, theirs = (cut(make(dtype=dtype)) for _ in range(2))
                optimizer = compopt.Average(torch.optim.SGD(ours.parameters(), lr=0.1))
                for model in (ours, theirs):
                    for part in (model, model.down, model.flat):
                        part.set_gradient_divide_factor(divisor)
                        # gloo has no sum of multiples
                        part.set_force_sum_reduction_for_comms(is_sum or model is theirs)
                    for turn in range(2):
                        loss(model, turn, rank, dtype).backward()
                optimizer.step()
                pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
                far = [
                    (p.grad - q.grad).to_local().abs().sum() / q.grad.to_local().abs().sum()
                    for p, q in pairs
                    if len(q.grad.to_local())
                ]
                results[f"{dtype} {divisor} {is_sum}"] = float(max(far))
    return results


@pytest.mark.slow
def test_gradients_are_divided_as_the_model_says():
    for results in run_ranks(with_a_divisor, 2):
        assert max(results.values()) < 1e-5, results
