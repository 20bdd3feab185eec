"""FSDP2 inside a node, compopt between nodes: real fully_shard, 2 x 2, 2 x 2 x 2 with TP; overlap; replaced groups."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist
from fsdp_models import cut, loss, whole
from fsdp_models import make as make_cut
from fsdp_models import train as train_cut
from hsdp_models import Net, differences, hsdp, make, train
from ranks import catch_message, run_ranks
from slow_rows import selected, slow_but
from table import CASES, by_name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compopt

MAIN = ["RadiusAdamW", "SeparateAdam", "TagcAdamW"]  # the others with `make slow`
every_name = pytest.mark.parametrize("name", slow_but(lambda name: name in MAIN, (case.name for case in CASES)))


def reference(make_optimizer, steps: int, clip: float | None = None) -> tuple[torch.Tensor, float]:
    """One process, the data of all four ranks, an optimizer without compression; its parameters, the last norm."""
    model, norm = make(), 0.0
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, step, who) for who in range(4)) / 4).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip)) if clip else 0.0
        optimizer.step()
    return whole(model), norm


def tensors_of(states: dict) -> dict[int, dict[str, torch.Tensor]]:
    """Return the state of every parameter but counts; of a wrapper the base's too, of LocalSteps the outer one's."""

    def flatten(entry: dict, prefix: str = "") -> dict[str, torch.Tensor]:
        results = {}
        for name, value in entry.items():
            if isinstance(value, dict):
                results |= flatten(value, f"{prefix}{name}.")
            elif value.dim():
                results[prefix + name] = value
        return results

    return {n: flatten(entry) for n, entry in states.items()}


def trained(rank: int, wanted: dict[str, torch.Tensor]) -> dict[str, dict]:
    """For each class: lossless against its reference; the compressed run's replicas, bytes, state, and an inf."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = {}
    for case in (by_name[name] for name in wanted):
        model, optimizer = hsdp(mesh, case.new, lr=1e-2, **case.lossless)
        train(model, optimizer, range(5), rank)
        far = float((whole(model) - wanted[case.name]).abs().max())

        model, optimizer = hsdp(mesh, case.make)
        train(model, optimizer, range(7), rank)
        stats = optimizer.stats  # updated parameters go as they are
        share = (stats.bytes_sent - stats.parameter_bytes) / stats.bytes_dense
        before, states = whole(model), tensors_of(optimizer.state_dict()["state"])
        optimizer.zero_grad()
        loss(model, 7, rank).backward()
        if rank == 3:  # behind FSDP's own reduction, so that the other shard's ranks cannot see it themselves
            model.up.weight.grad.to_local()[0, 0] = float("inf")
        optimizer.step()
        results[case.name] = {
            "far": far,
            "apart": differences(before),
            "share": share,
            "empty": sum(p.to_local().numel() == 0 for p in model.parameters()),
            "skipped": optimizer.stats.phase == "skipped" and torch.equal(whole(model), before),
            "state": sorted({name for entry in states.values() for name in entry}),
            "laid out": all(
                value.placements == p.placements and value.shape == p.shape
                for n, p in enumerate(model.parameters()) for value in states[n].values()
            ),
        }  # fmt: skip
    return results


@pytest.fixture(scope="module")
def runs(request):
    return run_ranks(trained, 4, {name: reference(by_name[name].reference, 5)[0] for name in selected(request, "name")})


@every_name
def test_lossless_is_the_reference_on_the_average_of_all_four(runs, name):
    assert all(rank[name]["far"] < 1e-9 for rank in runs)


@every_name
def test_compressed_replicas_stay_equal_with_empty_shards_too(runs, name):
    assert [rank[name]["empty"] for rank in runs] == [0, 2, 0, 2]
    assert all(rank[name]["apart"] == 0 for rank in runs)
    assert all(
        rank[name]["share"] < (0.7 if by_name[name].cls.rank_local_state else 1.02) for rank in runs
    )  # control words


@every_name
def test_an_inf_in_one_shard_makes_every_shard_skip(runs, name):
    assert all(rank[name]["skipped"] for rank in runs)


@every_name
def test_saved_state_is_laid_out_as_the_parameter(runs, name):
    assert all(rank[name]["laid out"] and rank[name]["state"] for rank in runs)


