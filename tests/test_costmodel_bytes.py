"""The cost model's bytes and state are those of the classes themselves, as their stats count them."""

from __future__ import annotations

import pytest
import torch
from sim import Ranks
from torch import nn

import compopt
from compopt.costmodel import METHODS, Workload

WORDS = 1000  # bytes of headers and control words, more or less
STEADY = 10**9  # steps between masks: a sparse step is compared


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.Linear(1024, 250))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


OURS = {  # as the table's rows are: the method's own options here, and the class's
    "RadiusAdamW": (compopt.RadiusAdamW, {"interval": STEADY}, {"density": 0.4, "interval": STEADY, "warmup_steps": 0}),
    "ScapeAdamS": (compopt.ScapeAdamS, {}, {"density": 0.1, "density_warmup_steps": 0, "selection": "exact"}),
    "SeparateAdam": (compopt.SeparateAdam, {}, {"projection": "gaussian", "ratio": 16}),
    "tracked 16, int8": (compopt.SeparateAdam, {}, {"warmup_steps": 0, "payload_dtype": torch.int8}),
    "tracked 16, int4": (compopt.SeparateAdam, {}, {"warmup_steps": 0, "payload_dtype": "int4"}),
    "tracked 4, int8": (compopt.SeparateAdam, {}, {"warmup_steps": 0, "rank": 4, "payload_dtype": torch.int8}),
}


@pytest.mark.parametrize("name", OURS)
def test_bytes_and_state_are_the_classes_own(name):
    cls, formula, options = OURS[name]
    ranks = Ranks(2, model, lambda ps, process_group: cls(ps, lr=1e-3, process_group=process_group, **options))
    ranks.train(loss, 4)
    optimizer = ranks.optimizers[0]
    work = Workload.of(ranks.models[0].named_parameters())
    cost = METHODS[name](work, 2, **formula)
    masks = getattr(optimizer.stats, "mask_bytes", 0)
    assert optimizer.stats.bytes_sent - masks == pytest.approx(cost.reduced, rel=0.03, abs=WORDS)
    if masks:
        assert 2 * masks == pytest.approx(cost.hidden, rel=0.15)  # the formula counts both ranks' parts
    kept = {id(value): value for entry in optimizer.state.values() for value in entry.values() if value.dim()}
    assert sum(value.nbytes for value in kept.values()) == pytest.approx(cost.state, rel=0.03)


def test_every_class_of_ours_in_the_table_is_compared():
    tagc = {name for name in METHODS if name.startswith("Tagc")}  # its union depends on the data; see test_tagc.py
    assert set(OURS) | tagc == {name for name, method in METHODS.items() if method.ours}
