"""``gather_dtype``: FSDP2's parameter gathers in int8, on gloo processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import Two, apart, cut, loss, make, train, whole
from ranks import catch_message, run_ranks
from sim import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import compopt
from compopt._fsdp.fsdp_gather import FSDPAllGather
from compopt._fsdp.fsdp_gather import Shard as LocalShard
from compopt._ops.operations import Ops


def separate(model: nn.Module, **options) -> compopt.SeparateAdam:
    options = {"lr": 1e-2, "dense_steps": 2, "rank": 4, "payload_dtype": None, "gather_dtype": "int8", **options}
    return compopt.SeparateAdam(model.parameters(), **options)


def rounded(p: Tensor, ranks: int, dim: int = 0) -> Tensor:
    """The oracle: a parameter as every rank should compute with it, by the definition."""
    if p.dim() < 2 or p.numel() < 4096:
        return p
    parts = []
    for shard in p.chunk(ranks, dim):
        flat = shard.reshape(-1)
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % 128)]).view(-1, 128)
        unit = (padded.abs().amax(1, keepdim=True) / 127).float().to(p.dtype)
        codes = torch.where(unit > 0, (padded / unit + 0.5).floor(), 0)
        parts.append((codes * unit).view(-1)[: len(flat)].view(shard.shape))
    return torch.cat(parts, dim)


def seen_in_forward(model: nn.Module, *args) -> dict[str, Tensor]:
    """Whole parameters as forward has them, by name; those of nested modules when these run."""
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, prefix: str) -> None:
        for name, p in module.named_parameters(recurse=False):
            seen[prefix + name] = p.detach().clone()

    hooks = [
        module.register_forward_pre_hook(lambda module, _, prefix=f"{name}." if name else "": note(module, prefix))
        for name, module in model.named_modules()
    ]
    loss(model, *args)
    for hook in hooks:
        hook.remove()
    return seen


def farthest(seen: dict[str, Tensor], exact: dict[str, Tensor], ranks: int) -> float:
    """The largest distance from the oracle, relative to the largest value of each tensor."""
    wanted = {name: rounded(p, ranks) for name, p in exact.items()}
    return max(
        float((seen[name].double() - p.double()).abs().max() / p.abs().max().clamp(min=1e-9))
        for name, p in wanted.items()
    )


def forward_values(rank: int, dtype: torch.dtype) -> dict[str, float]:
    ranks, exact = dist.get_world_size(), {n: p.detach().clone() for n, p in make(dtype=dtype).named_parameters()}
    model = cut(make(dtype=dtype))
    optimizer, masters = separate(model), dict(model.named_parameters())
    seen = seen_in_forward(model, 0, rank, dtype)
    mine = torch.cat([p.reshape(-1) for p in seen.values()])
    first = mine.clone()
    dist.broadcast(first, 0)
    with torch.inference_mode():
        loss(model, 0, rank, dtype)
    with torch.no_grad():
        again = seen_in_forward(model, 0, rank, dtype)
    del optimizer
    return {
        "far": farthest(seen, exact, ranks),
        "apart": float((mine - first).abs().max()),
        "masters": max(float((masters[n].full_tensor() - p).abs().max()) for n, p in exact.items()),
        "rounded": sum(not torch.equal(seen[n], p) for n, p in exact.items()),
        "eval": max(float((again[n] - p).abs().max()) for n, p in seen.items()),
    }


def all_of(rank: int) -> dict[str, dict[str, float]]:
    return {str(dtype): forward_values(rank, dtype) for dtype in (torch.float32, torch.float64)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_computes_with_the_values_of_the_definition(ranks):
    for results in run_ranks(all_of, ranks):
        for dtype, got in results.items():
            assert got["far"] < (2e-6 if dtype == "torch.float32" else 1e-12), (dtype, got)
            assert got["apart"] == got["masters"] == got["eval"] == 0, (dtype, got)
            assert got["rounded"] == 4  # up, down, flat, conv: no bias, no norm


def beside_straight_through(rank: int, ranks: int) -> float:
    """Plain gradients through rounded weights, by the definition, in one process; and inside FSDP2."""
    model, wanted = cut(make()), make()
    optimizer = compopt.Average(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), gather_dtype="int8")
    train(model, optimizer, range(5), rank)
    sgd = torch.optim.SGD(wanted.parameters(), lr=1e-3, momentum=0.9)
    for step in range(5):
        sgd.zero_grad()
        masters = [p.detach().clone() for p in wanted.parameters()]
        for p in wanted.parameters():
            p.data = rounded(p.data, ranks)
        (sum(loss(wanted, step, who) for who in range(ranks)) / ranks).backward()
        for p, master in zip(wanted.parameters(), masters, strict=True):
            p.data = master
        sgd.step()
    return apart(model, wanted) / apart(make(), wanted)


def beside_simulated_ranks(rank: int, ranks: int) -> float:
    """With residuals in int8 too, beside ranks of one process that compute with weights rounded by the definition."""
    options = dict(lr=1e-2, rank=4, dense_steps=2, payload_dtype=None, residual_dtype="int8")
    model = cut(make())
    train(model, compopt.SeparateAdam(model.parameters(), gather_dtype="int8", **options), range(7), rank)
    simulated = Ranks(ranks, make, lambda params, **group: compopt.SeparateAdam(params, **options, **group))

    def loss_of(net: nn.Module, who: int, step: int) -> Tensor:
        weights = {n: p + (rounded(p.detach(), ranks) - p.detach()) for n, p in net.named_parameters()}
        return torch.func.functional_call(Loss(net), {f"net.{n}": w for n, w in weights.items()}, (step, who))

    simulated.train(loss_of, 7)
    return apart(model, simulated.models[0]) / apart(make(), simulated.models[0])


class Loss(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, step: int, who: int) -> Tensor:
        return loss(self.net, step, who)


def in_bfloat16(rank: int) -> dict[str, object]:
    """Mixed precision gathers in bfloat16; what is not rounded to int8 keeps its bits."""
    model = cut(make(dtype=torch.float32), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = separate(model)
    seen = seen_in_forward(model, 0, rank, torch.float32)
    exact = {n: p.detach().bfloat16().float() for n, p in make(dtype=torch.float32).named_parameters()}
    dtypes = {p.dtype for p in seen.values()}
    wanted = {n: rounded(p, dist.get_world_size()).bfloat16() for n, p in exact.items()}
    del optimizer
    # a value in the middle of two multiples may take the other one
    other = max(float((p != seen[n]).float().mean()) for n, p in wanted.items())
    return {"dtypes": dtypes == {torch.bfloat16}, "other": other}


class OneParam:
    """A parameter as FSDP2 describes it."""

    def __init__(self, encodes_itself: bool = False):
        self.param_dtype, self.orig_dtype, self.sharded_param = None, torch.float32, torch.zeros(64, 64)
        self._sharded_param_data = torch.zeros(32 * 64)
        self._sharded_local_tensor = SimpleNamespace(**({"fsdp_pre_all_gather": None} if encodes_itself else {}))


def test_what_encodes_itself_is_left_alone():
    for encodes_itself in (False, True):
        group = SimpleNamespace(fsdp_params=[OneParam(), OneParam(encodes_itself)], is_sharded_post_forward=False)
        layout = FSDPAllGather(group, "int8", Ops())._find_layout(torch.zeros(2 * 32 * 64), 2)
        assert (layout is None) == encodes_itself


def test_a_shard_has_the_dtype_in_which_it_is_gathered():
    one = OneParam()
    assert LocalShard.of(one) == (32 * 64, torch.float32, True)
    one.param_dtype = torch.bfloat16
    assert LocalShard.of(one) == (32 * 64, torch.bfloat16, True)


class Adapted(nn.Module):
    """A frozen matrix of an odd length in bfloat16, and a trained adapter in float32."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(67, 67).bfloat16(), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(67, 2)), nn.Parameter(torch.zeros(2, 67))
        self.large = nn.Parameter(torch.randn(64, 67))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.frozen.float() + x @ self.a @ self.b + (x @ self.large.T @ self.large)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapted = nn.Linear(67, 67, bias=False).requires_grad_(False), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(self.base(x))


