"""SEPARATE with tracked columns by C passes (kernels/native/lowrank.c): the products of
``_lowrank.stacks.multiply``, and lines 4 and 5 with AdamW, ``separate.update_tensors``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.residuals import Opened, Residuals
from ..._wire.payload import Payload
from ..operations import gradient_marks
from ..update_helpers import FactoredAverages
from .passes import (
    ADAMW,
    NAMES,
    Memory,
    Options,
    Struct,
    address_in_turn,
    as_float32,
    per_thread_scratch,
    run_over_rows,
)
from .updates import (
    NativeUpdates,
    adamw_options,
    averages_in_float32,
    residual_addresses,
    state_addresses,
)

LANES = 16  # as in vectors.h: narrow matrices are copied to rows of whole steps
PRODUCT = Struct("height width r g e right out mark")
FACTORED = Struct("height width r R p sent g e w m v step")


def multiply_stacks(
    bucket: Bucket,
    ops: NativeUpdates,
    stacks: Sequence[Any],
    right: Sequence[Tensor],
    out: Sequence[Tensor],
    transposed: bool,
    header: Payload | None,
) -> None:
    """Write ``h Q``, or ``h^T R``, of every tensor of the stacks; the marks of projected gradients
    in the same pass.

    It is the first where ``transposed``: H is the transpose of the tensor.
    """
    marks = torch.zeros(len(bucket.params), dtype=torch.float32, device="cpu")
    sizes: list[tuple[int, int, int]] = []
    given: list[Tensor | None] = []
    columns: dict[str, list[int]] = {name: [] for name in ("e", "right", "out", "mark")}
    narrow = [x.contiguous() for x in right]  # alive until the pass has read them
    residuals = [stack.residual.read() for stack in stacks]  # and these
    for stack, e, R, product in zip(stacks, residuals, narrow, out, strict=True):
        projection, k = stack.projection, len(stack.indices)
        sizes += [(projection.rows, projection.columns, projection.r)] * k
        given += stack.grads
        for name, x in (("e", e), ("right", R), ("out", product.mT)):
            columns[name] += address_in_turn(NAMES.get(name, "a factor"), x, [x[0].numel()] * k)
        columns["mark"] += address_in_turn("marks", marks[stack.indices.start :], [1] * k)
    rows, widths, ranks = (list(x) for x in zip(*sizes, strict=True))
    lengths = [n * m for n, m, _ in sizes]
    table = PRODUCT.table(
        len(sizes),
        height=rows,
        width=widths,
        r=ranks,
        g=Memory(as_float32(given), lengths),
        **columns,
    )
    room = max(max(n, m) * (r + LANES) for n, m, r in sizes)
    scratch = per_thread_scratch(ops, out[0], room)
    library = ops.library
    run_over_rows(
        lengths,
        lambda a, b, thread: library.project(
            table, a, b, float(not transposed), scratch + 4 * room * thread
        ),
    )
    if header is not None:
        in_stacks = {i for stack in stacks for i in stack.indices}
        others = [None if i in in_stacks else g for i, g in enumerate(bucket.grads())]
        header.header.copy_(marks.add_(gradient_marks(others, marks)))


def update_separate(
    bucket: Bucket,
    ops: NativeUpdates,
    mean: Payload,
    reducer: FactoredAverages,
    update: Any,
    have_gradients: list[bool],
    factor: float,
) -> None:
    """Do lines 4 and 5 and AdamW's step of all tensors with a gradient on any rank."""
    indices = [i for i, has_gradient in enumerate(have_gradients) if has_gradient]
    parts = averages_in_float32(mean)
    dense = {*reducer.list_dense(indices)}
    for residuals in Residuals(bucket).open_parts([i for i in indices if i not in dense]):
        _update_factored(bucket, ops, mean, reducer, residuals, factor)
    _update_dense(bucket, ops, mean, reducer, parts, indices, factor)


def _update_factored(
    bucket: Bucket,
    ops: NativeUpdates,
    mean: Payload,
    reducer: FactoredAverages,
    residuals: Opened,
    factor: float,
) -> None:
    stacks, wanted = reducer.list_factored(mean), {*residuals.indices}
    numbers = [i for stack in stacks for i in stack.indices if i in wanted]
    if not numbers:
        return
    places = residual_addresses(bucket, residuals)
    group, grads, weights = bucket.group, bucket.grads(), bucket.weights
    lengths = [bucket.lengths[i] for i in numbers]
    columns: dict[str, list[int]] = {
        name: [] for name in ("height", "width", "r", "R", "p", "sent")
    }
    memory: list[Tensor] = []  # alive until the pass has read it
    for stack in stacks:
        r, k = stack.R.shape[-1], len(stack.indices)
        parts = stack.R.contiguous(), stack.p.float(), stack.sent.float()
        memory += parts
        sizes = dict(height=[stack.rows] * k, width=[stack.columns] * k, r=[r] * k)
        for name, x in zip(("R", "p", "sent"), parts, strict=True):
            sizes[name] = address_in_turn("a factor", x, [x[0].numel()] * k)
        at = [n for n, i in enumerate(stack.indices) if i in wanted]
        for name, of_all in sizes.items():
            columns[name] += [of_all[n] for n in at]
    table = FACTORED.table(
        len(numbers),
        **columns,
        g=Memory(as_float32([grads[i] for i in numbers]), lengths),
        w=Memory([weights[i] for i in numbers], lengths),
        e=[places[i] for i in numbers],
        **_state_columns(bucket, numbers, m="exp_avg", v="exp_avg_sq"),
    )
    share = reducer.error_share(factor)
    (beta1, beta2), sign = group["betas"], -1.0 if group["maximize"] else 1.0
    hyper = float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], sign
    options = Options(*hyper, factor, share, share)
    # a thread's memory: two narrow matrices, rounded up to whole steps
    room = max(2 * r * (n + LANES) for r, n in zip(columns["r"], columns["width"], strict=True))
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
    mean: Payload,
    reducer: FactoredAverages,
    parts: Sequence[Tensor],
    indices: Sequence[int],
    factor: float,
) -> None:
    numbers = reducer.list_dense(indices)
    if not numbers:
        return
    weights = bucket.weights
    lengths = [bucket.lengths[i] for i in numbers]
    averages = [parts[i] if factor == 1 else parts[i].mul_(factor) for i in numbers]
    table = ADAMW.table(
        len(numbers),
        n=lengths,
        w=Memory([weights[i] for i in numbers], lengths),
        **_state_columns(bucket, numbers, m="exp_avg", v="exp_avg_sq"),
        mean=Memory(averages, lengths),
        k=lengths,
    )
    options = adamw_options(bucket.group)
    run_over_rows(lengths, lambda a, b, _: ops.library.adamw(table, a, b, options))
    reducer.feed_back_dense(numbers, mean, factor)
