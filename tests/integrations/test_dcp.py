"""Checkpoints in the user's hands: torch.distributed.checkpoint, its options, other meshes, AdamW's own."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conformance import Small, loss, make_ranks, through_a_file
from fsdp_models import loss as loss_of_rank
from fsdp_models import whole
from hsdp_models import hsdp, make, train
from ranks import run_ranks
from slow_rows import selected, slow_but
from table import CASES, DERIVED, FORMS, INT8, Case, by_name, muon
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves

import compopt
from compopt._wire.codec import dtype_name

OPTIONS = {
    "none": {},
    "full": dict(full_state_dict=True),
    "offload": dict(cpu_offload=True),
    "full, offload": dict(full_state_dict=True, cpu_offload=True),
    "flat": dict(flatten_optimizer_state_dict=True),
    "flat, offload": dict(flatten_optimizer_state_dict=True, cpu_offload=True),
}  # flat and full together torch 2.13 cannot load, of its own AdamW either
SOME = ("full", "flat, offload")  # with every dtype and form: what an option does depends on neither


def around(base):
    def build(params, lr=1e-2, **options):
        return compopt.Separate(base(params), projection="gaussian", ratio=8, **options)

    return build


def case_of(name: str, base) -> Case:
    return dataclasses.replace(by_name["Separate"], compressed={}, build=around(base), form=name)


def adams(params):
    return compopt.AdamS(params, lr=1e-2)


BASES = [
    case_of("SGD", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    case_of("plain SGD", lambda params: torch.optim.SGD(params, lr=0.1)),
    case_of("NAdam", torch.optim.NAdam),
    case_of("AdamS", adams),
]

# no averaged start: then entries of the optimizer have names that its state dict lacks
INNER = {"Muon": muon, "AdamS": adams, "SGD": lambda params: torch.optim.SGD(params, lr=0.1)}


def rounds_of(name: str, inner) -> Case:
    def build(params, lr=1e-2, **options):
        return compopt.LocalSteps(inner(params), every=4, growth_steps=0, fragments=2, delay=1, **options)

    return dataclasses.replace(by_name["LocalSteps"], compressed={}, build=build, form=f"rounds of {name}")


ROUNDS = [rounds_of(name, inner) for name, inner in INNER.items()]


def assert_same(a: dict, b: dict) -> None:
    (left, one), (right, other) = tree_flatten(a), tree_flatten(b)
    assert one == other
    for x, y in zip(left, right, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def through(folder: Path, saved: dict, template: dict) -> dict:
    """Written by torch.distributed.checkpoint, and read into what a new optimizer has."""
    state = {"optimizer": template}
    dcp.save({"optimizer": saved}, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    return state["optimizer"]


def tensors_of(optimizer) -> dict:
    return copy.deepcopy(optimizer.state_dict()["state"])


# a payload's dtype, which is saved by its name, with every class that has one: not both with each
PAIRS = [(case, None) for case in [*CASES, *FORMS, *DERIVED, *INT8, *BASES, *ROUNDS]]
PAIRS += [(case, "bfloat16" if case.sharded or n % 2 else torch.int8) for n, case in enumerate([*CASES, *FORMS])]
FAST = [
    "RadiusAdamW",
    "SeparateAdam",
    "TagcAdamW",
    "Average",
    "LocalSteps, rounds",
    "LocalSteps, rounds of AdamS",
    "Separate, SGD",
]


def is_fast(case: Case, dtype: object) -> bool:
    """One class of each kind as it is, and two with another payload; the others with `make slow`."""
    return case.name in FAST if dtype is None else case.name in ("RadiusAdamW", "LocalSteps")


@pytest.mark.parametrize("case, dtype", slow_but(is_fast, PAIRS), ids=lambda one: getattr(one, "name", str(one)))
def test_every_option_brings_everything_back(case, dtype, alone, tmp_path):
    options = {} if dtype is None else {"payload_dtype": dtype}
    try:
        ranks = make_ranks(case, 2, **options)
    except (ValueError, TypeError):
        pytest.skip(f"does not take {dtype}")
    ranks.train(loss, 6)
    ranks.world.consolidate(ranks.optimizers)
    optimizer, model = ranks.optimizers[0], ranks.models[0]
    has_all = dtype is None and case in CASES
    then, weights, saved = tensors_of(optimizer), copy.deepcopy(model.state_dict()), {}
    state_dict_options = {name: OPTIONS[name] for name in (OPTIONS if has_all else SOME)}
    for name, of in state_dict_options.items():
        saved[name] = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**of)))
    ranks.train(loss, 2)
    for name, of in state_dict_options.items():
        again, how = make_ranks(case, 2, **options), StateDictOptions(**of)
        again.steps = 6
        for rank, (_, net, other) in enumerate(again):
            net.load_state_dict(weights)
            read = copy.deepcopy(saved[name])
            if rank == 0:
                read = through(tmp_path / name, read, get_optimizer_state_dict(net, other, options=how))
            set_optimizer_state_dict(net, other, optim_state_dict=read, options=how)
        if case.sharded:
            again.world.consolidate(again.optimizers)
        for other in again.optimizers:
            assert_same(tensors_of(other), then)
            assert [group["step"] for group in other.option_groups] == [6] * len(other.option_groups), name
            if dtype is not None:
                assert {group["payload_dtype"] for group in other.option_groups} == {dtype_name(dtype)}, name
        again.train(loss, 2)
        for p, q in zip(ranks.models[1].parameters(), again.models[1].parameters(), strict=True):
            assert torch.equal(p, q), name


SAFE = ["SeparateAdam", "LocalSteps, rounds of AdamS"]


@pytest.mark.parametrize(
    "case", slow_but(lambda case: case.name in SAFE, [*CASES, *FORMS, *ROUNDS]), ids=lambda case: case.name
)
def test_safetensors_hold_a_flattened_checkpoint(case, alone, tmp_path):
    """Its tensors: what else there is are options."""
    safetensors, how = pytest.importorskip("safetensors.torch"), StateDictOptions(flatten_optimizer_state_dict=True)
    ranks, again = make_ranks(case, 2), make_ranks(case, 2)
    ranks.train(loss, 5)
    ranks.world.consolidate(ranks.optimizers)
    saved = get_optimizer_state_dict(ranks.models[0], ranks.optimizers[0], options=how)
    tensors = {name: value for name, value in saved.items() if torch.is_tensor(value)}
    safetensors.save_file(tensors, tmp_path / "state.safetensors")
    read = {**saved, **safetensors.load_file(tmp_path / "state.safetensors")}
    net, other = again.models[0], again.optimizers[0]
    net.load_state_dict(ranks.models[0].state_dict())
    set_optimizer_state_dict(net, other, read, options=how)
    if not case.sharded:
        loaded = get_optimizer_state_dict(net, other, options=how)
        assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


def test_local_steps_go_on_from_adamw_and_adamw_from_them():
    wanted, model = make(), make()
    steady, first = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (wanted, model))
    train(wanted, steady, range(9), 0)
    train(model, first, range(3), 0)
    ours = compopt.LocalSteps(torch.optim.AdamW(model.parameters(), lr=0.5))
    ours.load_state_dict(through_a_file(first.state_dict()))
    train(model, ours, range(3, 6), 0)
    last = torch.optim.AdamW(model.parameters(), lr=0.5)
    last.load_state_dict(through_a_file(ours.inner.state_dict()))
    train(model, last, range(6, 9), 0)
    assert torch.equal(whole(model), whole(wanted))


def test_a_flattened_checkpoint_of_the_inner_optimizer_is_loaded_into_it():
    how, model, net = StateDictOptions(flatten_optimizer_state_dict=True), make(), make()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, range(2), 0)
    saved = copy.deepcopy(get_optimizer_state_dict(model, adamw, options=how))
    optimizer = compopt.LocalSteps(torch.optim.AdamW(net.parameters(), lr=0.5))
    with pytest.raises(ValueError, match="flattened, and not of LocalSteps: load it into the optimizer inside"):
        set_optimizer_state_dict(net, optimizer, saved, options=how)
    set_optimizer_state_dict(net, optimizer.base, saved, options=how)
    net.load_state_dict(model.state_dict())
    train(model, adamw, range(2, 4), 0)
    train(net, optimizer, range(2, 4), 0)
    assert_same(optimizer.base.state_dict(), adamw.state_dict())
    assert_same(net.state_dict(), model.state_dict())


@pytest.mark.parametrize("case", [by_name["Separate"], by_name["Average"], *BASES], ids=lambda case: case.name)
def test_what_a_base_has_before_its_first_step_means_nothing(case, alone):
    """Its state dict has room for torch.distributed.checkpoint to load into; loading that changes nothing."""
    ranks, others = make_ranks(case, 2), make_ranks(case, 2)
    generator = torch.get_rng_state()
    for _, net, optimizer in ranks:
        saved = get_optimizer_state_dict(net, optimizer)
        assert all("begun" in entry["base"] for entry in saved["state"].values())
        set_optimizer_state_dict(net, optimizer, optim_state_dict=saved)
        if case.form != "AdamS":
            assert not any(optimizer.base.state.values())
    assert torch.equal(generator, torch.get_rng_state())
    ranks.train(loss, 3)
    others.train(loss, 3)
    for p, q in zip(ranks.models[0].parameters(), others.models[0].parameters(), strict=True):
        assert torch.equal(p, q)


def on_two(rank: int, folder: str) -> bool:
    from torch.nn.parallel import DistributedDataParallel as DDP

    def made():
        torch.manual_seed(0)
        model = DDP(Small(), find_unused_parameters=True)
        return model, by_name["Separate"].make(model.parameters(), payload_dtype=torch.int8)

    def train(model, optimizer, steps) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    def loss_of(model, rank, step):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        return (model(x) - x.flip(1)).square().mean()

    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = made()
    train(model, optimizer, range(5))
    optimizer.consolidate_state()
    saved = get_optimizer_state_dict(model, optimizer, options=how)  # whole on rank 0, as torch has it
    weights = copy.deepcopy(model.module.state_dict())
    if rank == 0:
        torch.save(saved, Path(folder) / "optimizer.pt")
    train(model, optimizer, range(5, 8))
    again, other = made()
    again.module.load_state_dict(weights)
    read = torch.load(Path(folder) / "optimizer.pt", weights_only=True)
    set_optimizer_state_dict(again, other, optim_state_dict=read, options=StateDictOptions(full_state_dict=True))
    train(again, other, range(5, 8))
    return all(map(torch.equal, model.parameters(), again.parameters()))


def test_two_real_ranks_go_on_from_a_full_state_dict(tmp_path):
    assert run_ranks(on_two, 2, str(tmp_path)) == [True, True]


OUTER = "LocalSteps"  # whose outer optimizers' state stands beside the parameters', where DCP does not look
EVERY = [case.name for case in CASES if case.name != OUTER]
MAIN = ["TagcAdamW", "Separate"]  # sharded; flattened, with a base; the others with `make slow`


def save(folder: str, model: nn.Module, optimizer, **options) -> None:
    optimizer.consolidate_state()
    options = StateDictOptions(**options)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer, **options) -> None:
    options = StateDictOptions(**options)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def everything(model: nn.Module, optimizer) -> dict[str, torch.Tensor]:
    """Parameters and all states, whole, by name. Must be called on all ranks."""
    if optimizer.sharded:
        optimizer.consolidate_state()
    results = {"parameters": whole(model)}
    for n, entry in optimizer.state_dict()["state"].items():
        for name, value in {**entry, **entry.get("base", {})}.items():
            if torch.is_tensor(value):
                results[f"{n} {name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return results


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what differs in any bit."""
    return [name for name in a if name not in b or not torch.equal(a[name], b[name])]


