"""Averaged gradients on their way to an optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .._state.buckets import Bucket, grad_dtype, local


class Averages:
    """The averaged gradients of a step, kept until an optimizer of torch steps on all of them.

    Memory for them is kept from step to step.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        self._taken: dict[Tensor, Tensor] = {}

    def room(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        p = bucket.params[i]
        if p not in self._kept:
            self._kept[p] = torch.empty_like(
                p.detach(), dtype=grad_dtype(p), memory_format=torch.contiguous_format
            )
        return local(self._kept[p])

    def take(self, bucket: Bucket, i: int, ghat: Tensor) -> None:
        """Note that the average of tensor i is in its memory."""
        p = bucket.params[i]
        self._taken[p] = self._kept[p]

    @contextmanager
    def as_gradients(self, params: Iterable[Tensor]) -> Iterator[None]:
        """``p.grad`` is the average, None where no rank had one; afterwards this rank's own."""
        own = {p: p.grad for p in params}
        taken, self._taken = self._taken, {}
        try:
            for p in own:
                p.grad = taken.get(p)
            yield
        finally:
            for p, grad in own.items():
                p.grad = grad
