"""The promises of every optimizer here inside FSDP2, over the table of classes, on real ranks.

With sharded state a class is a form of the table, which takes all tests of conformance. Nothing is lost inside FSDP2:
test_inside_conservation.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance import OTHERS, TRACKED_IN_INT8
from fsdp_models import apart, cut, loss, make, train, whole
from ranks import run_ranks
from table import CASES, DERIVED, FORMS, INT8, Case, by_name, in_int8
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS = range(4)  # two of a dense start, one without residuals, one that sends those of the step before
RESIDUALS_IN_INT8 = [*INT8, TRACKED_IN_INT8, in_int8(by_name["Average"])]
INSIDE = {case.name: case for case in CASES + FORMS + DERIVED + OTHERS + RESIDUALS_IN_INT8 if case.works_inside}


def test_a_reducer_works_in_every_setting():
    """The class of docs/writing.md, by its one line in the table."""
    assert {case.form for case in DERIVED if case.cls.__name__ == "RandomK"} == {"", "sharded"}
    assert "RandomK" in INSIDE


# Inside FSDP2


@functools.cache
def reference_run(rank: int, reference: Callable[..., torch.optim.Optimizer], lr: float) -> torch.nn.Module:
    """The reference that several classes are compared with, trained once."""
    model = cut(make())
    train(model, reference(model.parameters(), lr=lr), STEPS, rank, clip=0.5)
    return model


def beside_the_reference(rank: int, name: str) -> float:
    """Losslessly, beside FSDP2 and the reference: how far parameters are apart, over how far they went."""
    case = INSIDE[name]
    ours, theirs = cut(make()), reference_run(rank, case.reference, case.lr)
    optimizer = case.make(ours.parameters(), **case.lossless)
    train(ours, optimizer, STEPS, rank, clip=0.5)
    assert optimizer.fsdp_backward is not None
    return apart(ours, theirs) / apart(make(), theirs)


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of everything that a step may change."""
    optimizer.state_dict()  # settles masks that are still on their way
    kept = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [whole(model), *(getattr(value, "_local_tensor", value).clone() for value in kept)]


def skips(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """An inf in one rank's gradient: nothing changes on any rank, and training goes on."""
    before, phase = held(model, optimizer), optimizer.stats.phase
    optimizer.zero_grad()
    (loss(model, 4, rank) * (float("inf") if rank == 1 else 1)).backward()
    optimizer.step()
    unchanged = optimizer.stats.phase == "skipped" and all(map(torch.equal, before, held(model, optimizer)))
    train(model, optimizer, range(5, 7), rank)
    return unchanged and optimizer.stats.phase == phase and bool(whole(model).isfinite().all())


def gathers_in_int8(case: Case) -> dict[str, str]:
    """The option by which FSDP2 gathers in int8, of a class that has it."""
    return {"gather_dtype": "int8"} if "gather_dtype" in inspect.signature(case.cls).parameters else {}


def compressed(rank: int, name: str) -> tuple[str, float, bool]:
    """Compressed, gathered in int8, clipped: the phase, the distance to the parameters of a run that is clipped from
    outside, and whether that run skips a step."""
    case = INSIDE[name]
    runs = []
    for limit, outside in ((0.5, None), (None, 0.5)):
        model = cut(make())
        torch.manual_seed(0)
        optimizer = case.make(model.parameters(), max_grad_norm=limit, **gathers_in_int8(case))
        train(model, optimizer, STEPS, rank, clip=outside)
        runs.append(whole(model))
    far = float((runs[0] - runs[1]).abs().max())
    return optimizer.stats.phase, far, skips(rank, model, optimizer)


def all_inside(rank: int, names: list[str]) -> dict[str, tuple[float, str, float, bool]]:
    return {name: (beside_the_reference(rank, name), *compressed(rank, name)) for name in names}


# one that projects, one that selects; the others with `make slow`
MAIN = ["SeparateAdam, tracked", "TagcAdamW"]
OTHER_FORMS = [name for name in INSIDE if name not in MAIN]


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [MAIN, pytest.param(OTHER_FORMS, marks=pytest.mark.slow)], ids=["main", "other forms"]
)
def test_inside_fsdp2_lossless_equals_the_reference_a_clip_one_from_outside_and_all_skip_together(names):
    for answers in run_ranks(all_inside, 2, names):
        for name, (far, phase, clipped, skipped) in answers.items():
            assert skipped, name
            assert far < 1e-9, (name, far)
            assert phase != "dense", name
            if INSIDE[name].method != "separate":  # whose clip takes from residuals too
                assert clipped < 1e-12, (name, clipped)


# what is owed and how it is projected; the others with `make slow`
SAVED = ["SeparateAdam, tracked, residual in int8"]
SAVED_TOO = ["TagcAdamW", "SeparateAdam, tracked", "Average"]


def saved(rank: int, names: list[str], folder: str, write: bool) -> dict[str, tuple[float, list[float]]]:
    """A run that goes on, and one from its checkpoint, both gathered in int8: how far apart they end, and what is kept
    for the next step.
    """
    results = {}
    for name in names:
        case = INSIDE[name]
        first, second = cut(make()), cut(make())
        optimizer, other = (case.make(model.parameters(), **gathers_in_int8(case)) for model in (first, second))
        place = f"{folder}/{name}"
        if write:
            train(first, optimizer, range(4), rank)
            optimizer.consolidate_state()
            weights, state = get_state_dict(first, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
        weights, state = get_state_dict(second, other)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=place)
        set_state_dict(second, other, model_state_dict=weights, optim_state_dict=state)
        entries = other.state.values()
        kept = [float(entry[n].sum()) for entry in entries for n in ("residual", "basis") if n in entry]
        for model, one in ((first, optimizer), (second, other)):
            train(model, one, range(4, 7), rank)
        results[name] = (apart(first, second) if write else 0.0), kept
    return results


@pytest.mark.slow
@pytest.mark.parametrize("names", [SAVED, pytest.param(SAVED_TOO, marks=pytest.mark.slow)], ids=["main", "others"])
def test_inside_fsdp2_a_checkpoint_goes_on_to_the_bit_and_on_more_ranks(names, tmp_path):
    written = run_ranks(saved, 2, names, str(tmp_path), True)
    read = run_ranks(saved, 3, names, str(tmp_path), False)
    for name in names:
        assert [results[name][0] for results in written] == [0, 0], name
        assert all(results[name][1] == written[0][name][1] for results in (*written, *read)), name
        assert any(written[0][name][1]), name
