"""The options of torch.optim.AdamW that say how it computes: taken as they are there, or refused in a sentence."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from sim import World
from table import CASES
from torch import nn

import compopt
from compopt._engine.options import TorchOptions

LIKE_ADAMW = [case.cls for case in CASES if "lr" in inspect.signature(case.cls).parameters]
classes = pytest.mark.parametrize("cls", LIKE_ADAMW)
HOW = ("foreach", "fused", "capturable")
UNSUPPORTED_OPTIONS = ("amsgrad", "differentiable")


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 64))


def test_every_class_but_the_wrapper_is_looked_at():
    assert {cls.__name__ for cls in LIKE_ADAMW} == set(compopt.__all__) & {
        "AdamS",
        "RadiusAdamW",
        "ScapeAdamS",
        "SeparateAdam",
        "TagcAdamW",
    }


@classes
def test_signature_and_defaults_are_torchs(cls):
    """Options of how to compute are taken by ``torch_options``."""
    torchs = inspect.signature(torch.optim.AdamW).parameters
    ours = inspect.signature(cls).parameters
    positional = [name for name, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    same = [name for name in torchs if name in ours]
    assert {name: ours[name].default for name in same} == {name: torchs[name].default for name in same}
    assert torchs.keys() - ours.keys() == TorchOptions.__annotations__.keys()
    assert ours["torch_options"].annotation == "Unpack[TorchOptions]"


@classes
def test_a_name_that_torch_does_not_have_is_refused(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__} got unexpected keyword arguments: momentum, warmup_epochs"):
        cls([matrix()], warmup_epochs=3, foreach=False, momentum=0.9)


@classes
@pytest.mark.parametrize("name", HOW)
def test_how_to_compute_is_taken_and_true_is_answered_once(cls, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([matrix()], **{name: False})
        cls([matrix()], **{name: None})
    with pytest.warns(UserWarning, match=f"{name}=True changes nothing.*optimizer.backend") as report:
        optimizer = cls([matrix()], **{name: True})
    assert len(report) == 1 and report[0].filename == __file__
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_several_at_once_are_one_warning():
    with pytest.warns(UserWarning, match="foreach=True, fused=True, capturable=True change nothing") as report:
        compopt.RadiusAdamW([matrix()], foreach=True, fused=True, capturable=True)
    assert len(report) == 1


def test_other_ranks_say_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compopt.RadiusAdamW([matrix()], fused=True)


@classes
@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_what_cannot_be_is_refused_in_a_sentence(cls, name):
    cls([matrix()], **{name: False})
    with pytest.raises(ValueError, match=f"{name}=True .*: .*{name}=False"):
        cls([matrix()], **{name: True})
    with pytest.raises(ValueError, match=f"{name}=True"):
        cls([{"params": [matrix()], name: True}])


def trained(**options) -> torch.optim.AdamW:
    p = matrix()
    adamw = torch.optim.AdamW([p], **options)
    p.grad = torch.ones_like(p)
    adamw.step()
    return adamw


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}])
@pytest.mark.parametrize("cls", [compopt.RadiusAdamW, compopt.TagcAdamW])
def test_a_checkpoint_of_adamw_loads_whatever_it_says(cls, options):
    saved = trained().state_dict()
    saved["param_groups"][0] |= options  # capturable wants a GPU
    p = matrix()
    optimizer = cls([p], process_group=World(1).comms[0])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["step"] == 1 and optimizer.state[p]["exp_avg"].any()


def test_a_checkpoint_of_amsgrad_is_refused_in_a_sentence():
    optimizer = compopt.RadiusAdamW([matrix()])
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(trained(amsgrad=True).state_dict())


def test_around_a_base_amsgrad_is_the_bases_own_business():
    p = matrix()
    optimizer = compopt.Separate(torch.optim.AdamW([p], amsgrad=True, foreach=True))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.base.state[p]["max_exp_avg_sq"].any()
