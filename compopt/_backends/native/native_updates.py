"""Commits of whole buckets by C passes: Radius (kernels/native/adamw.c), SCAPE and AdamS
(kernels/native/scape.c).

``native_ops`` registers these as fused implementations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._engine.reducer import AllReduceReducer
from ..._ops.operations import Group
from ..._state.bucket import Bucket
from ..._state.masks import Mask, MaskPartition
from ..._state.residuals import Opened, Residuals
from ..._wire.payload import Payload
from ...scape.momenta import gradient_weight, keep_absent_momenta, resize_momenta
from .library import (
    ADAMW,
    SCAPE,
    Column,
    LibraryOps,
    Memory,
    Options,
    Table,
    address,
    address_in_turn,
    as_float32,
    mask_sizes,
    run_pass,
    sizes_of,
)
from .native_selection import NativeSelection


def average_columns(
    bucket: Bucket, indices: list[int], values: list[Tensor], positions: Tensor | None
) -> dict[str, Column]:
    """Return where a pass finds what this rank owns of these tensors' averages (see
    ``Ops.expand_average``).
    """
    parts, sizes = bucket.shards.own_parts_of_mask, [bucket.shards.own_sizes[i] for i in indices]
    if positions is None:
        return {"mean": Memory([values[i] for i in indices], sizes)}
    bounds, places = bucket.shards.bounds_in_own_mask(positions), positions.int()
    dense, owned = iter(values[:-1]), list[tuple[Tensor, Tensor | None]]()
    for part, (first, end) in zip(parts, bounds, strict=True):
        pair = values[-1][first:end], places[first:end]
        owned.append((next(dense), None) if part is None else pair)
    means, index = ([owned[i][n] for i in indices] for n in (0, 1))
    counts, kept = sizes_of(means), [parts[i] for i in indices]
    firsts = [0 if part is None else part[0] for part in kept]
    mean, at = Memory(means, counts), Memory(index, counts)
    return {"mean": mean, "index": at, "base": firsts, "k": counts}


def adamw_numbers(group: Group) -> tuple[float, ...]:
    """Return the options of AdamW in their order in C."""
    (beta1, beta2), sign = group["betas"], -1.0 if group["maximize"] else 1.0
    return float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], sign


def adams_options(group: Group, clip: float) -> Options:
    beta1, beta2 = group["betas"]
    lr, alpha = float(group["lr"]), gradient_weight(group)
    return Options(lr, beta1, beta2, group["eps"], group["weight_decay"], clip, alpha)


def step_adamw(bucket: Bucket, ops: LibraryOps, reducer: AllReduceReducer) -> None:
    """Do ``_engine.reducer.step_adamw`` for all tensors; called by ``Ops.run`` for Radius."""
    mean, mask, lengths = reducer.mean, reducer.mask, bucket.lengths
    have_gradients = mean.have_gradients
    errors, hyper = mean.rounding_errors, Options(*adamw_numbers(bucket.group))
    with Residuals(bucket).open(None if reducer.changes_residual else ()) as residuals:
        table = Table(
            len(lengths),
            ADAMW,
            n=lengths,
            w=Memory(bucket.weights, lengths),
            m=state_addresses(bucket, "exp_avg"),
            v=state_addresses(bucket, "exp_avg_sq"),
            step=step_memory(bucket, have_gradients),
            mean=Memory(averages_in_float32(mean), mask.sizes),
            mask=Memory(mask.bits, mask_sizes(lengths)) if mask.is_sparse else 0,
            k=mask.sizes,
            residual=residual_addresses(bucket, residuals),
            g=Memory(as_float32(reducer.grads), lengths),
            errors=0 if errors is None else address_in_turn("rounding errors", errors, mask.sizes),
        )
        bad_row = run_pass(ops.library.adamw, table, lengths, hyper)
    raise_bad_row(bucket, bad_row)
    reducer.note_residual(have_gradients)


def step_scape(
    bucket: Bucket,
    ops: LibraryOps,
    mean: Payload,
    mask: Mask,
    clip_factor_in_v: float,
    partition: MaskPartition | None,
    rank: int,
) -> NativeSelection | None:
    """Do ``scape.step_scape`` for all tensors; called by ``Ops.run`` for SCAPE."""
    lengths, have_gradients = bucket.lengths, mean.have_gradients
    momentum_mask = bucket.cache["momentum_mask"]
    selection = NativeSelection(bucket, ops, partition, rank) if partition else None
    old = resize_momenta(bucket, mean, mask)
    holding, k = sizes_of(momentum_mask.positions), sizes_of(mask.positions)
    rows = zip(momentum_mask.positions, holding, lengths, strict=True)
    columns: dict[str, Column] = {
        "g": Memory(as_float32(bucket.grads()), lengths),
        "held": Memory(momentum_mask.positions, holding),
        "holding": holding,
        "old": Memory(old, [n if index is None else size for index, size, n in rows]),
        "index": Memory(mask.positions, k),
        "k": k,
        **(selection.columns(have_gradients) if selection else {}),
    }
    room, longest = selection.room if selection else 0, max(k)
    with Residuals(bucket).open() as residuals:
        columns["e"] = residual_addresses(bucket, residuals)
        _run_scape(bucket, ops, mean, mask, columns, clip_factor_in_v, room, longest)
    keep_absent_momenta(old, bucket.state["exp_avg"], have_gradients)
    for i, has_gradient in enumerate(have_gradients):
        if not has_gradient and selection:
            selection.select_absent(i)
    _keep_rounding_errors(bucket, ops, mean, mask)
    return selection


def _keep_rounding_errors(bucket: Bucket, ops: LibraryOps, mean: Payload, mask: Mask) -> None:
    """Write the payload's rounding errors, times 1 - b1, to the residuals, which are 0 on the
    mask.
    """
    if mean.rounding_errors is None:
        return
    for i, has_gradient in enumerate(mean.have_gradients):
        if has_gradient and bucket.compressed[i]:
            errors = mean.rounding_error_parts[i].mul_(1 - bucket.group["betas"][0])
            with Residuals(bucket).open([i]) as opened:
                ops.write_at(opened.tensors, [mask.positions[i]], [errors])


def step_adams(bucket: Bucket, ops: LibraryOps, reducer: AllReduceReducer) -> None:
    """Do ``_engine.reducer.step_adams`` for all tensors; called by ``Ops.run`` for AdamS."""
    _run_scape(bucket, ops, reducer.mean, reducer.mask, {"old": state_addresses(bucket, "exp_avg")})
    reducer.keep_unsent(reducer.mean.have_gradients)


def _run_scape(
    bucket: Bucket,
    ops: LibraryOps,
    mean: Payload,
    mask: Mask,
    columns: dict[str, Column],
    clip_factor_in_v: float = 1.0,
    room: int = 0,
    longest: int = 0,
) -> None:
    """Run the pass over all tensors; ``columns``: those that differ between algorithms.

    A thread has memory for ``room`` candidates, and for the ``longest`` list of exchanged elements.
    """
    state, lengths, have_gradients = bucket.state, bucket.lengths, mean.have_gradients
    rows = zip(lengths, mask.positions, state["exp_avg"], have_gradients, strict=True)
    sizes = [
        m.numel() if not has_gradient else n if index is None else index.numel()
        for n, index, m, has_gradient in rows
    ]
    averages = zip(averages_in_float32(mean), have_gradients, strict=True)
    table = Table(
        len(have_gradients),
        SCAPE,
        n=lengths,
        w=Memory(bucket.local_params, lengths),
        mean=Memory([values if has_gradient else None for values, has_gradient in averages], sizes),
        m=Memory(state["exp_avg"], sizes),
        step=step_memory(bucket, have_gradients),
        **columns,
    )
    own = ops.thread_memory(room, "candidates"), ops.thread_memory(longest)
    options = adams_options(bucket.group, clip_factor_in_v)
    raise_bad_row(bucket, run_pass(ops.library.scape, table, lengths, options, own=own))


def state_addresses(bucket: Bucket, name: str) -> list[int]:
    """Return the address of each tensor's state of this name; 0 for a tensor that has none."""
    views = bucket.state[name]
    sizes = [0 if view is None else n for view, n in zip(views, bucket.lengths, strict=True)]
    places = address_in_turn(name, bucket.flat[name], sizes)
    return [0 if view is None else place for view, place in zip(views, places, strict=True)]


