"""Refusals name the parameter where it has a name."""

from __future__ import annotations

import math

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
        (compopt.TagcAdamW, "density", "0.1"),
        (compopt.TagcAdamW, "sketch_ratio", "10"),
        *((compopt.RadiusAdamW, name, value) for name in ("interval",) for value in ("1", None)),
        *((compopt.SeparateAdam, "adapt_interval", value) for value in ("100", None, 2.5)),
        (compopt.SeparateAdam, "ef_beta", None),
        *((compopt.SeparateAdam, "dense_steps", value) for value in (math.inf, math.nan, [10])),
        (compopt.ScapeAdamS, "density_steps", math.inf),
        (compopt.RadiusAdamW, "interval", math.inf),
    ],
)
def test_what_is_no_number_in_place_of_one_is_refused_by_the_option_s_name(make, option, value):
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


def test_a_round_without_end_is_refused_by_the_option_s_name():
    with pytest.raises(ValueError, match="every must be an integer >= 1, got inf"):
        compopt.LocalSteps(torch.optim.AdamW(nn.Linear(8, 8).parameters()), every=math.inf)


def test_numbers_of_numpy_and_tensors_compute_as_pythons_do():
    numpy = pytest.importorskip("numpy")

    def step(make, **options) -> torch.Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 80 * 64).view(80, 64))
        optimizer = make([p], simulate=True, **options)
        for n in range(3):
            p.grad = torch.randn(80, 64, generator=torch.Generator().manual_seed(n))
            optimizer.step()
        return p.detach()

    for make, plain, others in (
        (compopt.RadiusAdamW, {"density": 0.5}, {"density": torch.tensor(0.5)}),
        (compopt.TagcAdamW, {"density": 0.5}, {"density": torch.tensor(0.5)}),
        (compopt.SeparateAdam, {"maximize": True}, {"maximize": 1}),
        (compopt.RadiusAdamW, {"dense_steps": 10}, {"dense_steps": numpy.int64(10)}),
    ):
        assert torch.equal(step(make, **plain), step(make, **others))
