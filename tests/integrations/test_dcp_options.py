"""torch.distributed.checkpoint: every StateDictOptions, class and payload dtype brings everything back, to the bit."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance import Small, loss, make_ranks
from ranks import run_ranks
from slow_rows import slow_but
from table import CASES, DERIVED, FORMS, INT8, Case, by_name
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_flatten

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
PAIRS = [(case, None) for case in [*CASES, *FORMS, *DERIVED, *INT8, *BASES]]
PAIRS += [(case, "bfloat16" if case.sharded or n % 2 else torch.int8) for n, case in enumerate([*CASES, *FORMS])]
FAST = ["RadiusAdamW", "SeparateAdam", "TagcAdamW", "Average", "LocalSteps, rounds", "Separate, SGD"]


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
            assert [group["step"] for group in other._option_groups] == [6] * len(other._option_groups), name
            if dtype is not None:
                assert {group["payload_dtype"] for group in other._option_groups} == {dtype_name(dtype)}, name
        again.train(loss, 2)
        for p, q in zip(ranks.models[1].parameters(), again.models[1].parameters(), strict=True):
            assert torch.equal(p, q), name


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
