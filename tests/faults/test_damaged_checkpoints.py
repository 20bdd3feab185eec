"""Checkpoints that are cut short, tampered with, of another class or another version: refused whole, and by reason."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from conformance import Small, assert_same, every, loss, make_ranks, snapshot, through_a_file
from pairs import name_of
from slow_rows import slow_but
from table import CASES, by_name

import compopt

Damage = Callable[[dict, int], object]  # of a state dict and in it the number of a compressed parameter


def first_group(key: str, value: object) -> Damage:
    return lambda state, at: state["param_groups"][0].__setitem__(key, value)


def compressed(optimizer: torch.optim.Optimizer) -> int:
    """The number of the first matrix, which is compressed: another one where several optimizers have groups."""
    everywhere = [p for group in optimizer.param_groups for p in group["params"]]
    return next(n for n, p in enumerate(everywhere) if p.dim() == 2)


def entry_of(state: dict, at: int) -> dict:
    """The state of a compressed parameter; in rounds that of its anchor, in the outer optimizer."""
    entry = state["state"][at]
    return entry["outer"]["optimizer"] if entry.get("outer", {}).get("fragment", -1) >= 0 else entry


def tensors(change: Callable[[dict, str, torch.Tensor], object]) -> Damage:
    """``change`` applied to the first tensor of a compressed parameter that is more than a count."""

    def damage(state: dict, at: int) -> None:
        entry = entry_of(state, at)
        names = [name for name, value in sorted(entry.items()) if isinstance(value, torch.Tensor) and value.dim()]
        name = next(name for name in names if name != "common")  # which may be absent
        change(entry, name, entry[name])

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no state": (lambda s, at: s.pop("state"), "has no 'state'"),
    "no groups": (lambda s, at: s.pop("param_groups"), "has no 'param_groups'"),
    "groups cut": (lambda s, at: s["param_groups"].clear(), "0 parameter groups"),
    "parameters cut": (lambda s, at: s["param_groups"][0]["params"].pop(), "parameters in group 0"),
    "a parameter's state cut": (lambda s, at: s["state"].pop(at), "lacks"),
    "one state cut": (tensors(lambda e, n, t: e.pop(n)), "lacks"),
    "count cut": (lambda s, at: entry_of(s, at).pop("step"), "lacks step"),
    "elements cut": (tensors(lambda e, n, t: e.update({n: t.reshape(-1)[:-1].clone()})), "elements"),
    "other shape": (tensors(lambda e, n, t: e.update({n: torch.zeros(7, 7)})), "elements"),
    "newer format": (first_group("format", 99), "format 99"),
    "tampered format": (first_group("format", None), "format None"),
    "another class": (first_group("class", "ScapeSGD"), "of ScapeSGD"),
}
OPTIONS = {
    "density": 5.0,
    "ratio": "x",
    "dense_steps": -1,
    "interval": None,
    "lr": "x",
    "betas": 3,
    "compress": "no",
    "step": -4,
}


def trained(case, steps: int = 7, size: int = 1):
    ranks = make_ranks(case, size)
    ranks.train(loss, steps)
    return ranks


def assert_refused(optimizer, state: object, words: str) -> None:
    """Neither the optimizer nor one that it wraps is touched."""
    base = getattr(optimizer, "base", None)
    before, groups = snapshot(optimizer), copy.deepcopy([{**g, "params": 0} for g in optimizer.param_groups])
    held = copy.deepcopy(base.state_dict()) if base else {"state": {}}
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state)
    assert_same(before, snapshot(optimizer))
    assert groups == [{**g, "params": 0} for g in optimizer.param_groups]
    for key, entry in held["state"].items():
        assert all(torch.equal(value, base.state_dict()["state"][key][name]) for name, value in entry.items())


@every
def test_damage_of_every_kind_is_refused_and_told(case):
    optimizer = trained(case).optimizers[0]
    saved, other = through_a_file(trained(case, 4).optimizers[0].state_dict()), trained(case, 2).optimizers[0]
    at = compressed(optimizer)
    for name, (damage, words) in DAMAGES.items():
        state = copy.deepcopy(saved)
        if "another class" in name and case.cls is compopt.AdamS:
            continue  # what it keeps is torch.optim.AdamW's
        if name == "one state cut" and case.name == "LocalSteps":
            continue  # what its start owes is left out where the start is over
        damage(state, at)
        try:
            assert_refused(optimizer, state, words.format(at=at))
        except Exception as error:
            raise AssertionError(f"damage: {name}") from error
    for option, value in OPTIONS.items():
        if option in optimizer.option_groups[0]:  # a base's own are read by it alone
            state = copy.deepcopy(saved)
            state["param_groups"][0][option] = value
            assert_refused(optimizer, state, "must be|[Ii]nvalid|could not convert")
    other.load_state_dict(saved)  # it is whole itself
    assert_refused(optimizer, [saved], "has no 'state'")


@every
def test_a_file_cut_short_cannot_be_read_and_nothing_else_happens(case):
    optimizer = trained(case).optimizers[0]
    before, file = snapshot(optimizer), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for length in (0, 100, len(file.getvalue()) // 2, len(file.getvalue()) - 30):
        with pytest.raises((RuntimeError, EOFError, ValueError)):
            optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()[:length]), weights_only=True))
    assert_same(before, snapshot(optimizer))


@every
def test_the_base_of_a_wrapper_is_not_half_loaded(case):
    if not hasattr(case.make(Small().parameters()), "base"):
        pytest.skip("wraps no optimizer")
    optimizer, saved = trained(case).optimizers[0], trained(case, 4).optimizers[0].state_dict()
    for damage, words in (
        (lambda s: s["base"].pop("state"), "has no 'state'"),
        (lambda s: s["base"]["param_groups"][0]["params"].pop(), "parameters in group 0"),
    ):
        state = copy.deepcopy(saved)
        damage(state)
        assert_refused(optimizer, state, words)


# a checkpoint of each class in two others, and AdamS's in ScapeAdamS
BY_OTHERS = slow_but(
    lambda loaded, written: (CASES.index(loaded) - CASES.index(written)) % len(CASES) in (0, 1, 3),
    itertools.product(CASES, CASES),
)


@pytest.mark.parametrize(("loaded", "written"), BY_OTHERS, ids=name_of)
def test_a_checkpoint_of_another_class_is_refused_or_goes_on(written, loaded):
    """It goes on only where nothing that was written is left out, as from torch.optim.AdamW: AdamS, which rounds
    nothing, to ScapeAdamS."""
    fits = written is loaded or (written.name, loaded.name) == ("AdamS", "ScapeAdamS")
    optimizer = trained(loaded).optimizers[0]
    if fits and written is not loaded:
        written = dataclasses.replace(written, compressed=written.lossless)
    state = through_a_file(trained(written, 4).optimizers[0].state_dict())
    if not fits:
        assert_refused(optimizer, state, "is of|has residuals but not|lacks")
        return
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0].get("step", 4) == 4


@every
def test_the_format_is_in_the_file_and_files_without_it_are_read(case):
    ranks = trained(case, size=2)
    states = [through_a_file(optimizer.state_dict()) for optimizer in ranks.optimizers]
    for state in states:
        for group in state["param_groups"]:
            assert group.pop("format") == 2 and group.pop("class") == case.cls.__name__
    again = make_ranks(case, 2)
    for (_, model, optimizer), state, old in zip(again, states, ranks.models, strict=True):
        model.load_state_dict(old.state_dict())
        optimizer.load_state_dict(state)
    again.steps = ranks.steps
    for both in (ranks, again):
        both.train(loss, 3)
    assert_same(snapshot(ranks.optimizers[1]), snapshot(again.optimizers[1]))


def test_another_density_is_the_checkpoints():
    """As in torch.optim, a checkpoint's options are taken; what was chosen by them fits any."""
    case = by_name["RadiusAdamW"]
    one, other = trained(case, 7), make_ranks(case, 1, density=0.05)
    other.optimizers[0].load_state_dict(one.optimizers[0].state_dict())
    assert other.optimizers[0].param_groups[0]["density"] == 0.4