def frozen(rank: int) -> dict[str, float]:
    """Frozen parameters, of other dtypes and of modules of their own, of which the optimizer knows nothing."""
    torch.manual_seed(1)
    model = Stack()
    exact = {n: p.detach().clone() for n, p in model.named_parameters()}
    for part in (model.base, model.adapted):
        fully_shard(part)
    fully_shard(model)
    options = dict(lr=1e-2, dense_steps=0, gather_dtype="int8")
    optimizer = compopt.SeparateAdam([p for p in model.parameters() if p.requires_grad], **options)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda module, _, name=name: seen.update(
                {f"{name}.{n}": p.detach().clone() for n, p in module.named_parameters(recurse=False)}
            )
        )
    sent = []
    gather = compopt._fsdp.fsdp_gather.gather_into

    def count(output, tensor, *args):
        sent.append(tensor.numel())
        return gather(output, tensor, *args)

    compopt._fsdp.fsdp_gather.gather_into = count
    out = model(torch.ones(1, 67))
    compopt._fsdp.fsdp_gather.gather_into = gather
    out.sum().backward()
    optimizer.step()
    ranks = dist.get_world_size()
    wanted = {n: rounded(p.float(), ranks).to(p.dtype) for n, p in exact.items()}
    values = sum(p.numel() for p in exact.values() if p.numel() >= 4096) / ranks
    return {
        "far": max(float((seen[n] - p).float().abs().max()) for n, p in wanted.items()),
        "share": sum(sent) / values,
        "exact": float(torch.equal(seen["adapted.a"], exact["adapted.a"])),
    }


