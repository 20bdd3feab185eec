"""Accelerate, and the Trainer with ``fsdp=``: FSDP2's shards take the place of parameters in an optimizer's groups."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import cut, loss, make, train, whole
from ranks import catch_message, run_ranks
from slow_rows import selected, slow_but
from torch import nn

import compopt

STEPS, AT = 5, 3
OPTIMIZERS = {
    "SeparateAdam": lambda params: compopt.SeparateAdam(params, lr=1e-2, rank=4, dense_steps=1),
    "TagcAdamW": lambda params: compopt.TagcAdamW(params, lr=1e-2, density=0.1, dense_steps=1),
    "Average": lambda params: compopt.Average(torch.optim.AdamW(params, lr=1e-2)),
    "Separate": lambda params: compopt.Separate(torch.optim.SGD(params, lr=1e-2), rank=4, dense_steps=1),
}


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """As Accelerate does: placeholders while the model is cut, then the shards."""
    before = {p: name for name, p in model.named_parameters()}
    names = [[before[p] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype)
    after = dict(cut(model).named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [after[name] for name in own]
    return model


def replaced(rank: int, names: list[str]) -> dict:
    results = {}
    for name, build in ((name, OPTIMIZERS[name]) for name in names):
        expected = cut(make())
        optimizer = build(expected.parameters())
        train(expected, optimizer, range(AT), rank)
        optimizer.consolidate_state()
        train(expected, optimizer, range(AT, STEPS), rank)

        model = make()
        prepare(model, first := build(model.parameters()))
        train(model, first, range(AT), rank)
        resumed = make()
        prepare(resumed, second := build(resumed.parameters()))
        resumed.load_state_dict(model.state_dict())
        first.consolidate_state()
        second.load_state_dict(first.state_dict())
        train(model, first, range(AT, STEPS), rank)
        train(resumed, second, range(AT, STEPS), rank)
        results[name] = {
            "made late": torch.equal(whole(model), whole(expected)),
            "resumed": torch.equal(whole(resumed), whole(model)),
            "bytes": [one.stats.bytes_sent / optimizer.stats.bytes_sent for one in (first, second)],
        }
    model = make()
    prepare(model, optimizer := compopt.RadiusAdamW(model.parameters(), lr=1e-2))
    results["refused"] = catch_message(ValueError, lambda: loss(model, 0, rank))
    return results


@pytest.fixture(scope="module")
def runs(request):
    return run_ranks(replaced, 2, selected(request, "name"))


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("TagcAdamW", "Separate"), OPTIMIZERS))
def test_parameters_that_were_replaced_are_trained_as_if_the_optimizer_came_last(runs, name):
    for found in runs:
        assert found[name] == {"made late": True, "resumed": True, "bytes": [1.0, 1.0]}


def test_a_class_that_cannot_train_inside_fsdp_says_so_in_the_first_forward(runs):
    for found in runs:
        assert "have different shards of" in found["refused"] and "process_group" in found["refused"]
