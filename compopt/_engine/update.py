"""Updates: an optimizer's step on averaged gradients, of tensors or of this rank's shards.

A generator writes averages to the update's memory (``memory_for``), and then calls ``apply``.
``AdamWUpdate`` and ``AdamSUpdate`` update the tensors in ``apply``. ``WrappedUpdate`` steps a torch
optimizer once per step, after all buckets have committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._ops.operations import AdamWTensors, Ops
from .._state.buckets import Bucket
from .._state.tensors import distribute_like, get_grad_dtype, to_local


class Update(Protocol):
    """An optimizer's update of some tensors of a bucket, by their ``indices``."""

    def memory_for(
        self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return the memory for the averages of these tensors, in their shapes.

        ``averages``: the memory that holds each already, if any; it may be returned.
        """

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        """Return memory for the averages of neighbours of one shape, as one tensor."""

    def apply(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        """Update tensors by their averages, which are in the memory for them."""


def write_averages(memory: list[Tensor], averages: Sequence[Tensor]) -> list[Tensor]:
    """Copy averages to the memory for them, where they are not in it already; return the memory."""
    pairs = [
        (to, average.view(to.shape))
        for to, average in zip(memory, averages, strict=True)
        if to.data_ptr() != average.data_ptr()
    ]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [average for _, average in pairs])
    return memory


class OwnUpdate:
    """An update whose moments are state of the bucket."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def memory_for(
        self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor | None]
    ) -> list[Tensor]:
        weights = [bucket.weight(i) for i in indices]
        pairs = list(zip(weights, averages, strict=True))
        fits = [g is not None and g.dtype == w.dtype for w, g in pairs]
        sizes = [0 if fit else w.numel() for w, fit in zip(weights, fits, strict=True)]
        w = weights[0]
        new = bucket.scratch("average", sum(sizes), w.dtype, w.device).split(sizes)
        return [
            (g if g is not None and fit else part).view(w.shape)
            for (w, g), fit, part in zip(pairs, fits, new, strict=True)
        ]

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        w = bucket.weight(indices[0])
        size = len(indices) * w.numel()
        memory = bucket.scratch("average", size, w.dtype, w.device)
        return memory.view(len(indices), *w.shape)


class AdamWUpdate(OwnUpdate):
    """AdamW."""

    def apply(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        state, weights = bucket.state, [bucket.weight(i) for i in indices]
        names = ("exp_avg", "exp_avg_sq", "step")
        moments = ([state[name][i] for i in indices] for name in names)
        self.ops.adamw(bucket.group, AdamWTensors(weights, averages, *moments))
        bucket.publish_masters(indices)


class AdamSUpdate(OwnUpdate):
    """AdamS, of averages that are negated when maximizing."""

    def apply(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        momenta, steps = bucket.state["exp_avg"], bucket.state["step"]
        for i, g in zip(indices, averages, strict=True):
            self.ops.adams(bucket.group, bucket.weight(i), g, momenta[i], steps[i])
        bucket.publish_masters(indices)


class WrappedUpdate:
    """The step of a torch optimizer, ``base``, on all averages of a step."""

    def __init__(self, base: Optimizer):
        self.base = base
        self._averages: dict[Tensor, Tensor] = {}  # this rank's part of each, of this step
        self._memory: dict[Tensor, Tensor] = {}
        self._stacks: dict[Tensor, Tensor] = {}  # memory for neighbours, by the first parameter
        self._applied: set[Tensor] = set()  # the parameters with an average in this step

    def memory_for(
        self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return the memory of averages that the base can read as they are, else memory that lives
        until the base has stepped; on a CPU, where new pages cost more than copies, as long as this
        object.
        """
        memory: list[Tensor] = []
        for i, given in zip(indices, averages, strict=True):
            p = bucket.params[i]
            if given is not None and given.dtype == get_grad_dtype(p) and not bucket.is_dtensor:
                self._averages[p] = given.view(p.shape)
            else:
                if p not in self._memory:
                    self._memory[p] = torch.empty_like(
                        to_local(p.detach()),
                        dtype=get_grad_dtype(p),
                        memory_format=torch.contiguous_format,
                    )
                self._averages[p] = self._memory[p]
            memory.append(self._averages[p])
        return memory

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        params = [bucket.params[i] for i in indices]
        first = params[0]
        shape = (len(params), *to_local(first).shape)
        if first not in self._stacks or self._stacks[first].shape != shape:
            dtype = get_grad_dtype(first)
            self._stacks[first] = torch.empty(shape, dtype=dtype, device=bucket.device)
        stack = self._stacks[first]
        self._averages.update(zip(params, stack.unbind(), strict=True))
        return stack

    def apply(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        self._applied.update(bucket.params[i] for i in indices)

    def step_base(self) -> None:
        """Step ``base`` once, on all averages.

        Meanwhile ``p.grad`` is the average, or None if no rank had a gradient.
        """
        params = [p for group in self.base.param_groups for p in group["params"]]
        averages, self._averages = self._averages, {}
        gradients = {p: as_gradient(averages[p], p) if p in averages else None for p in params}
        with replace_gradients(gradients):
            self.base.step()
        self._averages = {}
        self._memory = {p: x for p, x in self._memory.items() if p.device.type == "cpu"}
        self._stacks = {p: x for p, x in self._stacks.items() if p.device.type == "cpu"}


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