def again_with(model: nn.Module, rank: int, **options) -> Tensor:
    train(model, separate(model, **options), range(4), rank)
    return whole(model)


def other_ways(rank: int) -> dict[str, float]:
    """The same bits: explicit prefetching, a later gather of a smaller mesh, and parameters kept after forward."""
    plain, kept, prefetched = (cut(make(), **more) for more in ({}, {"reshard_after_forward": False}, {}))
    prefetched._set_unshard_async_op(True)
    prefetched.set_modules_to_forward_prefetch([prefetched.down, prefetched.flat])
    wanted = again_with(plain, rank)
    results = {
        "kept": float((again_with(kept, rank) - wanted).abs().max()),
        "prefetched": float((again_with(prefetched, rank) - wanted).abs().max()),
    }
    if dist.get_world_size() == 4:
        smaller = cut(make(), reshard_after_forward=2)
        results["smaller"] = float((again_with(smaller, rank) - wanted).abs().max())
    exact = cut(make())
    separate(exact)
    wanted = again_with(cut(make()), rank, gather_dtype=None)
    results["replaced"] = float((again_with(exact, rank, gather_dtype=None) - wanted).abs().max())
    columns, ranks = fully_shard(make(Two), shard_placement_fn=lambda p: Shard(p.dim() - 1)), dist.get_world_size()
    optimizer = separate(columns)
    seen = seen_in_forward(columns, 0, rank)
    wanted = {n: rounded(p.detach(), ranks, p.dim() - 1) for n, p in make(Two).named_parameters()}
    results["columns"] = max(float((seen[n] - p).abs().max()) for n, p in wanted.items())
    del optimizer
    return results


def refused(rank: int) -> dict[str, str]:
    from torch.distributed.fsdp import FSDPModule

    results = {"value": catch_message(ValueError, lambda: separate(cut(make()), gather_dtype="int4"))}
    plain = make()
    optimizer = separate(plain)
    loss(plain, 0, rank).backward()
    results["plain"] = catch_message(ValueError, optimizer.step)
    hook = FSDPModule.set_custom_all_gather
    del FSDPModule.set_custom_all_gather
    results["old"] = catch_message(ValueError, lambda: separate(cut(make())))
    FSDPModule.set_custom_all_gather = hook
    return results


def used(rank: int) -> dict[str, object]:
    ranks = dist.get_world_size()
    return {
        "straight through": beside_straight_through(rank, ranks),
        "simulated": beside_simulated_ranks(rank, ranks),
        "bfloat16": in_bfloat16(rank),
        "frozen": frozen(rank),
        "ways": other_ways(rank),
        "refused": refused(rank) if ranks == 2 else {},
    }


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def uses(request):
    return run_ranks(used, request.param)


def test_training_is_straight_through_rounded_weights(uses):
    assert max(rank["straight through"] for rank in uses) < 1e-6


def test_gathers_and_residuals_in_int8_are_those_of_simulated_ranks(uses):
    assert max(rank["simulated"] for rank in uses) < 1e-6, uses


