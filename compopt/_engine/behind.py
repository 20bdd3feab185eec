"""An optimizer of torch behind a gate: where only the device knows whether its step is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


def has_gate(base: Optimizer) -> bool:
    """Whether its step can be left undone on the device.

    Torch's fused Adam and AdamW look at ``found_inf``, as under a GradScaler: where it is 1 they
    write nothing, and take back the count of the step. Fused SGD leaves its first momentum
    undefined then; what is not fused does not look.
    """
    fused = all(group.get("fused") for group in base.param_groups)
    return type(base) in (torch.optim.Adam, torch.optim.AdamW) and fused


@contextmanager
def behind(base: Optimizer, taken: Tensor) -> Iterator[None]:
    """``base``, which has a gate, steps in this block only where ``taken``, a boolean of the
    device, is true.
    """
    before = getattr(base, "found_inf", None)
    base.found_inf = taken.logical_not().float()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if before is None:
            del base.found_inf  # type: ignore[attr-defined]
        else:
            base.found_inf = before  # type: ignore[attr-defined]


def spoil_(gradients: Iterable[Tensor], sound: Tensor) -> None:
    """Where ``sound``, a boolean of the device, is false, a gradient is not finite: whoever is
    given them leaves the step undone.
    """
    some = next((g for g in gradients if g.numel()), None)
    if some is not None:
        first = some[(0,) * some.dim()]
        first.copy_(first.where(sound, torch.nan))