def residual_addresses(bucket: Bucket, residuals: Opened) -> list[int]:
    """Return the addresses of opened residuals; 0 for the other tensors."""
    flat, places = residuals.flat, [0] * len(bucket.lengths)
    first = address("a residual", flat, flat.numel())
    begin = int(flat.storage_offset())
    for i, e in residuals.pairs:
        places[i] = first + 4 * (int(e.storage_offset()) - begin)
    return places


def step_memory(bucket: Bucket, have_gradients: list[bool]) -> Memory:
    """Return the step counts of tensors that take part in a step; 0 for others."""
    rows = zip(bucket.state["step"], have_gradients, strict=True)
    steps = [step if has_gradient else None for step, has_gradient in rows]
    return Memory(steps, [1] * len(steps))


def averages_in_float32(payload: Payload) -> Sequence[Tensor]:
    if payload.flat.dtype == torch.float32:
        return payload.parts
    return list(payload.body.float().split([len(part) for part in payload.parts]))


def raise_bad_row(bucket: Bucket, bad_row: int) -> None:
    """Raise RuntimeError if a pass found positions outside their tensor."""
    if bad_row >= 0:
        raise RuntimeError(
            f"positions or a mask of {bucket.names[bad_row]} do not fit its "
            f"{bucket.lengths[bad_row]} elements: the optimizer's state was changed from outside, "
            "or an earlier step was interrupted. Load a checkpoint."
        )