def test_mixed_precision_is_kept(uses):
    for rank in uses:
        assert rank["bfloat16"]["dtypes"] and rank["bfloat16"]["other"] < 1e-3, rank["bfloat16"]


def test_frozen_parameters_are_gathered_as_cheaply(uses):
    for results in (rank["frozen"] for rank in uses):
        assert results["far"] < 1e-5 and results["exact"], results
        assert 1 <= results["share"] < 1.2, results  # with scales and the small tensors of the adapter


def test_all_ways_to_gather_give_the_same_bits(uses):
    for rank in uses:
        assert max(rank["ways"].values()) < 1e-12, rank["ways"]


def test_refusals_say_what_to_do(uses):
    for results in (rank["refused"] for rank in uses if rank["refused"]):
        assert "gather_dtype must be None or 'int8', got 'int4'" in results["value"]
        assert "call fully_shard before the optimizer is made" in results["plain"]
        assert "set_custom_all_gather" in results["old"] and "later PyTorch" in results["old"]


def hybrid(rank: int) -> dict[str, float]:
    """Shards of a machine are gathered in int8, gradients averaged between machines: both replicas are alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = cut(make(), mesh=mesh["shard"])
    optimizer = separate(model, process_group=mesh.get_group("replicate"))
    seen = seen_in_forward(model, 0, rank)
    exact = {n: p.detach() for n, p in make().named_parameters()}
    train(model, optimizer, range(4), rank)
    mine = whole(model)
    first = mine.clone()
    dist.broadcast(first, 0)
    return {"far": farthest(seen, exact, 2), "apart": float((mine - first).abs().max())}


def test_shards_inside_a_machine_are_gathered_in_int8_too():
    for results in run_ranks(hybrid, 4):
        assert results["far"] < 1e-7 and results["apart"] == 0, results


def load_checkpoint(path: str, rank: int) -> tuple[nn.Module, compopt.SeparateAdam]:
    model = cut(make())
    optimizer = separate(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def saved(rank: int, path: str) -> dict[str, object]:
    """After a step that is skipped, and others with a frozen matrix, a checkpoint; it goes on to the bit."""
    model = cut(make())
    optimizer = separate(model)
    train(model, optimizer, range(3), rank)
    before = whole(model)
    optimizer.zero_grad()
    (loss(model, 3, rank) * (float("nan") if rank == 1 else 1)).backward()
    optimizer.step()
    results: dict[str, object] = {"skipped": optimizer.stats.phase, "same": torch.equal(whole(model), before)}
    for flag in (False, True):
        weight = model.down.weight
        start = weight.full_tensor().detach()
        weight.requires_grad_(flag)
        optimizer.zero_grad()
        train(model, optimizer, range(4, 6), rank)
        results[f"moves {flag}"] = not torch.equal(start, weight.full_tensor())
    optimizer.consolidate_state()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    results["saved"] = float(whole(model).sum())
    again, same = load_checkpoint(path, rank)
    results["masters"] = apart(model, again)
    for one in ((model, optimizer), (again, same)):
        train(*one, range(6, 8), rank)
    results["goes on"] = apart(model, again)
    return results


def loaded(rank: int, path: str) -> tuple[float, float]:
    model, optimizer = load_checkpoint(path, rank)
    total = float(whole(model).sum())
    before = float(loss(model, 6, rank).detach())
    train(model, optimizer, range(6, 9), rank)
    return total, float(loss(model, 6, rank).detach()) / before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("gathers"))
    return path, run_ranks(saved, 2, path)


def test_skipped_steps_and_frozen_parameters_are_as_without(checkpoint):
    for results in checkpoint[1]:
        assert results["skipped"] == "skipped" and results["same"], results
        assert results["moves True"] and not results["moves False"], results


def test_a_checkpoint_has_exact_shards_and_goes_on_to_the_bit(checkpoint):
    for results in checkpoint[1]:
        assert results["masters"] == results["goes on"] == 0, results


def test_a_checkpoint_loads_on_other_numbers_of_ranks(checkpoint):
    path, (first, _) = checkpoint
    for total, progress in run_ranks(loaded, 3, path):
        assert abs(total - first["saved"]) < 1e-6 and progress < float("inf")