def parted(rank: int, names: list[str]) -> dict[str, tuple[int, str]]:
    """Rank 3 changes an element of its shard after step 5: what every rank then says, and when."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = {}
    for case in (by_name[name] for name in names):
        model, optimizer = hsdp(mesh, case.make)
        train(model, optimizer, range(5), rank)
        if rank == 3:
            with torch.no_grad():
                model.down.weight.to_local()[2, 3] += 1e-9
        message = catch_message(ValueError, functools.partial(train, model, optimizer, range(5, 105), rank))
        results[case.name] = optimizer.stats.applied_steps, message
    return results


@pytest.mark.parametrize(
    "names",
    [["SeparateAdam"], pytest.param(["RadiusAdamW", "ScapeAdamS", "Average"], marks=pytest.mark.slow)],
    ids=["SeparateAdam", "others"],
)
def test_replicas_of_a_shard_that_part_are_found_on_all_ranks(names):
    for rank, results in enumerate(run_ranks(parted, 4, names)):
        for steps, message in results.values():
            assert steps <= 12, "the model is small: every fourth step compares all of it"
            expected = "rank 0 has .*, rank 1 has .* equal before" if rank in (1, 3) else "another shard"
            assert re.search(expected, message), (rank, message)


def in_the_stack(rank: int, wanted: torch.Tensor, norm: float) -> dict:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results, lossless = {}, by_name["RadiusAdamW"].make

    model, optimizer = hsdp(mesh, lossless, density=1.0, lr=1e-2, max_grad_norm=0.5)
    train(model, optimizer, range(3), rank)
    results["norm"] = optimizer.stats.grad_norm / norm - 1
    results["clipped"] = float((whole(model) - wanted).abs().max())

    torch.manual_seed(rank // 2)  # other parameters in each replica; the optimizer makes them equal
    model, optimizer = hsdp(mesh, lossless, Net().double())
    results["broadcast"] = differences(whole(model))

    model, optimizer = hsdp(mesh, lossless, make(torch.bfloat16))
    for p in model.parameters():
        p.data.mul_(1 + mesh.get_local_rank("shard"))  # set from outside after the optimizer was made
    train(model, optimizer, range(6), rank, torch.bfloat16)
    masters = [float((optimizer.state[p]["master"].to_local().bfloat16() - p.to_local()).abs().sum())
               for p in model.parameters()]  # fmt: skip
    results["masters"], results["bf16"] = sum(masters), differences(whole(model))

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = hsdp(mesh, lossless, make(torch.float32))
    phases = []
    for step in range(6):
        optimizer.zero_grad()
        value = loss(model, step, rank, torch.float32)
        scaler.scale(value * (float("inf") if step == 3 and rank == 1 else 1)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        phases.append(optimizer.stats.phase == "skipped")
    results["scaler"] = phases, scaler.get_scale(), differences(whole(model))
    return results


def test_clip_broadcast_masters_and_scaler():
    for rank, results in enumerate(run_ranks(in_the_stack, 4, *reference(torch.optim.AdamW, 3, clip=0.5))):
        assert abs(results["norm"]) < 1e-9 and results["clipped"] < 1e-9, "the norm is not that of the whole model"
        assert results["broadcast"] == 0
        assert results["masters"] == 0 and results["bf16"] == 0
        skipped, scale, apart = results["scaler"]
        assert skipped == [step == 3 for step in range(6)] and apart == 0
        assert scale == (512 if rank < 2 else 1024)  # the scales of two replicas may part, not those of two shards


def refused(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group, results = mesh.get_group("replicate"), {}

    def radius(wrapped: nn.Module, **options) -> str:
        return catch_message(ValueError, lambda: compopt.RadiusAdamW(wrapped.parameters(), **options))

    results["reduced already"] = radius(fully_shard(make(), mesh=mesh), process_group=group)
    results["default group"] = radius(fully_shard(make(), mesh=mesh["shard"]))
    results["sharded over it"] = radius(fully_shard(make(), mesh=mesh["replicate"]), process_group=group)
    with torch.device("meta"):
        without_storage = fully_shard(make(), mesh=mesh["shard"])
    results["meta"] = radius(without_storage, process_group=group)
    results["mesh"] = radius(make(), process_group=mesh["replicate"])
    results["FSDP1"] = radius(FullyShardedDataParallel(make(), device_id=torch.device("cpu"), use_orig_params=True))
    return results


def test_refusals_say_what_to_do():
    for results in run_ranks(refused, 4):
        assert "is averaged over mesh dimension 'replicate' before the optimizer" in results["reduced already"]
        assert "different shards of parameter" in results["default group"] and "'shard'" in results["default group"]
        assert "different shards of parameter" in results["sharded over it"]
        assert "to_empty" in results["meta"]
        assert 'a DeviceMesh: pass its group, as mesh.get_group("dp")' in results["mesh"]
        assert "FullyShardedDataParallel" in results["FSDP1"]
        for name in ("reduced already", "default group", "sharded over it", "FSDP1"):
            assert "fully_shard(model, mesh=mesh['shard'])" in results[name]
            assert "process_group=mesh.get_group('replicate')" in results[name]


class Block(nn.Module):
    """No float64 on purpose: what a tensor-parallel user has."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))


