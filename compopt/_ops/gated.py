"""Writing behind a gate: where only the device knows whether a step is applied.

Never by a product with 0 or 1: what is not finite would come through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._state.gates import Gate

if TYPE_CHECKING:
    from .ops import Ops


@contextmanager
def writing(ops: Ops, x: Tensor, gate: Gate) -> Iterator[Tensor]:
    """What to write to in place of ``x``: a copy, in scratch memory, of which ``x`` takes over what
    the gate lets through; ``x`` itself where the host knows.
    """
    if isinstance(gate, bool):
        yield x
        return
    ahead = ops.scratch(x, x.numel(), use="ahead").view(x.shape).copy_(x)
    yield ahead
    torch.where(gate.writes, ahead, x, out=x)


def behind(gate: Gate, x: Tensor, index: Tensor | None, values: Tensor) -> Tensor:
    """What to write at ``index`` of ``x``, or everywhere: ``values``, or what is there."""
    if isinstance(gate, bool):
        return values
    old = x.view(values.shape) if index is None else x.view(-1).index_select(0, index)
    return torch.where(gate.writes, values.to(x.dtype), old)


def shut(gate: Gate) -> Tensor | None:
    """What PyTorch's fused optimizers take as ``found_inf``: where it is 1 they write nothing."""
    return None if isinstance(gate, bool) else gate.zero


def count_up(steps: list[Tensor], gates: list[Gate]) -> None:
    """One step more, of the tensors that are written."""
    known = [step for step, gate in zip(steps, gates, strict=True) if gate is True]
    if known:
        torch._foreach_add_(known, 1)
    pairs = [(s, g.one) for s, g in zip(steps, gates, strict=True) if not isinstance(g, bool)]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
