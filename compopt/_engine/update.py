"""Updates: an optimizer's step on averaged gradients, of tensors or of this rank's shards.

A generator writes the averages of some tensors to the update's memory (``memory_for``, or
``memory_for_stack``), and then calls ``apply``. ``AdamWUpdate`` updates the tensors in ``apply``.
``WrappedUpdate`` steps a torch optimizer once per step, after all buckets have committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ops.operations import AdamWTensors, Ops
from .._state.buckets import Bucket
from .._state.tensors import distribute_like, get_grad_dtype, to_local


class Update(Protocol):
    """An optimizer's update, of some tensors of a bucket at a time."""

    def memory_for(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        averages: Sequence[Tensor | None],
        may_overwrite: bool = True,
    ) -> list[Tensor]:
        """Return memory that holds these averages, zeros for None, each in its tensor's shape.

        With ``may_overwrite`` it may be that of ``averages``.
        """

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        """Return memory for the averages of neighbours of one shape, as one tensor."""

    def apply(self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor]) -> None:
        """Update tensors by these averages, which are in the memory for them."""


def write_averages(to: Sequence[Tensor], averages: Sequence[Tensor | None]) -> None:
    """Copy averages to memory of their tensors' shapes; zeros for None."""
    pairs = [
        (x, average.view(x.shape))
        for x, average in zip(to, averages, strict=True)
        if average is not None
    ]
    if pairs:
        torch._foreach_copy_([x for x, _ in pairs], [average for _, average in pairs])
    for x, average in zip(to, averages, strict=True):
        if average is None:
            x.zero_()


class AdamWUpdate:
    """AdamW, whose moments are state of the bucket."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def memory_for(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        averages: Sequence[Tensor | None],
        may_overwrite: bool = True,
    ) -> list[Tensor]:
        weights = [bucket.weight(i) for i in indices]
        if may_overwrite and all(
            average is not None and average.dtype == w.dtype
            for average, w in zip(averages, weights, strict=True)
        ):
            pairs = zip(averages, weights, strict=True)
            return [average.view(w.shape) for average, w in pairs if average is not None]
        sizes = [w.numel() for w in weights]
        flat = self.ops.scratch(weights[0], sum(sizes), use="averages")
        memory = [x.view(w.shape) for x, w in zip(flat.split(sizes), weights, strict=True)]
        write_averages(memory, averages)
        return memory

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        w = bucket.weight(indices[0])
        size = len(indices) * w.numel()
        return self.ops.scratch(w, size, use="averages").view(len(indices), *w.shape)

    def apply(self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor]) -> None:
        state = bucket.state
        tensors = AdamWTensors(
            [bucket.weight(i) for i in indices],
            list(averages),
            [state["exp_avg"][i] for i in indices],
            [state["exp_avg_sq"][i] for i in indices],
            [state["step"][i] for i in indices],
        )
        self.ops.adamw_each(bucket.group, tensors)
        if "master" in state:
            for i in indices:
                bucket.publish_master(i)


class WrappedUpdate:
    """The step of a torch optimizer, ``base``, on all averages of a step.

    On a CPU the memory for the averages lives as long as this object, because new pages cost more
    than copies; elsewhere it lives for a step.
    """

    def __init__(self, base: Optimizer):
        self.base = base
        self._memory: WeakKeyDictionary[Bucket, list[Tensor]] = WeakKeyDictionary()
        self._averages: dict[Tensor, Tensor] = {}  # those of this step, by parameter

    def _memory_of(self, bucket: Bucket) -> list[Tensor]:
        """Return the memory for all averages of a bucket, neighbours one after the other."""
        if bucket not in self._memory:
            params = bucket.local_params
            dtype = get_grad_dtype(bucket.params[0])
            flat = torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
            pairs = zip(flat.split(bucket.lengths), params, strict=True)
            self._memory[bucket] = [x.view(p.shape) for x, p in pairs]
        return self._memory[bucket]

    def memory_for(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        averages: Sequence[Tensor | None],
        may_overwrite: bool = True,
    ) -> list[Tensor]:
        memory = [self._memory_of(bucket)[i] for i in indices]
        write_averages(memory, averages)
        return memory

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        first = self._memory_of(bucket)[indices[0]]
        strides = first.numel(), *first.stride()
        return first.as_strided((len(indices), *first.shape), strides)

    def apply(self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor]) -> None:
        memory = self._memory_of(bucket)
        self._averages.update((bucket.params[i], memory[i]) for i in indices)

    def step_base(self) -> None:
        """Step ``base`` once, on all averages.

        Meanwhile ``p.grad`` is the average, or None if no rank had a gradient.
        """
        params = [p for group in self.base.param_groups for p in group["params"]]
        averages, self._averages = self._averages, {}
        gradients = {p: as_gradient(averages[p], p) if p in averages else None for p in params}
        with replace_gradients(gradients):
            self.base.step()
        for bucket in [bucket for bucket in self._memory if bucket.device.type != "cpu"]:
            del self._memory[bucket]


def as_gradient(average: Tensor, p: Tensor) -> Tensor:
    """Return the average of this rank's part of ``p`` as backward would leave it: in the placements
    of ``p``, and in its strides, because torch's fused steps on CPUs read both in memory order.
    """
    param = p.detach()
    local = to_local(param)
    if not local.is_contiguous():
        average = torch.empty_like(local, dtype=average.dtype).copy_(average)
    return distribute_like(param, average)


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
