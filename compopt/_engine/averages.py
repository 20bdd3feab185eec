"""Averaged gradients on their way to an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .._state.buckets import Bucket, Gate, Gated, grad_dtype, local


class Averages:
    """The averaged gradients of a step, kept until an optimizer of torch steps on all of them.

    Memory for them is kept from step to step.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        self._taken: dict[Tensor, Tensor] = {}
        self._gates: dict[Tensor, Gated] = {}  # where only the device knows

    def room(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        p = bucket.params[i]
        if p not in self._kept:
            self._kept[p] = torch.empty_like(
                p.detach(), dtype=grad_dtype(p), memory_format=torch.contiguous_format
            )
        return local(self._kept[p])

    def take(self, bucket: Bucket, i: int, ghat: Tensor, gate: Gate = True) -> None:
        """The average of tensor i, to be applied behind the gate."""
        p = bucket.params[i]
        if isinstance(gate, Gated):
            self._gates[p] = gate
        self._taken[p] = self._kept[p]

    @contextmanager
    def as_gradients(self, params: Iterable[Tensor]) -> Iterator[Tensor | None]:
        """``p.grad`` is the average, None where no rank had one; afterwards this rank's own.

        Yields whether the step is applied, where only the device knows.
        """
        own = {p: p.grad for p in params}
        taken, self._taken = self._taken, {}
        gates, self._gates = self._gates, {}
        for p in _absent({p: gate for p, gate in gates.items() if own[p] is None}):
            del taken[p]
        try:
            for p in own:
                p.grad = taken.get(p)
            yield next(iter(gates.values())).applied if gates else None
        finally:
            for p, grad in own.items():
                p.grad = grad


def _absent(gates: dict[Tensor, Gated]) -> list[Tensor]:
    """Of tensors without a gradient on this rank, those without one on any: the host waits to know,
    for a fused optimizer has one gate for all its tensors.
    """
    if not gates:
        return []
    there = torch.stack([gate.writes for gate in gates.values()]).tolist()
    return [p for p, any_has in zip(gates, there, strict=True) if not any_has]
