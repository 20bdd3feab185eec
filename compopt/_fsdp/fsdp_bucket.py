"""The gradients of one reduce-scatter of FSDP2 as a bucket: each rank's part of every parameter,
and what becomes of residuals.

``FSDPBackward`` makes such buckets, and ``fsdp_modules`` cuts rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._engine.engine import Engine
from .._engine.reducer import Reducer
from .._state.bits import WORD
from .._state.bucket import Bucket
from .._state.layouts import PaddedVector
from .._state.next_state import read_next
from .._state.residuals import Residuals
from .._state.shards import Range, ShardLayout, Strided
from .._wire.payload import Payload

# The rows of a reduce-scatter


class ParamColumns(NamedTuple):
    """One parameter's part of every row of a reduce-scatter: ``size`` elements from ``begin`` on.

    FSDP2 shards the parameter along ``dim`` over ``ranks``. Shards have the order of the rows: all
    ranks' parts, one after the other, each padded to ``size``.

    ``position`` says where the engine has the parameter's state: in which bucket, as which of its
    tensors. It is None for a parameter that was unfrozen since the last step: that is in no bucket
    and has no residual yet, and its gradient is sent unrounded. ``is_matrix``: the reducer needs
    the parameter's global shape.
    """

    p: Tensor
    dim: int
    begin: int
    size: int
    ranks: int
    position: tuple[Bucket, int] | None
    is_matrix: bool = False

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.begin + self.size)

    def count_filled(self, rank: int) -> int:
        """Return the number of its elements that ``rank`` has; padding follows."""
        if self.dim:
            return self.size
        return min(self.size, max(0, self.p.numel() - rank * self.size))

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the elements that ``rank`` decodes, in shard order: those that it owns.

        Of a matrix it decodes its rows, or all elements if FSDP cuts along another dimension;
        ``select_part`` takes its own from them.
        """
        if self.is_matrix and self.dim:
            return 0, self.p.numel()
        most = self.p.numel() if self.is_matrix else self.ranks * self.size
        return min(rank * self.size, most), min((rank + 1) * self.size, most)

    def in_shape(self, sharded: Tensor) -> Tensor:
        """Convert a vector in shard order to the parameter's shape."""
        shape = self.p.shape
        if not self.dim:
            return sharded[: self.p.numel()].view(shape)
        parts = sharded.view(self.ranks, *shape[: self.dim], -1, *shape[self.dim + 1 :])
        return parts.movedim(0, self.dim).reshape(shape)

    def in_shard_order(self, tensor: Tensor) -> list[Tensor]:
        """Convert a tensor of the parameter's shape to shard order, as vectors to concatenate."""
        if self.dim:
            return [tensor.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0).flatten()]
        padding = self.ranks * self.size - tensor.numel()
        return [tensor.reshape(-1), tensor.new_zeros(padding)]

    def select_part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the part of ``rank`` of a tensor of the parameter's shape, as a vector."""
        chunks = tensor.chunk(self.ranks, self.dim)
        return chunks[rank].reshape(-1) if rank < len(chunks) else tensor.new_empty(0)

    def read_residual(self) -> Tensor | None:
        """Return the optimizer's residual of the parameter."""
        if self.position is None:
            return None
        residuals, i = Residuals(self.position[0]), self.position[1]
        return residuals.read(i) if i in residuals else None


def place_in_rows(
    params: Iterable[tuple[Tensor, int]], ranks: int, bucket_of: Mapping[Tensor, Bucket]
) -> list[ParamColumns]:
    """Place parameters in a row, in this order, each with the dimension that FSDP2 shards.

    ``bucket_of``: the engine's bucket of each.
    """
    pieces, begin = [], 0
    for p, dim in params:
        size, position = longest_part_numel(p, dim, ranks), None
        if (bucket := bucket_of.get(p)) is not None:
            position = bucket, next(i for i, other in enumerate(bucket.params) if other is p)
        pieces.append(ParamColumns(p, dim, begin, size, ranks, position))
        begin += size
    return pieces


