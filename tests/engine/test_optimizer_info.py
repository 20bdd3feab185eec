"""PyTorch's own description of what an optimizer is (OptimizerInfo), run over our classes in one process."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType

import pytest
import torch
from table import CASES, Case
from torch import nn

NAMES = "OptimizerInfo OptimizerInput _get_optim_inputs_including_global_cliquey_kwargs get_error_inputs_for_all_optims"


def find_description() -> ModuleType:
    """Return torch's module, which takes seconds to import."""
    return importlib.import_module("torch.testing._internal.common_optimizers")


def inputs(device, dtype=None) -> list:
    OptimizerInput = find_description().OptimizerInput
    return [
        OptimizerInput(None, {}, "default"),
        OptimizerInput(None, {"lr": 0.01}, "non-default lr"),
        OptimizerInput(None, {"lr": torch.tensor(0.01)}, "tensor lr"),
        OptimizerInput(None, {"weight_decay": 0.1}, "weight decay"),
        OptimizerInput(None, {"weight_decay": 0.1, "maximize": True}, "maximize"),
    ]


def info_of(case: Case):
    description = find_description()
    return description.OptimizerInfo(
        case.cls,
        optim_inputs_func=inputs,
        scheduler_inputs=(
            [lambda o: torch.optim.lr_scheduler.StepLR(o, gamma=0.9, step_size=10)],
            [lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)],
            [
                lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.95),
                lambda o: torch.optim.lr_scheduler.ConstantLR(o),
            ],
        ),
        supported_impls=(),
        supports_complex=False,
        optim_error_inputs_func=description.get_error_inputs_for_all_optims,
    )  # fmt: skip


@pytest.fixture(params=[case for case in CASES if case.build is None], ids=lambda case: case.name)
def info(request):
    """The description of a class."""
    try:
        missing = [name for name in NAMES.split() if not hasattr(find_description(), name)]
    except ImportError as error:  # private: other versions have other names
        missing = [str(error)]
    if missing:
        pytest.skip(f"this torch has no such description: {missing}")
    return info_of(request.param)


def configurations(info) -> list:
    return find_description()._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)


def lr_of(config) -> dict:
    """Its own copy of the options: a scheduler writes into a tensor lr."""
    return copy.deepcopy(config.kwargs)


def test_errors(info):
    for error_input in info.optim_error_inputs_func("cpu", torch.float32):
        given = error_input.optimizer_error_input if hasattr(error_input, "optimizer_error_input") else error_input
        given = getattr(given, "optimizer_input", given)
        params = given.params if given.params is not None else [nn.Parameter(torch.randn(1, 1))]
        expect = pytest.warns if issubclass(error_input.error_type, Warning) else pytest.raises
        with expect(error_input.error_type, match=error_input.error_regex):
            info.optim_cls(params, **given.kwargs)


def test_goes_in_the_right_direction_with_every_scheduler(info):
    for config in configurations(info):
        for schedulers in info.scheduler_inputs:
            torch.manual_seed(0)
            weight, bias = nn.Parameter(torch.randn(70, 60)), nn.Parameter(torch.randn(70))
            optimizer = info.optim_cls([weight, bias], **lr_of(config))
            made = [make(optimizer) for make in schedulers]
            x = torch.randn(60)

            def closure():
                optimizer.zero_grad()  # noqa: B023
                loss = (weight.mv(x) + bias).pow(2).sum()  # noqa: B023
                loss.backward()
                return loss

            first = closure().item()
            for _ in range(20):
                loss = optimizer.step(closure)
                for scheduler in made:
                    with_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(loss.detach()) if with_loss else scheduler.step()
            if config.kwargs.get("maximize"):
                assert closure().item() > first
            else:
                assert closure().item() < first


def test_state_dict_round_trip_goes_on_alike(info):
    for config in configurations(info):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 64))
        optimizer = info.optim_cls([p], **lr_of(config))

        def run(optimizer, p, step):
            p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            optimizer.step()

        for step in range(3):
            run(optimizer, p, step)
        q = nn.Parameter(p.detach().clone())
        other = info.optim_cls([q], **lr_of(config))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(3, 6):
            run(optimizer, p, step)
            run(other, q, step)
        assert torch.equal(p, q)
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_hooks_around_step_state_dict_and_loading(info):
    called = []
    optimizer = info.optim_cls([nn.Parameter(torch.randn(64, 64))])
    optimizer.register_step_pre_hook(lambda *_: called.append("before step"))
    optimizer.register_step_post_hook(lambda *_: called.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda o, d: called.append("after state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda o, d: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("after loading"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [f"{when} {what}" for what in ("step", "state_dict", "loading") for when in ("before", "after")]


def test_group_options_override_defaults(info):
    p, q = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
    optimizer = info.optim_cls([{"params": [p]}, {"params": [q], "lr": 0.0}], lr=0.1)
    p.grad = q.grad = torch.ones(64, 64)
    optimizer.step()
    assert not torch.equal(p, torch.ones(64, 64)) and torch.equal(q, torch.ones(64, 64))


def test_named_parameters_keep_their_names(info):
    model = nn.Linear(64, 64)
    optimizer = info.optim_cls(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
