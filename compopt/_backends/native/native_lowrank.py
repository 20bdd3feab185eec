"""SEPARATE with tracked columns by C passes: the products of ``separate.stacks.multiply`` and
lines 4 and 5 with AdamW, ``separate.update_tensors`` (kernels/native/lowrank.c), and
``separate.stacks.orthonormalize_columns`` (kernels/native/householder.c).

``native_ops`` registers these as fused implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._state.bucket import Bucket
from ..._state.residuals import Opened, Residuals
from ..._wire.payload import Payload
from ...separate.projection_reducer import ProjectionReducer
from ...separate.stacks import ProjectedStack
from .library import (
    ADAMW,
    EMPTY,
    NAMES,
    NUMBER,
    PACK,
    LibraryOps,
    Memory,
    Options,
    Table,
    address,
    address_in_turn,
    addresses,
    as_float32,
    run_pass,
)
from .native_updates import (
    adamw_numbers,
    averages_in_float32,
    residual_addresses,
    state_addresses,
)

AnyTable = TypeVar("AnyTable", bound=Table)
MOST_ROWS = 8  # of a tensor, that the update expands at a time
DEEP = 16  # rows of a tensor that a product reads at a time
LANES = 16  # as in vectors.h: narrow matrices are copied to rows of whole steps
# The fields of structs of C, in their order; first the sizes of a tensor.
PRODUCT = "height width r g e right out flag"
COLUMNS = "height r x out"
FACTORED = "height width r R p sent g e w m v step"


class StackTable(Table):
    """A table with a row for each of the ``chosen`` tensors of ``stacks`` of (k, *sizes), by
    default of all. Only addresses change from step to step. ``fixed``: columns that do not.
    """

    def __init__(
        self,
        fields: str,
        stacks: Sequence[tuple[int, ...]],
        chosen: Sequence[int] = (),
        **fixed: list[int],
    ):
        sizes = [size for k, *size in stacks for _ in range(k)]
        self.counts, self.chosen = [k for k, *_ in stacks], chosen or range(len(sizes))
        self.sizes = [sizes[i] for i in self.chosen]
        self.lengths = [size[0] * size[1] for size in self.sizes]
        columns = dict(zip(fields.split(), map(list, zip(*self.sizes, strict=True)), strict=False))
        super().__init__(len(self.chosen), fields, **columns, **fixed)

    def write_stacks(self, **columns: Sequence[Tensor]) -> None:
        """Write the addresses of the parts of one tensor for each stack."""
        for name, tensors in columns.items():
            self.tensors.append(tensors)
            numels = [x.numel() for x in tensors]
            firsts = addresses(NAMES[name], tensors, numels)
            places: list[int] = []
            for k, first, n in zip(self.counts, firsts, numels, strict=True):
                places += range(first, first + NUMBER * n, NUMBER * (n // k))
            if len(places) != len(self.chosen):
                places = [places[i] for i in self.chosen]
            self.write(**{name: places})


def find_table(
    bucket: Bucket, name: str, key: Sequence[object], make: Callable[[], AnyTable]
) -> AnyTable:
    """Return the table of the last step if nothing that it depends on has changed, else a new one.

    It depends on ``key`` and on the addresses of the bucket's state.
    """
    signature = (bucket.storage_version, *key)
    known = bucket.cache.get(name)
    if known is None or known[0] != signature:
        known = bucket.cache[name] = signature, make()
    table: AnyTable = known[1]
    return table


def sizes_of_stacks(stacks: Sequence[ProjectedStack]) -> list[tuple[int, int, int, int]]:
    """Return how many tensors each has, and the rows, columns and r of each of these."""
    return [
        (len(x.indices), x.projection.rows, x.projection.columns, x.projection.r) for x in stacks
    ]


def multiply_stacks(
    bucket: Bucket,
    ops: LibraryOps,
    stacks: Sequence[ProjectedStack],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    makes_P: bool,
    payload: Payload | None,
) -> None:
    """Do lines 1 and 2a, ``h Q``, if ``makes_P``, else 1 and 2c, ``h^T R``; the flags of projected
    gradients in the same pass.
    """
    sizes = sizes_of_stacks(stacks)
    table = find_table(bucket, "products", sizes, lambda: StackTable(PRODUCT, sizes))
    grads = as_float32([g for stack in stacks for g in stack.grads])
    table.write(g=Memory(grads, table.lengths))
    table.write_stacks(
        e=[stack.residual.read() for stack in stacks],
        right=[x.contiguous() for x in right],
        out=out,
    )
    count = len(bucket.params)
    flags = ops.scratch(out[0], count, torch.float32, "flags")
    first = address("flags", flags, count)
    if makes_P:  # the other product has no flags
        table.write(flag=[first + NUMBER * i for stack in stacks for i in stack.indices])
    # a narrow matrix and sums, rounded up to whole steps, and two buffers of rows
    room = max((n + m + 64) * (r + LANES) + 2 * (DEEP * m + 64) for n, m, r in table.sizes)
    own = ops.thread_memory(room)
    run_pass(ops.library.project, table, table.lengths, float(makes_P), own=[own])
    if payload is not None:
        in_stacks = {i for stack in stacks for i in stack.indices}
        others = [i for i in range(len(bucket.params)) if i not in in_stacks]
        if others:
            _pack(bucket, ops, others, [first + NUMBER * i for i in others])
        payload.header.copy_(flags)


def write_dense(
    bucket: Bucket,
    ops: LibraryOps,
    memory: Tensor,
    lengths: Sequence[int],
    indices: Sequence[int],
    adds_residuals: bool,
) -> None:
    """Write gradients that are sent dense to their places in ``memory``; with their residuals if
    ``adds_residuals``.
    """
    places = address_in_turn("a message", memory, lengths)
    unread = ops.thread_memory(1).first
    add = [bucket.state["residual"][i] for i in indices] if adds_residuals else None
    _pack(bucket, ops, indices, [unread] * len(indices), [places[i] for i in indices], add)


def _pack(
    bucket: Bucket,
    ops: LibraryOps,
    indices: Sequence[int],
    flags: list[int],
    out: list[int] | None = None,
    add: list[Tensor] | None = None,
) -> None:
    """Write flags of gradients; the gradients and what to ``add`` to each, if there is ``out``."""
    of_bucket, lengths = bucket.grads(), [bucket.lengths[i] for i in indices]
    # the positions of no elements, where nothing is written but flags
    index = EMPTY if out is None else 0
    table = find_table(
        bucket,
        "flags" if out is None else "dense",
        indices,
        lambda: Table(len(indices), PACK, n=lengths, index=index),
    )
    grads = as_float32([of_bucket[i] for i in indices])
    table.write(g=Memory(grads, lengths), flag=flags)
    if out is not None:
        table.write(add=0 if add is None else Memory(add, lengths), out=out)
    run_pass(ops.library.pack, table, lengths, 1.0, 1.0)


def orthonormalize_columns(
    bucket: Bucket,
    ops: LibraryOps,
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, int, int]],
    use: int = 0,
) -> list[Tensor]:
    """Return orthonormal columns that span those of matrices (k, n, r), which are stored by
    columns; they are stored by rows, and the next ones for this ``use`` reuse the memory.
    """
    sizes = [math.prod(shape) for shape in shapes]
    memory = bucket.get_memory(f"columns {use}", sum(sizes), torch.float32)
    flat = memory.split_with_sizes(sizes)
    results = [x.view(shape) for x, shape in zip(flat, shapes, strict=True)]
    name = f"columns {use}"
    table = find_table(bucket, name, shapes, lambda: StackTable(COLUMNS, shapes))
    table.write_stacks(x=[x.float() for x in parts], out=results)
    own = ops.thread_memory(max(r * (n + LANES + 1) for _, n, r in shapes))
    run_pass(ops.library.orthonormalize, table, table.lengths, own=[own])
    return results


def update_separate(
    bucket: Bucket,
    ops: LibraryOps,
    reducer: ProjectionReducer,
    update: Any,
    have_gradients: list[bool],
    factor: float,
) -> None:
    """Do lines 4 and 5 and AdamW's step of all tensors with a gradient on any rank."""
    indices = [i for i, has_gradient in enumerate(have_gradients) if has_gradient]
    parts = averages_in_float32(reducer.mean)
    dense, weights = reducer.list_dense(indices), bucket.weights
    sent_dense = {*dense}
    for residuals in Residuals(bucket).open_parts([i for i in indices if i not in sent_dense]):
        _update_factored(bucket, ops, reducer, residuals, weights, factor)
    if dense:
        averages = [parts[i] if factor == 1 else parts[i].mul_(factor) for i in dense]
        _update_dense(bucket, ops, dense, averages, weights)
        reducer.keep_unsent_dense(dense, reducer.mean, factor)