def longest_part_numel(p: Tensor, dim: int, ranks: int) -> int:
    """Return the elements of the longest rank's part of ``p``, which FSDP2 shards along ``dim``."""
    if not p.numel():
        return 0
    return -(-p.shape[dim] // ranks) * (p.numel() // p.shape[dim])


def cut_by_rows(
    ranges: list[list[Range]], compressed_counts: list[int], compressed: list[bool], rank: int
) -> ShardLayout:
    """Give every rank an equally long part of each compressed tensor, padded where necessary.

    ``compressed_counts`` are the compressed elements of each rank, without padding.
    """
    ranks = len(ranges)
    lengths = [max(stop for _, stop in parts) for parts in zip(*ranges, strict=True)]
    sizes = [n // ranks if c else 0 for n, c in zip(lengths, compressed, strict=True)]
    width = sum(sizes) + -sum(sizes) % (8 * WORD)
    firsts = itertools.accumulate(sizes, initial=0)
    strided_bits = [
        Strided(first, ranks, n, width) if c else None
        for first, n, c in zip(firsts, sizes, compressed, strict=False)
    ]
    used = sum(sizes)
    gaps = [Strided(used, ranks, width - used, width)] if used < width else []
    cuts = [r * width // 8 for r in range(ranks + 1)]
    return ShardLayout(
        lengths, compressed, ranges, cuts, strided_bits, gaps, compressed_counts, rank
    )


# Residuals until a step is applied


@dataclass
class PendingState:
    """The state that a parameter gets if the step is applied.

    ``next_residual``, what none of the step's backwards has sent, then takes the place of
    ``residual``; both as they are stored. ``others``: other new state, by name.
    """

    next_residual: Tensor
    residual: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)

    def add_unsent(self, residuals: Residuals, i: int, rest: Tensor) -> None:
        """Add what a further backward has not sent."""
        self.next_residual = residuals.pack(i, residuals.unpack(i, self.next_residual) + rest)

    def write_to(self, residuals: Residuals, i: int, factor: float) -> None:
        """Write ``next_residual`` to residual i; ``factor``, which clipped the average, scales the
        change.

        If ``residual`` was replaced since backward (a checkpoint was loaded, or state was laid out
        again), the change, ``next_residual - residual``, is added to the one that is there.
        """
        new, old = (residuals.unpack(i, x) for x in (self.next_residual, self.residual))
        with residuals.open([i]) as opened:
            (e,) = opened.tensors
            if residuals.stored[i] is not self.residual:
                e.add_(new.sub_(old), alpha=factor)
            elif factor == 1:
                e.copy_(new)
            else:
                e.lerp_(new, factor)


# of parameters whose gradients a backward has reduced
PendingStates = dict[Tensor, PendingState]


# The bucket


class ReduceScatterBucket(Bucket):
    """The gradients of one parameter group of the optimizer in one reduce-scatter.

    Its ``params`` are stand-ins without memory; only their ``grad`` is real. The stand-in of a
    matrix has the parameter's global shape, and ranks own the rows of it that FSDP gives them. Any
    other is a vector in the order of FSDP's shards, padded so that all ranks own equally many
    elements.
    """

    def __init__(self, index: int, engine: Engine, pieces: list[ParamColumns], dtype: torch.dtype):
        self.pieces, self.rank, ranks = pieces, engine.comm.rank, engine.comm.size
        # parameters of one group: all of them are in buckets, or none is
        self.positions = [piece.position for piece in pieces if piece.position is not None]
        group, scratch = {**engine.option_groups[0], "payload_dtype": None}, None
        names, compressed = ["unfrozen"] * len(pieces), [False] * len(pieces)
        if self.positions:
            group, scratch = self.positions[0][0].group, self.positions[0][0].scratch
            names = [bucket.names[i] for bucket, i in self.positions]
            compressed = [bucket.compressed[i] for bucket, i in self.positions]
        without_memory = torch.empty(1, dtype=dtype, device=pieces[0].p.device)
        tensors = [
            without_memory.expand(piece.p.shape if piece.is_matrix else (ranks * piece.size,))
            for piece in pieces
        ]
        is_compressed = dict(zip(tensors, compressed, strict=True))
        super().__init__(index, group, tensors, names, lambda p, *_: is_compressed[p], scratch)
        self.model_params = [piece.p for piece in pieces]
        ranges = [[piece.range_of(r) for piece in pieces] for r in range(ranks)]
        compressed_pieces = [piece for piece, c in zip(pieces, compressed, strict=True) if c]
        owned = [sum(piece.count_filled(r) for piece in compressed_pieces) for r in range(ranks)]
        self.shards = cut_by_rows(ranges, owned, compressed, self.rank)
        self.codecs = engine.ops.codecs

    def load_rows(self, rows: Tensor, pending_states: PendingStates) -> None:
        """Read this rank's gradients from ``rows``; copy the residuals to be sent."""
        parts: list[list[Tensor]] = []  # the residual of each tensor, as vectors
        for p, piece in zip(self.params, self.pieces, strict=True):
            values = rows[:, piece.columns].reshape(-1)
            p.grad = piece.in_shape(values) if piece.is_matrix else values
            e = piece.read_residual()
            if e is None:
                parts.append([])
            elif piece.p in pending_states:  # an earlier backward has sent it
                parts.append([e.new_zeros(p.numel())])
            else:
                parts.append([e.reshape(-1)] if piece.is_matrix else piece.in_shard_order(e))
        vectors = [vector for part in parts for vector in part]
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        flat = torch.cat(vectors) if vectors else empty
        views: list[Any] = list(flat.split([sum(map(len, part)) for part in parts]))
        for i, (p, part) in enumerate(zip(self.params, parts, strict=True)):
            views[i] = views[i].view(p.shape) if part else None
        self.flat, self.state = {"residual": flat}, {"residual": views}
        self.storage_version += 1
        for name, layout in (self.positions[0][0].layouts if self.positions else {}).items():
            if isinstance(layout, PaddedVector):  # state of global tensors, on every rank
                self.state[name] = [bucket.state[name][i] for bucket, i in self.positions]
        self.cache["has_residual"] = True

    def write_shard(self, reducer: Reducer, mean: Payload, out: Tensor) -> None:
        """Write this rank's shard of the average to FSDP's output.

        Where any rank's gradient is not finite, as the header of ``mean`` says, the shard's first
        element becomes NaN: a reducer that sends a part of the elements may not have sent that one.
        """
        shards: list[Tensor] = []
        parts = reducer.read_owned_averages(out.dtype)
        for piece, part in zip(self.pieces, parts, strict=True):
            if piece.is_matrix and piece.dim:
                part = piece.select_part(part.view(piece.p.shape), self.rank)
            shards.append(out[piece.begin : piece.begin + len(part)].copy_(part))
        zero_or_nan = (mean.header * 0).to(out.dtype).split(1)
        torch._foreach_add_([shard[:1] for shard in shards], [*zero_or_nan])

    def collect_residuals(self, reducer: Reducer, pending_states: PendingStates) -> None:
        """Add what this backward has not sent."""
        reducer.keep_unsent([True] * len(self.pieces))
        for i, (piece, rest) in enumerate(zip(self.pieces, self.state["residual"], strict=True)):
            if piece.position is None or rest is None:
                continue
            p, residuals, number = piece.p, Residuals(piece.position[0]), piece.position[1]
            rest = rest if piece.is_matrix else piece.in_shape(rest)
            if p in pending_states:
                pending_states[p].add_unsent(residuals, number, rest)
            else:
                stored = residuals.stored[number]
                pending_states[p] = PendingState(residuals.pack(number, rest), stored)
            pending_states[p].others.update(read_next(self, i))
        self._forget_gradients()

    def refuse_average(self, out: Tensor, pending_states: PendingStates) -> None:
        """Write NaN in place of this rank's shard of an average that lacks its gradients: no step
        applies it, also if the error is caught. Residuals stay.
        """
        for piece in self.pieces:
            out[piece.columns].fill_(float("nan"))
            if piece.position is None:
                continue
            bucket, i = piece.position
            if (stored := Residuals(bucket).stored[i]) is not None:
                pending_states.setdefault(piece.p, PendingState(stored, stored))
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for p in self.params:
            p.grad = None
        self.flat, self.state = {}, {}
