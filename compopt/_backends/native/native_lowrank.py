"""SEPARATE with tracked columns by C passes: the products of ``separate.stacks.multiply`` and
lines 4 and 5 with AdamW, ``separate.update_tensors`` (kernels/native/lowrank.c), and
``separate.stacks.orthonormalize_columns`` (kernels/native/householder.c).
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
from .native_updates import (
    NativeUpdates,
    adamw_options,
    averages_in_float32,
    residual_addresses,
    state_addresses,
)
from .passes import (
    ADAMW,
    EMPTY,
    NAMES,
    PACK,
    Options,
    Struct,
    Table,
    address,
    address_in_turn,
    addresses,
    as_float32,
    per_thread_scratch,
    run_over_rows,
)

Rows = TypeVar("Rows")
MOST_ROWS = 8  # of a tensor, that the update expands at a time
DEEP = 16  # rows of a tensor that a product reads at a time
LANES = 16  # as in vectors.h: narrow matrices are copied to rows of whole steps
PRODUCT = Struct("height width r g e right out flag")
COLUMNS = Struct("height r x out")
FACTORED = Struct("height width r R p sent g e w m v step")


class StackRows:
    """A table with a row for each of the ``chosen`` tensors of stacks of (k, rows, columns, r), in
    which only addresses change from step to step. ``fixed``: columns that do not.
    """

    def __init__(
        self,
        struct: Struct,
        stacks: Sequence[tuple[int, int, int, int]],
        chosen: Sequence[int],
        **fixed: list[int],
    ):
        sizes = [size for k, *size in stacks for _ in range(k)]
        self.counts, self.chosen = [k for k, *_ in stacks], chosen
        self.sizes = [sizes[i] for i in chosen]
        self.lengths = [rows * columns for rows, columns, _ in self.sizes]
        rows, columns, ranks = (list(x) for x in zip(*self.sizes, strict=True))
        self.table = struct.table(len(chosen), height=rows, width=columns, r=ranks, **fixed)

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Write the addresses of the parts of one tensor for each stack."""
        numels = [x.numel() for x in tensors]
        firsts = addresses(NAMES.get(name, "a factor"), tensors, numels)
        places: list[int] = []
        for k, first, n in zip(self.counts, firsts, numels, strict=True):
            places += range(first, first + 4 * n, 4 * (n // k))
        if len(places) != len(self.chosen):
            places = [places[i] for i in self.chosen]
        self.table.write(name, places)


def find_rows(bucket: Bucket, name: str, key: Sequence[object], make: Callable[[], Rows]) -> Rows:
    """Return the rows of the last step if nothing that they depend on has changed, else new ones.

    They depend on ``key`` and on the addresses of the bucket's state.
    """
    signature = (bucket.storage_version, *key)
    known = bucket.cache.get(name)
    if known is None or known[0] != signature:
        known = bucket.cache[name] = signature, make()
    rows: Rows = known[1]
    return rows


def multiply_stacks(
    bucket: Bucket,
    ops: NativeUpdates,
    stacks: Sequence[ProjectedStack],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    makes_P: bool,
    payload: Payload | None,
) -> None:
    """Do lines 1 and 2a, ``h Q``, if ``makes_P``, else 1 and 2c, ``h^T R``; the flags of projected
    gradients in the same pass.
    """
    sizes = [
        (len(x.indices), x.projection.rows, x.projection.columns, x.projection.r) for x in stacks
    ]
    chosen = range(sum(k for k, *_ in sizes))
    rows = find_rows(bucket, "products", sizes, lambda: StackRows(PRODUCT, sizes, chosen))
    # alive until the pass has read them
    grads = as_float32([g for stack in stacks for g in stack.grads])
    narrow = [x.contiguous() for x in right]
    residuals = [stack.residual.read() for stack in stacks]
    table = rows.table
    table.write("g", addresses("a gradient", grads, rows.lengths))
    rows.write("e", residuals)
    rows.write("right", narrow)
    rows.write("out", out)
    count = len(bucket.params)
    flags = ops.scratch(out[0], count, torch.float32, "flags")
    first = address("flags", flags, count)
    if makes_P:  # the other product has no flags
        table.write("flag", [first + 4 * i for stack in stacks for i in stack.indices])
    # a narrow matrix and sums, rounded up to whole steps, and two buffers of rows
    room = max((n + m + 64) * (r + LANES) + 2 * (DEEP * m + 64) for n, m, r in rows.sizes)
    scratch = per_thread_scratch(ops, out[0], room)
    library = ops.library
    run_over_rows(
        rows.lengths,
        lambda a, b, thread: library.project(
            table, a, b, float(makes_P), scratch + 4 * room * thread
        ),
    )
    if payload is not None:
        in_stacks = {i for stack in stacks for i in stack.indices}
        others = [i for i in range(len(bucket.params)) if i not in in_stacks]
        if others:
            _pack(bucket, ops, others, [first + 4 * i for i in others])
        payload.header.copy_(flags)


def write_dense(
    bucket: Bucket,
    ops: NativeUpdates,
    memory: Tensor,
    lengths: Sequence[int],
    indices: Sequence[int],
    adds_residuals: bool,
) -> None:
    """Write gradients that are sent dense to their places in ``memory``; with their residuals if
    ``adds_residuals``.
    """
    places = address_in_turn("a message", memory, lengths)
    unread = per_thread_scratch(ops, memory, 1)
    add = [bucket.state["residual"][i] for i in indices] if adds_residuals else None
    _pack(bucket, ops, indices, [unread] * len(indices), [places[i] for i in indices], add)


def _pack(
    bucket: Bucket,
    ops: NativeUpdates,
    indices: Sequence[int],
    flags: list[int],
    out: list[int] | None = None,
    add: list[Tensor] | None = None,
) -> None:
    """Write flags of gradients; the gradients and what to ``add`` to each, if there is ``out``."""
    of_bucket, lengths = bucket.grads(), [bucket.lengths[i] for i in indices]
    # the positions of no elements, where nothing is written but flags
    index = EMPTY if out is None else 0
    table = find_rows(
        bucket,
        "flags" if out is None else "dense",
        indices,
        lambda: PACK.table(len(indices), n=lengths, index=index),
    )
    grads = as_float32([of_bucket[i] for i in indices])  # alive until the pass has read them
    table.write("g", addresses("a gradient", grads, lengths))
    table.write("flag", flags)
    if out is not None:
        nothing = [0] * len(indices)
        table.write("add", nothing if add is None else addresses("a residual", add, lengths))
        table.write("out", out)
    run_over_rows(lengths, lambda a, b, _: ops.library.pack(table, a, b, 1.0, 1.0))


def orthonormalize_columns(
    bucket: Bucket,
    ops: NativeUpdates,
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, int, int]],
    use: int = 0,
) -> list[Tensor]:
    """Return orthonormal columns that span those of matrices (k, n, r), which are stored by
    columns; they are stored by rows, and the next ones for this ``use`` reuse the memory.
    """
    by_columns = [x.float() for x in parts]  # alive until the pass has read them
    sizes = [math.prod(shape) for shape in shapes]
    memory = bucket.get_memory(f"columns {use}", sum(sizes), torch.float32)
    flat = memory.split_with_sizes(sizes)
    results = [x.view(shape) for x, shape in zip(flat, shapes, strict=True)]
    rows: dict[str, list[int]] = {"height": [], "r": [], "x": [], "out": []}
    for (k, n, r), x, out in zip(shapes, by_columns, results, strict=True):
        rows["height"] += [n] * k
        rows["r"] += [r] * k
        rows["x"] += address_in_turn("columns", x, [n * r] * k)
        rows["out"] += address_in_turn("orthonormal columns", out, [n * r] * k)
    table = COLUMNS.table(len(rows["r"]), **rows)
    room = max(r * (n + LANES + 1) for _, n, r in shapes)
    scratch = per_thread_scratch(ops, results[0], room)
    run_over_rows(
        [n * r for n, r in zip(rows["height"], rows["r"], strict=True)],
        lambda a, b, thread: ops.library.orthonormalize(table, a, b, scratch + 4 * room * thread),
    )
    return results


