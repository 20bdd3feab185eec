"""The outer optimizer, which steps anchors."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_not

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Group, check_base_group

MakeOuter = Callable[[list[Tensor]], Optimizer]


GROUP = "outer optimizer, group"  # in messages


def make_sgd(options: Group, fused: bool, anchors: list[Tensor]) -> torch.optim.SGD:
    """Make DiLoCo's outer optimizer: SGD with Nesterov's momentum. Its options are ``outer_lr`` and
    ``outer_momentum``.
    """
    lr, momentum = options["outer_lr"], options["outer_momentum"]
    lr = 1 - momentum if lr == "auto" else lr
    return torch.optim.SGD(anchors, lr, momentum, nesterov=momentum > 0, fused=fused or None)


def is_default_outer(make_outer: MakeOuter) -> bool:
    """True for the optimizer that ``outer_lr`` and ``outer_momentum`` belong to."""
    return getattr(make_outer, "func", None) is make_sgd


def call_make_outer(make_outer: MakeOuter, anchors: list[Tensor]) -> Optimizer:
    """Return the outer optimizer over these anchors.

    Raises TypeError or ValueError, which names ``outer``, where that is no function of a list of
    anchors, raises one, or returns what cannot step them.
    """
    try:
        outer = make_outer(anchors)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"outer must make an optimizer over a list of anchors, and it failed: {error}. E.g. "
            "outer=lambda anchors: torch.optim.SGD(anchors, lr=0.7)."
        ) from error
    if isinstance(outer, CompressedOptimizer) or not isinstance(outer, Optimizer):
        raise TypeError(
            f"outer must make an optimizer of torch, got {type(outer).__name__}. LocalSteps itself "
            "averages what ranks have moved: pass payload_dtype= to it."
        )
    stepped = [p for group in outer.param_groups for p in group["params"]]
    if len(stepped) != len(anchors) or any(map(is_not, stepped, anchors)):
        raise ValueError("outer must step all parameters that it is given, in their order.")
    check_outer_rates(outer)
    return outer


def check_outer_rates(outer: Optimizer) -> None:
    """Raise ValueError if a step of the outer optimizer would make anchors NaN."""
    for group in outer.param_groups:
        check_base_group(group, "outer optimizer")
