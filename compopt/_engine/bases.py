"""The optimizers that averaged gradients go to: what a generator knows of them.

Beside AdamW, here, any of torch: ``averages.Averages``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .._ops.pytorch import Ops
from .._state.buckets import Bucket


class Base(Protocol):
    """Whoever takes the averaged gradients, a tensor at a time."""

    def room(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        """Where to write that of tensor i; ``average`` is where it is already, if anywhere."""

    def take(self, bucket: Bucket, i: int, ghat: Tensor) -> None:
        """Apply the average of tensor i, which is in ``ghat``."""


class AdamW:
    """AdamW, at once."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def room(self, bucket: Bucket, i: int, average: Tensor | None) -> Tensor:
        w = bucket.weight(i)
        if average is None or average.dtype != w.dtype:
            average = self.ops.scratch(w, w.numel())
        return average.view(w.shape)

    def take(self, bucket: Bucket, i: int, ghat: Tensor) -> None:
        state, w = bucket.state, bucket.weight(i)
        m, v, step = state["exp_avg"][i], state["exp_avg_sq"][i], state["step"][i]
        self.ops.adamw(bucket.group, w, ghat, m, v, step)
        bucket.publish(i)