def update_separate(
    bucket: Bucket,
    ops: NativeUpdates,
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
    ops: NativeUpdates,
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
    projections = [stack.projection for stack in stacks]
    sizes = [
        (len(x.indices), q.rows, q.columns, q.r) for x, q in zip(stacks, projections, strict=True)
    ]

    def make_rows() -> StackRows:
        state = _state_columns(bucket, numbers, m="exp_avg", v="exp_avg_sq")
        return StackRows(FACTORED, sizes, chosen, **state)

    rows = find_rows(bucket, "factors", (numbers, sizes), make_rows)
    group, grads = bucket.group, bucket.grads()
    # alive until the pass has read them
    factors = [(x.R.contiguous(), x.mean.float(), x.sent.float()) for x in stacks]
    wide = as_float32([grads[i] for i in numbers])
    places, table, lengths = residual_addresses(bucket, residuals), rows.table, rows.lengths
    for name, tensors in zip(("R", "p", "sent"), zip(*factors, strict=True), strict=True):
        rows.write(name, tensors)
    table.write("g", addresses("a gradient", wide, lengths))
    table.write("w", addresses("a parameter", [weights[i] for i in numbers], lengths))
    table.write("e", [places[i] for i in numbers])
    share = reducer.error_share(factor)
    (beta1, beta2), sign = group["betas"], -1.0 if group["maximize"] else 1.0
    hyper = float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], sign
    options = Options(*hyper, factor, share, share)
    # a thread's memory: two narrow matrices, rounded up to whole steps, and four buffers of rows
    room = max(2 * r * (m + LANES) + 4 * (MOST_ROWS * m + 4 * LANES) for _, m, r in rows.sizes)
    scratch = per_thread_scratch(ops, weights[0], room)
    run_over_rows(
        lengths,
        lambda a, b, thread: ops.library.factored(
            table, a, b, options, scratch + 4 * room * thread
        ),
    )


def _state_columns(bucket: Bucket, numbers: Sequence[int], **names: str) -> dict[str, list[int]]:
    """Return the addresses of state of these tensors, and of their numbers of steps."""
    places = {column: state_addresses(bucket, name) for column, name in names.items()}
    counts = bucket.step_counts
    assert counts is not None
    places["step"] = address_in_turn("a number of steps", counts, [1] * len(counts))
    return {column: [of_all[i] for i in numbers] for column, of_all in places.items()}


def _update_dense(
    bucket: Bucket,
    ops: NativeUpdates,
    numbers: Sequence[int],
    averages: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> None:
    lengths = [bucket.lengths[i] for i in numbers]

    def make_table() -> Table:
        state = _state_columns(bucket, numbers, m="exp_avg", v="exp_avg_sq")
        return ADAMW.table(len(numbers), n=lengths, **state, k=lengths)

    table = find_rows(bucket, "averages", numbers, make_table)
    table.write("w", addresses("a parameter", [weights[i] for i in numbers], lengths))
    table.write("mean", addresses("an averaged gradient", averages, lengths))
    options = adamw_options(bucket.group)
    run_over_rows(lengths, lambda a, b, _: ops.library.adamw(table, a, b, options))
