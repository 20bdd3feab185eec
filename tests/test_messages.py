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
