"""Updates: an optimizer's step on averaged gradients, of tensors or of this rank's shards.

A generator writes the average of a tensor to the update's memory (``memory_for``), and then calls
``apply``. ``AdamWUpdate`` updates the tensor in ``apply``. ``WrappedUpdate`` steps a torch
optimizer once per step, after all buckets have committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ops.operations import Ops
from .._state.buckets import Bucket
from .._state.tensors import get_grad_dtype, to_local


class Update(Protocol):
    """An optimizer's update, a tensor at a time."""

    def memory_for(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        """Return the memory for the average of tensor i.

        ``average``: the memory that holds it already, if any; it may be returned.
        """

    def apply(self, bucket: Bucket, i: int, average: Tensor) -> None:
        """Update tensor i by ``average``, which is in the memory for it."""


class AdamWUpdate:
    """AdamW, whose moments are state of the bucket."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def memory_for(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        w = bucket.weight(i)
        if average is None or average.dtype != w.dtype:
            average = self.ops.scratch(w, w.numel())
        return average.view(w.shape)

    def apply(self, bucket: Bucket, i: int, average: Tensor) -> None:
        state, w = bucket.state, bucket.weight(i)
        m, v, step = state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]
        self.ops.adamw(bucket.group, w, average, m, v, step)
        bucket.publish_master(i)


class WrappedUpdate:
    """The step of a torch optimizer, ``base``, on all averages of a step.

    The memory for the averages lives as long as this object.
    """

    def __init__(self, base: Optimizer):
        self.base = base
        self._averages: dict[Tensor, Tensor] = {}
        self._applied: set[Tensor] = set()  # the parameters with an average in this step

    def memory_for(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        p = bucket.params[i]
        if p not in self._averages:
            self._averages[p] = torch.empty_like(
                p.detach(), dtype=get_grad_dtype(p), memory_format=torch.contiguous_format
            )
        return to_local(self._averages[p])

    def apply(self, bucket: Bucket, i: int, average: Tensor) -> None:
        self._applied.add(bucket.params[i])

    def step_base(self) -> None:
        """Step ``base`` once, on all averages.

        Meanwhile ``p.grad`` is the average, or None if no rank had a gradient.
        """
        params = [p for group in self.base.param_groups for p in group["params"]]
        applied, self._applied = self._applied, set()
        with replace_gradients(
            {p: self._average_in_strides_of(p) if p in applied else None for p in params}
        ):
            self.base.step()

    def _average_in_strides_of(self, p: Tensor) -> Tensor:
        """Return the average with the strides of ``p``, as backward would leave it: torch's fused
        steps on CPUs read both in the order of their memory.
        """
        average, param = self._averages[p], p.detach()
        if to_local(param).is_contiguous():
            return average
        return torch.empty_like(param, dtype=average.dtype).copy_(average)


@contextmanager
def replace_gradients(gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Set ``p.grad`` to these gradients in this context; restore the previous ones after it."""
    previous = {p: p.grad for p in gradients}
    try:
        for p, gradient in gradients.items():
            p.grad = gradient
        yield
    finally:
        for p, gradient in previous.items():
            p.grad = gradient
