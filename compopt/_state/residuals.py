"""Residuals: what a rank has not sent yet of each tensor. No other file writes one.

They are stored as numbers, or in blocks of 8 bits (``residual_dtype="int8"``). Blocks are decoded
into memory of the moment, a few tensors at a time, and encoded again after a change, with
stochastic rounding: step, bucket and place determine the random numbers, so a run that is resumed
draws the same. Fused passes get their memory from ``open`` and write to it until the context ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .._wire.payload import ROW
from .blocks import BLOCK_BYTES
from .bucket import Bucket
from .layouts import Int8Blocks, Layout

Pairs = Sequence[tuple[int, Tensor]]  # indices of tensors in the bucket, and a tensor for each
# Elements that are decoded at a time; a larger tensor by itself.
CHUNK, DEVICE_CHUNK = 2**20, 2**24
SALT = 1_000_002  # makes seeds of residuals differ from those of payloads and updates


class Opened(NamedTuple):
    """Residuals in memory that may be written to, with their ``indices``. They lie in ``flat``: all
    of the bucket one after the other if all are opened.
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
        self.bucket, self.name = bucket, name
        self.stored, self._flat = bucket.state[name], bucket.flat[name]
        # True if the stored tensors are the numbers themselves.
        self.is_exact = self._flat.is_floating_point()

    def __contains__(self, i: int) -> bool:
        return self.stored[i] is not None

    def select(self, indices: Iterable[int] | None = None) -> list[int]:
        """Return those of ``indices``, by default of all, that have a residual."""
        chosen = range(len(self.stored)) if indices is None else indices
        return [i for i in chosen if self.stored[i] is not None]

    # Reading

    def unpack(self, i: int, stored: Tensor) -> Tensor:
        """Return the values of a residual of tensor i in stored form, not to be written to."""
        if self.is_exact:
            return stored
        shape = self._shape_of(i)
        values = torch.empty(shape.numel(), dtype=self.bucket.compute_dtype, device=stored.device)
        self.bucket.blocks.decode(stored, values)
        return values.view(shape)

    def pack(self, i: int, values: Tensor) -> Tensor:
        """Return values of a residual of tensor i in the form in which they are stored."""
        if self.is_exact:
            return values
        blocks = self.stored[i].new_empty(self.stored[i].shape, device=values.device)
        flat = values.reshape(-1).to(self.bucket.compute_dtype)
        self.bucket.blocks.encode(flat, blocks, self._seed, self._first_blocks[i])
        return blocks

    def read(self, i: int) -> Tensor:
        """Return a residual in its tensor's shape, not to be written to."""
        return self.unpack(i, self.stored[i])

    @property
    def flat(self) -> Tensor:
        """All residuals, which are exact, as one vector, not to be written to."""
        return self._flat

    def read_all(self) -> list[Tensor | None]:
        """Return all residuals, None for tensors without one, not to be written to."""
        if self.is_exact:
            return [*self.stored]
        return [self.read(i) if i in self else None for i in range(len(self.stored))]

    def stack(self, indices: range) -> ResidualStack:
        """Return the residuals of neighbours of one shape, which all have one."""
        return ResidualStack(self, indices)

    def add_to(
        self, sums: Pairs, scale: float = 1.0, positions: Sequence[Tensor | None] | None = None
    ) -> None:
        """Add ``scale`` times the residual of each tensor that has one to the sum for it;
        ``positions[i]``: the elements of tensor i, if not all.
        """
        sum_of = dict(sums)
        for batch in self.batches(sum_of):
            to, values = [sum_of[i] for i, _ in batch], []
            for x, (i, e) in zip(to, batch, strict=True):
                at = None if positions is None else positions[i]
                values.append(e.view(x.shape) if at is None else e.view(-1).index_select(0, at))
            torch._foreach_add_(to, values, alpha=scale)

    def norm(self) -> float:
        """Return the L2 norm of all."""
        parts = [self._flat] if self.is_exact else map(self.read, self.select())
        return float(sum(float(torch.linalg.vector_norm(x)) ** 2 for x in parts) ** 0.5)

    # Writing

    @contextmanager
    def open(self, indices: Iterable[int] | None = None, write: bool = True) -> Iterator[Opened]:
        """Open residuals where they are stored; what is written to them is stored at the end."""
        chosen = self.select(indices)
        if self.is_exact:
            yield Opened(chosen, [self.stored[i] for i in chosen], self._flat)
            return
        shapes = [self._shape_of(i) for i in chosen]
        sizes, dtype = [shape.numel() for shape in shapes], self.bucket.compute_dtype
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._flat.device)
        parts = flat.split(sizes)
        runs = [*self._join(chosen, sizes)]
        for values, blocks, _ in runs_of(flat, self._flat, runs):
            self.bucket.blocks.decode(blocks, values)
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        yield Opened(chosen, views, flat)
        if write:
            for values, blocks, first in runs_of(flat, self._flat, runs):
                self.bucket.blocks.encode(values, blocks, self._seed, first)

    def open_parts(self, indices: Iterable[int] | None, write: bool = True) -> Iterator[Opened]:
        """Open residuals, a few at a time where they are decoded; each part is stored when the next
        is requested.
        """
        chosen = self.select(indices)
        sizes = [0 if self.is_exact else self._shape_of(i).numel() for i in chosen]
        for part in cut_by_size(chosen, sizes, self._flat.device):
            with self.open(part, write) as opened:
                yield opened

    def batches(
        self, indices: Iterable[int] | None = None, write: bool = False
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Yield residuals with their indices, on the bucket's device: all at once, or a few at a
        time where they are decoded or offloaded. With ``write`` a batch may be written to until the
        next is requested.
        """
        if self.bucket.offload is None:
            yield from (opened.pairs for opened in self.open_parts(indices, write))
            return
        chosen = {*self.select(indices)}
        for i, stored in enumerate(self.bucket.iterate_state(self.name, write)):
            if i in chosen:
                e = self.unpack(i, stored)
                yield [(i, e)]
                if write and not self.is_exact:
                    stored.copy_(self.pack(i, e))

    def iterate(self, write: bool = False) -> Iterator[Tensor]:
        """Iterate over the residuals of all tensors on the device, None for those without one; with
        ``write`` one may be written to until the next is requested. They must be exact.
        """
        return self.bucket.iterate_state(self.name, write)

    def set(self, values: Pairs) -> None:
        """Set the residual of each tensor that has one to the value for it, of any shape."""
        known = [(i, value) for i, value in values if i in self]
        if self.bucket.offload is None and known:
            device = self._flat.device
            new = [self.pack(i, x.to(device)).view(self.stored[i].shape) for i, x in known]
            torch._foreach_copy_([self.stored[i] for i, _ in known], new)
            return
        value_of = dict(known)
        for batch in self.batches(value_of, write=True):
            for i, e in batch:
                e.copy_(value_of[i].view(e.shape))

    def add(self, values: Pairs) -> None:
        """Add to the residual of each tensor that has one the value for it, of any shape."""
        value_of = dict(values)
        for batch in self.batches(value_of, write=True):
            for i, e in batch:
                e.view(-1).add_(value_of[i].view(-1).to(e.device))

    def set_all(self, values: Tensor) -> None:
        """Set all residuals, which are exact, to ``values``, memory of a step, of which nothing is
        read any more.
        """
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
        self._flat.zero_()

    # Blocks

    @property
    def _seed(self) -> tuple[int, ...]:
        return self.bucket.group["step"], self.bucket.index, SALT

    @property
    def _first_blocks(self) -> list[int]:
        """The number in the bucket of the first block of each tensor."""
        sizes = self.bucket.sizes[self.name]
        return [start // BLOCK_BYTES for start in accumulate(sizes, initial=0)]

    def _shape_of(self, i: int) -> torch.Size:
        """Return the shape of a residual: as it was allocated, whatever the parameter is now."""
        if self.is_exact:
            return self.stored[i].shape
        return torch.Size(self.bucket.decoded_shapes[self.name][i])

    def _join(self, chosen: list[int], sizes: list[int]) -> Iterator[BlockRun]:
        """Yield runs of blocks that follow each other without gaps."""
        first_blocks, run, at = self._first_blocks, BlockRun(0, 0, 0, 0), 0
        for i, size in zip(chosen, sizes, strict=True):
            first, count = first_blocks[i], first_blocks[i + 1] - first_blocks[i]
            if run.first + run.blocks == first and run.size == run.blocks * ROW:
                run = BlockRun(run.at, run.size + size, run.first, run.blocks + count)
            else:
                yield run
                run = BlockRun(at, size, first, count)
            at += size
        yield run


class BlockRun(NamedTuple):
    """``size`` values from number ``at`` on, in ``blocks`` blocks from number ``first`` on."""

    at: int
    size: int
    first: int
    blocks: int


def runs_of(
    values: Tensor, stored: Tensor, runs: Iterable[BlockRun]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the values, the blocks, and the number of the first block of each run."""
    blocks = stored.view(-1, BLOCK_BYTES)
    for run in runs:
        if run.size:
            yield (
                values[run.at : run.at + run.size],
                blocks[run.first : run.first + run.blocks],
                run.first,
            )


def cut_by_size(indices: list[int], sizes: list[int], device: torch.device) -> Iterator[list[int]]:
    """Cut indices into parts of a limited size."""
    limit, part, total = CHUNK if device.type == "cpu" else DEVICE_CHUNK, list[int](), 0
    for i, size in zip(indices, sizes, strict=True):
        if part and total + size > limit:
            yield part
            part, total = [], 0
        part.append(i)
        total += size
    if part:
        yield part


class ResidualStack:
    """The residuals of k neighbours of one shape, as one tensor (k, *shape)."""

    def __init__(self, residuals: Residuals, indices: range):
        self._residuals, self.indices = residuals, indices
        # The stored numbers; None if ``read`` has to decode them, and returns a copy.
        self.exact: Tensor | None = None
        if residuals.is_exact:
            self.exact = residuals.bucket.stack_state(residuals.name, indices)

    @property
    def shape(self) -> torch.Size:
        """The shape of one tensor of the stack."""
        residuals, i = self._residuals, self.indices[0]
        return residuals._shape_of(i) if self.exact is None else self.exact.shape[1:]

    def select(self, at: slice) -> ResidualStack:
        """Return those of some of the tensors."""
        return ResidualStack(self._residuals, self.indices[at])

    def cut(self) -> list[slice]:
        """Return the parts of the stack to open one after the other."""
        k = len(self.indices)
        sizes = [self.shape.numel() if self.exact is None else 0] * k
        parts = cut_by_size([*range(k)], sizes, self._residuals._flat.device)
        return [slice(part[0], part[-1] + 1) for part in parts]

    def read(self) -> Tensor:
        """Return the residuals, not to be written to if they are no copy."""
        if self.exact is not None:
            return self.exact
        with self._residuals.open(self.indices, write=False) as opened:
            return opened.flat.view(len(self.indices), *self.shape)

    @contextmanager
    def open(self) -> Iterator[Tensor]:
        """Open the residuals; what is written to them is stored at the end."""
        if self.exact is not None:
            yield self.exact
            return
        with self._residuals.open(self.indices) as opened:
            yield opened.flat.view(len(self.indices), *self.shape)


def residual_layout(layout: Layout, dtype: str | None) -> Layout:
    """Return the layout of residuals that are stored in this dtype; None: as computed."""
    if dtype is None:
        return layout
    in_all, optional = layout.compressed_only, layout.optional
    return Int8Blocks(torch.int8, layout, compressed_only=in_all, optional=optional)
