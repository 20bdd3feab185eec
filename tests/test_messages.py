"""Refusals name the parameter where it has a name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compopt


@pytest.mark.parametrize("named", [True, False])
def test_a_tensor_that_cannot_be_taken_is_named(named):
    bad = {
        "complex": nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)),
        "meta": nn.Parameter(torch.zeros(4, 4, device="meta")),
    }
    for name, p in bad.items():
        says = rf"params holds a (complex )?tensor {f'{name} ' if named else ''}of shape \(4, 4\)"
        with pytest.raises((TypeError, ValueError), match=says):
            compopt.AdamS([(name, p)] if named else [p])


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        *((compopt.SeparateAdam, name, "1e-3") for name in ("lr", "eps", "weight_decay", "max_grad_norm")),
        (compopt.SeparateAdam, "lr", None),
        *((compopt.AdamS, "betas", value) for value in (0.9, None, ("0.9", "0.999"), (0.9,))),
        (compopt.RadiusAdamW, "density", "0.1"),
        (compopt.ScapeAdamS, "density", "0.1"),
        (compopt.TagcAdamW, "sparsity", "0.9"),
    ],
)
def test_text_in_place_of_a_number_is_refused_by_the_option_s_name(make, option, value):
    """YAML reads 1e-3 as text."""
    model = nn.Linear(80, 64)
    with pytest.raises(ValueError, match=rf"{option} must be .*"):
        make(model.parameters(), **{"lr": 1e-3, option: value})


@pytest.mark.parametrize("option", ["outer_lr", "outer_momentum", "round_seconds", "max_grad_norm"])
def test_text_in_place_of_a_number_of_local_steps(option):
    with pytest.raises(ValueError, match=f"{option} must be .*, got '0.5'"):
        compopt.LocalSteps(torch.optim.AdamW(nn.Linear(8, 8).parameters()), **{option: "0.5"})


@pytest.mark.parametrize("make", [compopt.SeparateAdam, compopt.AdamS])
def test_numbers_may_be_numpys_or_in_tensors(make):
    numpy = pytest.importorskip("numpy")
    for lr, betas in ((numpy.float32(1e-3), numpy.array([0.9, 0.95])), (torch.tensor(1e-3), torch.tensor([0.9, 0.95]))):
        make(nn.Linear(8, 8).parameters(), lr=lr, betas=betas)