def through_dcp(rank: int, folder: str, names: list[str]) -> dict[str, dict[str, list[str]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    results = {}
    for name in names:
        case, place = by_name[name], str(Path(folder) / name)
        flat = {"flatten_optimizer_state_dict": name in ("RadiusAdamW", "Separate")}
        model, optimizer = hsdp(mesh, case.make)
        train(model, optimizer, range(4), rank)
        save(place, model, optimizer, **flat)
        then = everything(model, optimizer)
        train(model, optimizer, range(4, 8), rank)

        same, again = hsdp(mesh, case.make)
        load(place, same, again, **flat)
        loaded = everything(same, again)
        train(same, again, range(4, 8), rank)

        cut, elsewhere = hsdp(other, case.make)
        load(place, cut, elsewhere, **flat)
        results[name] = {
            "loaded": apart(then, loaded),
            "resumed": apart(everything(model, optimizer), everything(same, again)),
            "cut otherwise": apart(then, everything(cut, elsewhere)),
            "steps": again.stats.applied_steps,
        }
    return results


every_name = pytest.mark.parametrize("name", slow_but(lambda name: name in MAIN, EVERY))


@pytest.fixture(scope="module")
def sharded(request, tmp_path_factory):
    return run_ranks(through_dcp, 4, str(tmp_path_factory.mktemp("dcp")), selected(request, "name"))


@every_name
def test_dcp_brings_everything_back_and_training_goes_on_to_the_bit(sharded, name):
    for rank in sharded:
        assert rank[name]["loaded"] == [] and rank[name]["resumed"] == [] and rank[name]["steps"] == 8


@every_name
def test_dcp_cuts_a_checkpoint_for_another_mesh(sharded, name):
    assert all(rank[name]["cut otherwise"] == [] for rank in sharded)


def between_wrappers(rank: int, folder: str) -> dict:
    """From DDP on two ranks to FSDP over both, and back, through DCP and through a full state dict."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    results = {}
    for name in ("RadiusAdamW", "ScapeAdamS"):
        case, place = by_name[name], str(Path(folder) / name)
        model = DDP(make())
        optimizer = case.make(model.parameters())
        train(model, optimizer, range(5), rank)
        save(place, model, optimizer)
        then = everything(model, optimizer)
        full = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=full)
        weights = get_model_state_dict(model, options=full)

        cut, sharded_now = hsdp(mesh, case.make)
        load(place, cut, sharded_now)
        results[name, "DCP"] = apart(then, everything(cut, sharded_now))
        cut, sharded_now = hsdp(mesh, case.make)
        set_model_state_dict(cut, weights, options=full)
        set_optimizer_state_dict(cut, sharded_now, state, options=full)
        results[name, "full"] = apart(then, everything(cut, sharded_now))
        save(place + " back", cut, sharded_now)
        again = DDP(make())
        whole_again = case.make(again.parameters())
        load(place + " back", again, whole_again)
        results[name, "back"] = apart(then, everything(again, whole_again))
        dist.barrier()
    return results


def test_from_ddp_to_fsdp_and_back(tmp_path):
    for results in run_ranks(between_wrappers, 2, str(tmp_path)):
        assert len(results) == 6 and not any(results.values()), results


@pytest.mark.parametrize("name", ["RadiusAdamW", "SeparateAdam"])
def test_a_running_job_adopts_compression_and_drops_it(name):
    """AdamW for 4 steps, ours without loss for 4, AdamW for 4: the run that never changed, to rounding."""
    case = by_name[name]
    wanted, model = make(), make()
    steady, first = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (wanted, model))
    train(wanted, steady, range(12), 0)
    train(model, first, range(4), 0)

    ours = case.new(model.parameters(), lr=0.5, **case.lossless)
    ours.load_state_dict(through_a_file(first.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2 and ours.param_groups[0]["step"] == 4
    train(model, ours, range(4, 8), 0)

    last = torch.optim.AdamW(model.parameters(), lr=0.5)
    last.load_state_dict(through_a_file(ours.state_dict()))
    train(model, last, range(8, 12), 0)
    torch.testing.assert_close(whole(model), whole(wanted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_state_dict_holds_every_state_in_its_parameters_shape(case):
    model = make(torch.float32)
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(6), 0, torch.float32)
    saved = through_a_file(optimizer.state_dict())
    for n, p in enumerate(model.parameters()):
        tensors = tree_leaves(saved["state"][n])
        assert all(value.dim() == 0 or value.shape == p.shape for value in tensors)
    kept = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
    optimizer.load_state_dict(saved)
    for p, entry in zip(model.parameters(), kept, strict=True):
        before, after = (dict(tree_flatten_with_path(one)[0]) for one in (entry, optimizer.state[p]))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_wrapped_optimizer_refuses_a_checkpoint_without_its_base():
    model = make()
    optimizer = by_name["Separate"].make(model.parameters())
    train(model, optimizer, range(2), 0)
    state = get_optimizer_state_dict(model, optimizer)
    for entry in state["state"].values():
        del entry["base"]
    with pytest.raises(ValueError, match="not the base optimizer's state"):
        set_optimizer_state_dict(model, optimizer, state)


def test_weights_loaded_after_the_optimizer_was_made_reach_the_masters():
    model = make(torch.bfloat16)
    optimizer = compopt.RadiusAdamW(model.parameters(), lr=1e-6, dense_steps=10)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    loaded = whole(model)
    loss_of_rank(model, 0, 0, torch.bfloat16).backward()
    optimizer.step()
    assert float((whole(model) - loaded).abs().max()) < 0.1
