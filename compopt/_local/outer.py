"""The outer optimizer: it has the anchors for its parameters, and what ranks moved away from them
for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._engine.base import CompressedOptimizer

Outer = Callable[[list[Tensor]], CompressedOptimizer]


def check_outer(outer: object, anchors: list[nn.Parameter]) -> None:
    """Raise where what was made for the anchors cannot exchange them."""
    if not isinstance(outer, CompressedOptimizer):
        raise TypeError(
            f"outer must make an optimizer of compopt, got {type(outer).__name__}: e.g. lambda "
            "params: compopt.Average(torch.optim.SGD(params, lr=0.7))."
        )
    theirs = [p for group in outer.param_groups for p in group["params"]]
    if len(theirs) != len(anchors) or any(map(lambda p, q: p is not q, theirs, anchors)):
        raise ValueError("outer must step all parameters that it is given, in their order.")


def begin_momentum(outer: CompressedOptimizer) -> list[tuple[float, float]]:
    """torch's SGD makes its momentum in its first step: of zeros that is the same, and a rank that
    joins later then has as many tensors as the others.

    Returns its rate and momentum, of each group; nothing where it is another optimizer.
    """
    base = getattr(outer, "base", None)
    if not isinstance(base, torch.optim.SGD):
        return []
    for group in base.param_groups:
        if group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                base.state[p].setdefault("momentum_buffer", torch.zeros_like(p.detach()))
    return [(group["lr"], group["momentum"]) for group in base.param_groups]