def three_axes(rank: int) -> dict:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    who = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")

    def block() -> nn.Module:
        torch.manual_seed(0)
        return Block().double()

    def steps(model, optimizer, people, clip=None) -> float:
        for step in range(4):
            optimizer.zero_grad()
            for w in people:
                generator = torch.Generator().manual_seed(10 * step + w)
                x = torch.randn(4, 64, generator=generator, dtype=torch.float64)
                ((model(x) - x.roll(1, 1)).square().mean() / len(people)).backward()
            norm = clip(model.parameters()) if clip else 0.0
            optimizer.step()
        return float(norm)

    wanted = block()
    adamw = torch.optim.AdamW(wanted.parameters(), 1e-2)
    norm = steps(wanted, adamw, range(4), lambda params: nn.utils.clip_grad_norm_(params, 0.1))
    results = {}
    for name, options in {"lossless": {"density": 1.0, "max_grad_norm": 0.1}, "sparse": {"dense_steps": 0}}.items():
        model = block()
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        group = mesh.get_group("replicate")
        optimizer = by_name["RadiusAdamW"].make(model.parameters(), lr=1e-2, process_group=group, **options)
        steps(model, optimizer, [who])
        results[name] = optimizer.stats, whole(model)
    stats, parameters = results["lossless"]
    sparse, _ = results["sparse"]
    return {
        "far": float((parameters - whole(wanted)).abs().max()),
        "norm": stats.grad_norm / norm - 1,
        "apart": differences(results["sparse"][1]),
        "share": sparse.bytes_sent / sparse.bytes_dense,
        "phase": sparse.phase,
    }


@pytest.mark.slow
def test_tensor_parallel_inside_fsdp_inside_replicas():
    for results in run_ranks(three_axes, 8):
        assert results["far"] < 1e-9 and abs(results["norm"]) < 1e-9
        assert results["apart"] == 0 and results["phase"] == "sparse" and results["share"] < 0.6


def grown(rank: int) -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64)), mesh=mesh["shard"])
    optimizer = compopt.ScapeAdamS(model[0].parameters(), process_group=mesh.get_group("replicate"))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    momenta = [entry["exp_avg"] for entry in optimizer.state.values()]
    return [tuple(m.to_local().shape) for m in momenta if hasattr(m, "to_local")]  # of biases; others are on a mask


def test_a_group_that_comes_later_finds_the_momenta_of_sharded_tensors_that_are_not_compressed():
    assert run_ranks(grown, 2) == [[(40,), (32,)]] * 2


