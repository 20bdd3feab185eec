"""Residuals: what a rank has not sent yet of each tensor. No other file writes one.

Fused passes get the memory from ``open`` and write to it until the context ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .buckets import Bucket

Pairs = Sequence[tuple[int, Tensor]]  # indices of tensors in the bucket, and a tensor for each


class Opened(NamedTuple):
    """Residuals in memory that may be written to, with their ``indices``; in ``flat`` those of all
    tensors lie one after the other.
    """

    indices: list[int]
    tensors: list[Tensor]
    flat: Tensor

    @property
    def pairs(self) -> list[tuple[int, Tensor]]:
        return list(zip(self.indices, self.tensors, strict=True))


class Residuals:
    """The residuals of one bucket, one kind of its state; some tensors may have none."""

    def __init__(self, bucket: Bucket, name: str = "residual"):
        self.bucket, self.name, self.stored = bucket, name, bucket.state[name]

    def __contains__(self, i: int) -> bool:
        return self.stored[i] is not None

    def select(self, indices: Iterable[int] | None = None) -> list[int]:
        """Return those of ``indices``, by default of all, that have a residual."""
        chosen = range(len(self.stored)) if indices is None else indices
        return [i for i in chosen if self.stored[i] is not None]

    # Reading

    def unpack(self, i: int, stored: Tensor) -> Tensor:
        """Return the values of a residual of tensor i in stored form, not to be written to."""
        return stored

    def pack(self, i: int, values: Tensor) -> Tensor:
        """Return values of a residual of tensor i in the form in which they are stored."""
        return values

    def read(self, i: int) -> Tensor:
        """Return a residual in its tensor's shape, not to be written to."""
        return self.unpack(i, self.stored[i])

    def read_all(self) -> list[Tensor | None]:
        """Return all residuals, None for tensors without one, not to be written to."""
        return [*self.stored]

    def stack(self, indices: range) -> ResidualStack:
        """Return the residuals of neighbours of one shape, which all have one."""
        return ResidualStack(self.bucket.stack_state(self.name, indices))

    def add_to(self, sums: Pairs, scale: float = 1.0) -> None:
        """Add ``scale`` times the residual of each tensor that has one to the sum for it."""
        sum_of = dict(sums)
        for batch in self.batches(sum_of):
            to = [sum_of[i] for i, _ in batch]
            values = [e.view(x.shape) for x, (_, e) in zip(to, batch, strict=True)]
            torch._foreach_add_(to, values, alpha=scale)

    def norm(self) -> float:
        """Return the L2 norm of all."""
        return float(torch.linalg.vector_norm(self.bucket.flat[self.name]))

    # Writing

    def batches(
        self, indices: Iterable[int] | None = None, write: bool = False
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield residuals with their indices, on the bucket's device: all at once, or each by
        itself if they are offloaded. With ``write`` a batch may be written to until the next is
        requested.
        """
        chosen = self.select(indices)
        if self.bucket.offload is not None:
            states = enumerate(self.bucket.iterate_state(self.name, write))
            yield from ([(i, e)] for i, e in states if i in chosen)
        elif chosen:
            yield [(i, self.stored[i]) for i in chosen]

    @contextmanager
    def open(self, indices: Iterable[int] | None = None) -> Iterator[Opened]:
        """Open residuals that are on the device; what is written to them is stored at the end."""
        chosen = self.select(indices)
        yield Opened(chosen, [self.stored[i] for i in chosen], self.bucket.flat[self.name])

    def open_parts(self, indices: Iterable[int]) -> Iterator[Opened]:
        """Open residuals a part at a time; each is stored when the next is requested."""
        with self.open(indices) as opened:
            yield opened

    def iterate(self, write: bool = False) -> Iterator[Tensor]:
        """Iterate over the residuals of all tensors on the device, None for those without one; with
        ``write`` one may be written to until the next is requested.
        """
        return self.bucket.iterate_state(self.name, write)

    def set(self, values: Pairs) -> None:
        """Set the residual of each tensor that has one to the value for it, of any shape."""
        value_of = dict(values)
        for batch in self.batches(value_of, write=True):
            new = [value_of[i].view(e.shape) for i, e in batch]
            torch._foreach_copy_([e for _, e in batch], new)

    def add(self, values: Pairs) -> None:
        """Add to the residual of each tensor that has one the value for it, of any shape."""
        value_of = dict(values)
        for batch in self.batches(value_of, write=True):
            for i, e in batch:
                e.view(-1).add_(value_of[i].view(-1).to(e.device))

    def set_all(self, values: Tensor) -> None:
        """Set all residuals to ``values``, memory of a step, of which nothing is read any more."""
        self.bucket.store_state(self.name, values)

    def scale(self, indices: Iterable[int], factor: float) -> None:
        """Multiply residuals by a factor; 0 makes them zero whatever they are."""
        for batch in self.batches(indices, write=True):
            tensors = [e for _, e in batch]
            if factor:
                torch._foreach_mul_(tensors, factor)
            else:
                torch._foreach_zero_(tensors)

    def clear(self) -> None:
        """Set all residuals to zero."""
        self.bucket.flat[self.name].zero_()


class ResidualStack:
    """The residuals of k neighbours of one shape, as one tensor (k, *shape)."""

    def __init__(self, stored: Tensor):
        self._stored = stored

    @property
    def shape(self) -> torch.Size:
        return self._stored.shape

    def select(self, at: slice) -> ResidualStack:
        """Return those of some of the tensors."""
        return ResidualStack(self._stored[at])

    def read(self) -> Tensor:
        """Return the residuals, not to be written to."""
        return self._stored

    @contextmanager
    def open(self) -> Iterator[Tensor]:
        """Open the residuals; what is written to them is stored at the end."""
        yield self._stored