def _update_factored(
    bucket: Bucket,
    ops: LibraryOps,
    reducer: ProjectionReducer,
    residuals: Opened,
    weights: Sequence[Tensor],
    factor: float,
) -> None:
    stacks, wanted = reducer.tracked_stacks, {*residuals.indices}
    in_stacks = [i for stack in stacks for i in stack.indices]
    chosen = [n for n, i in enumerate(in_stacks) if i in wanted]
    if not chosen:
        return
    numbers = [in_stacks[n] for n in chosen]
    sizes = sizes_of_stacks(stacks)

    def make_table() -> StackTable:
        state = _state_columns(bucket, numbers)
        return StackTable(FACTORED, sizes, chosen, **state)

    table = find_table(bucket, "factors", (numbers, sizes), make_table)
    group, grads, places = bucket.group, bucket.grads(), residual_addresses(bucket, residuals)
    table.write_stacks(
        R=[x.R.contiguous() for x in stacks],
        p=[x.mean.float() for x in stacks],
        sent=[x.sent.float() for x in stacks],
    )
    table.write(
        g=Memory(as_float32([grads[i] for i in numbers]), table.lengths),
        w=Memory([weights[i] for i in numbers], table.lengths),
        e=[places[i] for i in numbers],
    )
    share = reducer.error_share(factor)
    options = Options(*adamw_numbers(group), factor, share, share)
    # a thread's memory: two narrow matrices, rounded up to whole steps, and four buffers of rows
    room = max(2 * r * (m + LANES) + 4 * (MOST_ROWS * m + 4 * LANES) for _, m, r in table.sizes)
    own = ops.thread_memory(room)
    run_pass(ops.library.factored, table, table.lengths, options, own=[own])


def _state_columns(bucket: Bucket, numbers: Sequence[int]) -> dict[str, list[int]]:
    """Return the addresses of state of these tensors, and of their numbers of steps."""
    counts = bucket.step_counts
    assert counts is not None
    places = {
        "m": state_addresses(bucket, "exp_avg"),
        "v": state_addresses(bucket, "exp_avg_sq"),
        "step": address_in_turn("a number of steps", counts, [1] * len(counts)),
    }
    return {column: [of_all[i] for i in numbers] for column, of_all in places.items()}


def _update_dense(
    bucket: Bucket,
    ops: LibraryOps,
    numbers: Sequence[int],
    averages: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> None:
    lengths = [bucket.lengths[i] for i in numbers]

    def make_table() -> Table:
        state = _state_columns(bucket, numbers)
        return Table(len(numbers), ADAMW, n=lengths, **state, k=lengths)

    table = find_table(bucket, "averages", numbers, make_table)
    of_numbers = Memory([weights[i] for i in numbers], lengths)
    table.write(w=of_numbers, mean=Memory(averages, lengths))
    run_pass(ops.library.adamw, table, lengths, Options(*adamw_numbers(bucket.group)))
