"""The memory that an optimizer holds and takes at its peak, told before its first step."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from fsdp_models import cut, make, train
from ranks import run_ranks
from sim import Ranks, World
from slow_rows import slow_but
from table import CASES, FORMS, INT8, Case, by_name
from torch import nn

import compopt

SHAPES = [(128, 96), (96, 128), (4096, 1), (96,), (65, 67)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ps = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return sum(p.square().sum() for p in model.parameters()) * (1 + rank)


def measure(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of all memory that the optimizer refers to between steps, by kind; without counts of steps."""
    places: dict[str, list[tuple[int, int]]] = {}

    def add(kind: str, value: object) -> None:
        if torch.is_tensor(value) and value.dim():
            storage = getattr(value, "_local_tensor", value).untyped_storage()
            places.setdefault(kind, []).append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    for one in (optimizer, getattr(optimizer, "base", None)):
        for entry in () if one is None else one.state.values():
            for kind, value in entry.items():
                add(kind, value)
    if (anchors := getattr(optimizer, "_anchors", None)) is not None:
        for bucket in anchors.buckets:
            add("anchor", bucket.flat_anchors)
            add("outer residual", bucket.flat["residual"])
            add("average of anchors", bucket.trailing_mean)
        for entry in anchors.outer.state.values():
            for kind, value in entry.items():
                add(f"outer {kind}", value)
    sizes = {}
    for kind, of_kind in places.items():  # storages may overlap
        size, end = 0, 0
        for first, last in sorted(of_kind):
            size, end = size + max(0, last - max(first, end)), max(end, last)
        sizes[kind] = size
    return {kind: size for kind, size in sizes.items() if size}


def muon(params, **options):
    return compopt.LocalSteps(
        compopt.MuonAdamW(params, lr=1e-2, use_muon=lambda _, p: p.ndim == 2 and min(p.shape) > 1, normalize="rows"),
        every=3,
        **options,
    )


def averaged(params, **options):
    adam = lambda anchors: torch.optim.Adam(anchors, lr=0.1)  # noqa: E731
    inner = torch.optim.AdamW(params, lr=1e-2)
    return compopt.LocalSteps(inner, every=3, growth_steps=0, outer=adam, average_anchors=0.1, **options)


LOCAL = {"MuonAdamW": muon, "an outer optimizer": averaged}
EVERY = [case for case in [*CASES, *FORMS, *INT8] if case.cls is not compopt.LocalSteps or "rounds" in case.form]
FAST = ["SeparateAdam", "TagcAdamW", "Separate", "Average, Muon", "LocalSteps, rounds", "RadiusAdamW, residual in int8"]


@pytest.mark.parametrize("case", slow_but(lambda case: case.name in FAST, EVERY), ids=lambda case: case.name)
def test_before_the_first_step_state_is_what_it_is_after_many(case: Case):
    check(lambda params, process_group: case.make(params, process_group=process_group))


@pytest.mark.parametrize("name", LOCAL)
def test_anchors_count_before_there_are_any(name):
    check(LOCAL[name])


def check(make_optimizer) -> None:
    ranks = Ranks(2, Model, make_optimizer)
    before = compopt.memory(ranks.optimizers[1])
    assert before.parameters == sum(p.numel() for p in ranks.models[1].parameters())
    ranks.train(loss, 7)
    optimizer, after = ranks.optimizers[1], measure(ranks.optimizers[1])
    assert compopt.memory(optimizer).state == after
    if isinstance(optimizer, compopt.ScapeAdamS) and not optimizer.sharded:  # its start is dense
        assert after.pop("exp_avg") < before.state["exp_avg"]
    assert {name: before.state[name] for name in after} == after
    assert before.held <= before.peak


ROWS = {
    "AdamS": lambda ps, comm: compopt.AdamS(ps, process_group=comm),
    "RadiusAdamW 0.4": lambda ps, comm: compopt.RadiusAdamW(ps, process_group=comm),
    "ScapeAdamS 0.01": lambda ps, comm: compopt.ScapeAdamS(ps, density=0.01, process_group=comm),
    "ScapeAdamS 0.1, sharded": lambda ps, comm: compopt.ScapeAdamS(ps, sharded=True, process_group=comm),
    "SeparateAdam 16": lambda ps, comm: compopt.SeparateAdam(ps, projection="gaussian", ratio=16, process_group=comm),
    "SeparateAdam tracked 16, int8": lambda ps, comm: compopt.SeparateAdam(ps, rank=16, process_group=comm),
    "TagcAdamW 0.0125": lambda ps, comm: compopt.TagcAdamW(ps, process_group=comm),
    "Average, AdamW": lambda ps, comm: compopt.Average(torch.optim.AdamW(ps), process_group=comm),
    "Average, AdamW, int8": lambda ps, comm: compopt.Average(
        torch.optim.AdamW(ps), payload_dtype="int8", process_group=comm
    ),
    "Separate, AdamW": lambda ps, comm: compopt.Separate(torch.optim.AdamW(ps), process_group=comm),
    "LocalSteps, AdamW": lambda ps, comm: compopt.LocalSteps(torch.optim.AdamW(ps), process_group=comm),
    "LocalSteps, AdamW, delay 1": lambda ps, comm: compopt.LocalSteps(
        torch.optim.AdamW(ps), delay=1, process_group=comm
    ),
    "LocalSteps, MuonAdamW": lambda ps, comm: compopt.LocalSteps(
        compopt.MuonAdamW(ps, use_muon=lambda _, p: p.shape[0] < 800), process_group=comm
    ),
    "AdamW, fused (torch)": lambda ps, comm: torch.optim.AdamW(ps),
}


def test_the_peak_is_that_which_was_counted():
    """bench/memory.py, of 10 M parameters. One of them is in a matrix that MuonAdamW leaves to AdamW there, too."""
    with (Path(__file__).parents[2] / "bench/results/memory.csv").open() as file:
        measured = {row["optimizer"]: float(row["most"] or 0) for row in csv.DictReader(file) if row["ranks"] == "2"}
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(512, 512)] * 9 + [(1024, 26)]]
    for name, build in ROWS.items():
        told = compopt.memory(build(params, World(2).comms[0]))
        assert told.peak / told.parameters == pytest.approx(measured[name], rel=0.05), name


def test_alone_and_of_torch_it_is_the_state(capsys):
    p = nn.Parameter(torch.zeros(128, 64))
    print(compopt.memory(compopt.LocalSteps(torch.optim.AdamW([p]))))
    assert "LocalSteps around AdamW: 8.192 k trainable" in (told := capsys.readouterr().out)
    assert "exp_avg_sq" in told and "anchor" not in told and "peak, about" in told
    of_torch = compopt.memory(torch.optim.SGD([p], momentum=0.9))
    assert of_torch.state == {"momentum_buffer": 4 * p.numel()} and of_torch.peak == of_torch.held


def inside(rank: int) -> list[tuple[dict, dict]]:
    results = []
    for name in ("SeparateAdam", "TagcAdamW"):
        model = cut(make())
        optimizer = by_name[name].make(model.parameters())
        before = compopt.memory(optimizer)
        train(model, optimizer, range(4), rank)
        results.append((dict(before.state), measure(optimizer), before.peak > before.held))
    return results


@pytest.mark.slow
def test_inside_fsdp2_it_is_that_of_shards():
    for results in run_ranks(inside, 2):
        for told, measured, has_peak in results:
            assert told == measured and has_peak