def cut_in_parts(mesh) -> nn.Module:
    model = make()
    for part in (model.up, model.down, model.flat):
        fully_shard(part, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def run(name: str, mesh, overlapped: bool, backwards: int, steps: int) -> tuple[list, torch.Tensor]:
    """Steps in buckets of a module each; the optimizer's stats of every one, and its parameters."""
    model, rank = cut_in_parts(mesh), mesh.get_rank()
    groups = [{"params": list(part.named_parameters())} for part in (model.up, model.norm, model.down, model.flat)]
    optimizer = by_name[name].make(groups, process_group=mesh.get_group("replicate"))
    optimizer._engine.overlap.is_stopped = not overlapped
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


def optimizer_replaced(rank: int) -> tuple[list[int], float]:
    """An optimizer that was made before over the same parameters is alive on rank 0 alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, held = cut_in_parts(mesh), []
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
    assert run_ranks(optimizer_replaced, 4) == [([0, 3, 3], 0.0)] * 4


class Branch(nn.Module):
    """Leaves a layer out where it is told to, as a layer of experts that get no token."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, left_out: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() if number != left_out else x
        return x


def leaves_layers_out(rank: int) -> tuple[list[int], float]:
    """Of two backwards a step replica 1 leaves one out, or uses other layers in one, also before a save."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model, early = fully_shard(Branch(), mesh=mesh["shard"]), []
    groups = [{"params": list(part.parameters())} for part in model.layers]
    optimizer = by_name["SeparateAdam"].make(groups, process_group=mesh.get_group("replicate"))
    for step, left_out in enumerate((None, None, None, 2, 1)):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        if step != 2 or rank == 0:
            model(x).square().mean().backward()
        model(x.flip(0), left_out if rank else None).square().mean().backward()
        if step == 4:
            optimizer.consolidate_state()
        optimizer.step()
        early.append(optimizer.stats.early_buckets)
    return early, differences(whole(model))


def test_replicas_that_use_different_layers_send_equally_much_in_backward():
    assert run_ranks(leaves_layers_out, 2) == [([0, 2, 2, 2, 0], 0.0), ([0, 2, 0, 2, 0], 0.0)]


@pytest.fixture(scope="module")
def early_runs():
    return run_ranks(both, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_buckets_leave_in_backward_and_the_step_is_the_same(early_runs, name):
    for results in early_runs:
        for left, same, apart in results[name]:
            assert all(left), "the first step gets acquainted, and the last bucket waits for step()"
            assert same and apart == 0


STEPS, AT = 5, 3
OPTIMIZERS = {
    "SeparateAdam": lambda params: compopt.SeparateAdam(params, lr=1e-2, rank=4, dense_steps=1),
    "TagcAdamW": lambda params: compopt.TagcAdamW(params, lr=1e-2, density=0.1, dense_steps=1),
    "Average": lambda params: compopt.Average(torch.optim.AdamW(params, lr=1e-2)),
    "Separate": lambda params: compopt.Separate(torch.optim.SGD(params, lr=1e-2), rank=4, dense_steps=1),
}


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """As Accelerate does: placeholders while the model is cut, then the shards."""
    before = {p: name for name, p in model.named_parameters()}
    names = [[before[p] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype)
    after = dict(cut(model).named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [after[name] for name in own]
    return model


def groups_replaced(rank: int, names: list[str]) -> dict:
    results = {}
    for name, build in ((name, OPTIMIZERS[name]) for name in names):
        expected = cut(make_cut())
        optimizer = build(expected.parameters())
        train_cut(expected, optimizer, range(AT), rank)
        optimizer.consolidate_state()
        train_cut(expected, optimizer, range(AT, STEPS), rank)

        model = make_cut()
        prepare(model, first := build(model.parameters()))
        train_cut(model, first, range(AT), rank)
        resumed = make_cut()
        prepare(resumed, second := build(resumed.parameters()))
        resumed.load_state_dict(model.state_dict())
        first.consolidate_state()
        second.load_state_dict(first.state_dict())
        train_cut(model, first, range(AT, STEPS), rank)
        train_cut(resumed, second, range(AT, STEPS), rank)
        results[name] = {
            "made late": torch.equal(whole(model), whole(expected)),
            "resumed": torch.equal(whole(resumed), whole(model)),
            "bytes": [one.stats.bytes_sent / optimizer.stats.bytes_sent for one in (first, second)],
        }
    model = make_cut()
    prepare(model, optimizer := compopt.RadiusAdamW(model.parameters(), lr=1e-2))
    results["refused"] = catch_message(ValueError, lambda: loss(model, 0, rank))
    return results


@pytest.fixture(scope="module")
def replaced_runs(request):
    return run_ranks(groups_replaced, 2, selected(request, "name"))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("TagcAdamW", "Separate"), OPTIMIZERS))
def test_parameters_that_were_replaced_are_trained_as_if_the_optimizer_came_last(replaced_runs, name):
    for found in replaced_runs:
        assert found[name] == {"made late": True, "resumed": True, "bytes": [1.0, 1.0]}


def test_a_class_that_cannot_train_inside_fsdp_says_so_in_the_first_forward(replaced_runs):
    for found in replaced_runs:
        assert "have different shards of" in found["refused"] and "process_group" in found["refused"]


def changes_an_option(rank: int) -> dict[str, object]:
    """Replica 1 leaves a backward out, and all change an option before it, or between it and the step."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model, told, early = fully_shard(Branch(), mesh=mesh["shard"]), [], []
    groups = [{"params": list(part.parameters())} for part in model.layers]
    optimizer = by_name["SeparateAdam"].make(groups, process_group=mesh.get_group("replicate"))
    for step in range(6):
        for when in ("before", "between"):
            if when == "between" and (step != 3 or rank == 0):
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
                model(x).square().mean().backward()
            if (step, when) in ((2, "before"), (2, "between"), (3, "between")):
                for group in optimizer.param_groups:
                    group["rank"] += 1
        told.append(catch_message(compopt.CommunicationError, optimizer.step))
        if step == 3:
            optimizer.rebind(dist.new_group())
            optimizer.step()
        optimizer.zero_grad()
        early.append(optimizer.stats.early_buckets)
    sums = [torch.empty(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(sums, whole(model).double().norm().view(1), optimizer.comm.group)  # the mesh's group is lost
    return {"told": told, "early": early, "apart": float(sums[0] - sums[1])}


def test_options_that_change_between_a_backward_and_its_step_need_the_backward_of_all_replicas():
    for rank, results in enumerate(run_ranks(changes_an_option, 2)):
        error = results["told"].pop(3)
        assert results == {"told": ["no CommunicationError"] * 5, "early": [0, 2, 0, 0, 2, 2], "apart": 0.0}
        begun = "rank 0 has 2 exchanges of step 4 begun, rank 1 has 0 exchanges of step 4 begun"
        assert f"step 4 was not applied on rank {rank}: options that decide what is sent were changed" in error, error
        assert begun in error and "call rebind()" in error, error


def freezes_a_layer(rank: int) -> dict[str, dict[str, object]]:
    """A layer that is frozen after some steps, consolidated, saved, loaded, saved again, and trained on."""
    mesh, results = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")), {}
    for name, options in {"SeparateAdam": {"residual_dtype": "int8"}, "ScapeAdamS": {}, "Average": {}}.items():
        models, optimizers = [fully_shard(Branch(), mesh=mesh["shard"]) for _ in range(2)], []
        models[1].layers[2].requires_grad_(False)
        for model in models:
            params, group = list(model.named_parameters()), mesh.get_group("replicate")
            optimizers.append(by_name[name].make(params, process_group=group, **options))
        for step in range(6):
            models[0].layers[2].requires_grad_(step < 4)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))
            models[0](x).square().mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        optimizers[0].consolidate_state()
        models[1].load_state_dict(models[0].state_dict())
        saved = [optimizers[0].state_dict()]
        optimizers[1].load_state_dict(saved[0])
        optimizers[1].consolidate_state()
        saved.append(optimizers[1].state_dict())
        residual = [one["state"][4]["residual"].full_tensor().clone() for one in saved]
        entries = [{**one["state"][4], **one["state"][5]} for one in saved]
        for model, optimizer in zip(models, optimizers, strict=True):
            model.layers[2].requires_grad_(True)
            model(torch.ones(8, 64) * (rank + 1)).square().mean().backward()
            optimizer.step()
        results[name] = {
            "state": [{n: type(v).__name__ for n, v in entry.items() if torch.is_tensor(v)} for entry in entries],
            "owed": [bool(one.any()) for one in residual],
            "far": float((residual[0] - residual[1]).abs().max()),
            "means": [differences(one) for one in residual],
            "apart": float((whole(models[0]) - whole(models[1])).abs().max()),
        }
    return results


def test_state_of_frozen_shards_is_averaged_saved_and_loaded():
    for results in run_ranks(freezes_a_layer, 2):
        for name, case in results.items():
            before, after = case["state"]
            assert before == after and {kind for n, kind in before.items() if n != "step"} == {"DTensor"}, (name, case)
            assert case["owed"] == [True, True] and case["far"] == 0 and case["means"] == [0, 0], (name, case)
            assert case["apart"] < 1e-6, (name, case)
