"""Updates by Triton kernels: of all buckets in one launch for each group of options and dtypes.
SCAPE selects and makes its messages by a launch for all tensors of a bucket.

The arguments of a bucket in a batch are a named tuple with the parameters of the reference.

``triton_ops`` registers them as fused implementations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._engine.reducer import AllReduceReducer
from ..._state.bucket import Bucket
from ..._state.masks import (
    Mask,
    MaskPartition,
    SelectionRange,
    Tensors,
    bits_by_tensor,
    code_layout,
)
from ..._state.residuals import Residuals
from ..._wire.payload import Payload
from ...scape.momenta import keep_absent_momenta, resize_momenta
from .tables import (
    KernelOps,
    Key,
    addresses,
    block_offsets,
    block_offsets_of_all,
    blocks_of,
    blocks_of_all,
    bucket_key,
    contiguous_weights,
    copy_back,
    flatten,
    gradients_key,
    make_key,
    mask_key,
    payload_key,
    published_parameter,
)

Row = Any  # kernels.AdamWRow or kernels.ScapeRow
Calls = list[tuple[Any, ...]]  # the arguments of each bucket


class LaunchGroup:
    """Buckets with the same options, dtypes and device, which one launch updates."""

    def __init__(self, ops: KernelOps, calls: Sequence[Any]):
        self.ops, self.calls = ops, calls
        self.buckets: list[Bucket] = [call.bucket for call in calls]
        self.group = self.buckets[0].group
        self.blocks = blocks_of_all(self.buckets)
        self.have_gradients = [call.mean.have_gradients for call in calls]

    def launch(
        self,
        use: str,
        kernel: Callable[..., None],
        make_table: Callable[[kernels.Blocks, list[Row]], kernels.Table],
        make_rows: Callable[[], list[Row]],
        keys: Iterable[Key],
        *offsets: Tensor,
        **options: float | bool,
    ) -> None:
        """Count the steps, and launch the kernel on a table of the rows of all buckets.

        The table of the step before serves again if all that it holds is in the same place: a
        bucket's state, parameters and average, and what its key tells.
        """
        rows: list[Row] = []  # copies in them have to live until the kernel was launched

        def table() -> kernels.Table:
            rows.extend(make_rows())
            return make_table(self.blocks, rows)

        parts = zip(self.calls, self.have_gradients, keys, strict=True)
        key = make_key(
            *(
                make_key(bucket_key(call.bucket), payload_key(call.mean), tuple(flags), key)
                for call, flags, key in parts
            )
        )
        cached = self.ops.tables((use, self.buckets[0].index), key, table)
        self.count_steps()
        hyper = {name: self.group[name] for name in ("betas", "eps", "weight_decay")}
        hyper["lr"] = float(self.group["lr"])
        kernel(self.blocks, *offsets, cached, **hyper, **options)
        if key is None:
            tensors = [(bucket, i) for bucket in self.buckets for i in range(len(bucket.lengths))]
            for (bucket, i), row in zip(tensors, rows, strict=True):
                if row.update:
                    copy_back(bucket, i, row.w)

    def count_steps(self) -> None:
        """Count one step more of each tensor that any rank has a gradient of."""
        have_gradients = [has_gradient for bucket in self.have_gradients for has_gradient in bucket]
        counts = [bucket.step_counts for bucket in self.buckets]
        flat = [count for count in counts if count is not None]
        if len(flat) == len(counts) and all(have_gradients):
            torch._foreach_add_(flat, 1)
            return
        steps = [step for bucket in self.buckets for step in bucket.state["step"]]
        pairs = zip(steps, have_gradients, strict=True)
        if counted := [step for step, has_gradient in pairs if has_gradient]:
            torch._foreach_add_(counted, 1)


def launch_groups_of(ops: KernelOps, calls: Sequence[Any]) -> list[LaunchGroup]:
    """Group the buckets that one launch can update."""
    groups: dict[object, list[Any]] = {}
    for call in calls:
        bucket, sent = call.bucket, call.mean.flat.dtype
        key = id(bucket.group), bucket.dtype, bucket.grad_dtype, sent, bucket.device
        groups.setdefault(key, []).append(call)
    return [LaunchGroup(ops, group) for group in groups.values()]


# Averages that are sent on a mask, by AdamW and AdamS


class AverageCall(NamedTuple):
    bucket: Bucket
    reducer: AllReduceReducer

    @property
    def mean(self) -> Payload:
        return self.reducer.mean


def rows_of_all(
    rows_of: Callable[[AllReduceReducer], Iterable[Row]], reducers: list[AllReduceReducer]
) -> list[Row]:
    """Return the rows of all reducers."""
    return [row for reducer in reducers for row in rows_of(reducer)]


def step_adamw(ops: KernelOps, calls: Calls) -> list[None]:
    """Do ``_engine.reducer.step_adamw`` for all tensors; called by ``run_batched_requests`` for
    Radius.
    """
    for batch in launch_groups_of(ops, [AverageCall(*call) for call in calls]):
        reducers: list[AllReduceReducer] = [call.reducer for call in batch.calls]
        masks = [reducer.mask for reducer in reducers]
        keys = [
            make_key(r.changes_residual, mask_key(r.bucket, r.mask), gradients_key(r.grads))
            for r in reducers
        ]
        batch.launch(
            "adamw",
            kernels.adamw,
            kernels.adamw_table,
            functools.partial(rows_of_all, adamw_rows, reducers),
            keys,
            block_offsets_of_all(ops.tables, batch.buckets, masks),
            maximize=batch.group["maximize"],
        )
        for reducer in reducers:
            reducer.note_residual(reducer.mean.have_gradients)
    return [None] * len(calls)


def adamw_rows(reducer: AllReduceReducer) -> Iterator[kernels.AdamWRow]:
    bucket, mean, grads = reducer.bucket, reducer.mean, flatten(reducer.grads)
    m, v, steps = (bucket.state[name] for name in ("exp_avg", "exp_avg_sq", "step"))
    rounding_errors: Tensors = [*mean.rounding_error_parts] or [None] * len(grads)
    residuals = Residuals(bucket).stored if reducer.changes_residual else [None] * len(grads)
    for i, weight in enumerate(contiguous_weights(bucket)):
        tensors = reducer.mask.bits[i], mean.parts[i], weight, m[i], v[i], steps[i]
        yield kernels.AdamWRow(
            bucket.lengths[i],
            *tensors,
            update=int(mean.have_gradients[i]),
            residual=residuals[i],
            grad=grads[i],
            public=published_parameter(bucket, i),
            rounding_errors=rounding_errors[i],
        )


def step_adams(ops: KernelOps, calls: Calls) -> list[None]:
    """Do ``_engine.reducer.step_adams`` for all tensors; called by ``run_batched_requests`` for
    AdamS.
    """
    for batch in launch_groups_of(ops, [AverageCall(*call) for call in calls]):
        reducers: list[AllReduceReducer] = [call.reducer for call in batch.calls]
        batch.launch(
            "adams",
            kernels.scape,
            kernels.scape_table,
            functools.partial(rows_of_all, adams_rows, reducers),
            [()] * len(reducers),
            *[batch.blocks.firsts] * 2,
        )
        for reducer in reducers:
            reducer.keep_unsent(reducer.mean.have_gradients)
    return [None] * len(calls)


def adams_rows(reducer: AllReduceReducer) -> Iterator[kernels.ScapeRow]:
    bucket, mean = reducer.bucket, reducer.mean
    momenta, steps = bucket.state["exp_avg"], bucket.state["step"]
    for i, (m, weight) in enumerate(zip(momenta, contiguous_weights(bucket), strict=True)):
        yield kernels.ScapeRow(
            bucket.lengths[i],
            old=m,
            values=mean.parts[i],
            w=weight,
            m=m,
            step=steps[i],
            update=int(mean.have_gradients[i]),
            public=published_parameter(bucket, i),
        )


# SCAPE: its selection and its messages, and the step


class TritonSelection:
    """``scape.scape_masks.Selection`` by kernels.

    It selects exactly k of every slice, so that all sizes are known.
    """

    def __init__(self, bucket: Bucket, ops: KernelOps, partition: MaskPartition, rank: int):
        self.bucket, self.ops, self.partition = bucket, ops, partition
        self.own_range: SelectionRange = partition.by_rank[rank]
        self.bits = torch.empty(self.own_range.nbytes, dtype=torch.uint8, device=bucket.device)

    def select(self, grads: Tensors, momenta: list[Tensor]) -> None:
        """Select the largest of line 10's x, by gradients and the momenta before this step."""
        bucket, slices, tables = self.bucket, self.own_range.slices, self.ops.tables
        if not slices:
            return
        # from the first tensor that this rank selects of to the last
        tensors = slice(slices[0].tensor, slices[-1].tensor + 1)
        group, device, momentum_mask = bucket.group, bucket.device, bucket.cache["momentum_mask"]
        sizes = [piece.stop - piece.start for piece in slices]
        flat = torch.empty(sum(sizes), dtype=bucket.compute_dtype, device=device)
        blocks = kernels.make_blocks(tuple(bucket.lengths[tensors]), device)
        copies: list[Tensor | None] = []  # alive until kernels have been launched

        def make_tables() -> tuple[kernels.Table, kernels.Table]:
            copies.extend(flatten(grads[tensors]))
            xs = flat.split(sizes)
            rows = self._moment_rows(tensors.start, copies, momenta, xs)
            top_k_rows = [
                kernels.TopKRow(len(x), piece.k, x, self.bits[piece.first_bit // 8 :])
                for x, piece in zip(xs, slices, strict=True)
            ]
            return kernels.moment_table(blocks, rows), kernels.top_k_table(top_k_rows)

        key = make_key(
            (bucket, bucket.storage_version, self.own_range),
            (flat.data_ptr(), self.bits.data_ptr()),
            addresses(momenta),
            gradients_key(grads[tensors]),
            mask_key(bucket, momentum_mask),
        )
        moment, top_k = tables(("selection", bucket.index), key, make_tables)
        first_block = sum(blocks_of(bucket).per_tensor[: tensors.start])
        offsets = block_offsets(tables, bucket, momentum_mask)[first_block:]
        kernels.moment(blocks, offsets, moment, betas=group["betas"], maximize=group["maximize"])
        kernels.top_k(kernels.make_blocks(tuple(sizes), device), top_k)

    def _moment_rows(
        self, first: int, grads: Tensors, momenta: list[Tensor], xs: Sequence[Tensor]
    ) -> list[kernels.ScapeRow]:
        """Return the rows of tensors from the ``first`` on; ``xs``: where x goes, of each slice."""
        bucket, slices = self.bucket, {piece.tensor: piece for piece in self.own_range.slices}
        residuals, x_of = Residuals(bucket).stored, dict(zip(slices, xs, strict=True))
        rows = []
        for i, grad in enumerate(grads, first):
            piece = slices.get(i)
            rows.append(
                kernels.ScapeRow(
                    bucket.lengths[i],
                    held=bucket.cache["momentum_mask"].bits[i],
                    old=momenta[i],
                    residual=residuals[i],
                    grad=grad,
                    x=x_of.get(i),
                    begin=piece.start if piece else 0,
                    end=piece.stop if piece else 0,
                )
            )
        return rows

    def encode(self) -> Tensor:
        """Return this rank's message."""
        size, device = self.partition.message_bytes, self.bucket.device
        if not self.partition.is_elias_fano:
            return torch.nn.functional.pad(self.bits, (0, size - len(self.bits)))
        words = _zero_words(size, device)
        n = 8 * len(self.bits)

        def make_table() -> kernels.Table:
            row = kernels.EncodeRow(n, self.bits, 0, *code_layout(self.own_range))
            return kernels.encode_table([row], device)

        key = self.own_range, self.bits.data_ptr()
        table = self.ops.tables(("encode", self.bucket.index), key, make_table)
        kernels.encode_masks(kernels.make_blocks((n,), device), table, words)
        return words.view(torch.uint8)[:size]

    def assemble(self, messages: Tensor) -> Mask:
        """Return the mask that all ranks have selected, for the next step; called after the commit,
        when their messages have been gathered.
        """
        bucket, by_rank = self.bucket, self.partition.by_rank
        rows = [*zip(messages, by_rank, strict=True)]
        if self.partition.is_elias_fano:
            flat = self._decode(messages)
        else:
            flat = torch.cat([message[: byte_range.nbytes] for message, byte_range in rows])
        pairs = zip(self.partition.sizes, bucket.lengths, strict=True)
        sizes = [k or n for k, n in pairs]  # all of a tensor that is not compressed
        return Mask(bucket, bits=bits_by_tensor(bucket, flat), sizes=sizes)

    def _decode(self, messages: Tensor) -> Tensor:
        """Return the bits of all ranks' codes."""
        bucket, by_rank = self.bucket, self.partition.by_rank
        words = _zero_words(by_rank[-1].last_byte, bucket.device)
        layouts = [code_layout(byte_range) for byte_range in by_rank]

        def make_table() -> kernels.Table:
            rows = [
                kernels.DecodeRow(upper, message, 8 * byte_range.first_byte, row_bits, low)
                for byte_range, message, (upper, row_bits, low) in zip(
                    by_rank, messages, layouts, strict=True
                )
            ]
            return kernels.decode_table(rows, bucket.device)

        key = self.partition, messages.data_ptr(), messages.stride()
        table = self.ops.tables(("decode", bucket.index), key, make_table)
        blocks = kernels.make_blocks(tuple(upper for upper, *_ in layouts), bucket.device)
        kernels.decode_masks(blocks, table, words)
        return words.view(torch.uint8)[: by_rank[-1].last_byte]


def _zero_words(nbytes: int, device: torch.device) -> Tensor:
    """Return zeros for this many bytes, as words, which kernels set bits of."""
    return torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=device)


class ScapeCall(NamedTuple):
    bucket: Bucket
    mean: Payload


def step_scape(
    bucket: Bucket,
    ops: KernelOps,
    mean: Payload,
    mask: Mask,
    clip_factor_in_v: float,
    partition: MaskPartition | None,
    rank: int,
) -> TritonSelection | None:
    """Do ``scape.step_scape`` for all tensors; called by ``Ops.run`` for SCAPE."""
    old, grads = resize_momenta(bucket, mean, mask), bucket.grads()
    selection = TritonSelection(bucket, ops, partition, rank) if partition else None
    if selection:
        selection.select(grads, old)
    masks = mask, bucket.cache["momentum_mask"]
    key = make_key(addresses(old), gradients_key(grads), *(mask_key(bucket, m) for m in masks))
    LaunchGroup(ops, [ScapeCall(bucket, mean)]).launch(
        "scape",
        kernels.scape,
        kernels.scape_table,
        lambda: [*scape_rows(bucket, mean, mask, old, grads)],
        [key],
        *(block_offsets(ops.tables, bucket, m) for m in masks),
        clip=clip_factor_in_v,
        maximize=bucket.group["maximize"],
    )
    keep_absent_momenta(old, bucket.state["exp_avg"], mean.have_gradients)
    return selection


def scape_rows(
    bucket: Bucket, mean: Payload, mask: Mask, old: list[Tensor], grads: Tensors
) -> Iterator[kernels.ScapeRow]:
    state, residuals = bucket.state, Residuals(bucket).stored
    grads, held = flatten(grads), bucket.cache["momentum_mask"].bits
    rounding_errors: Tensors = [*mean.rounding_error_parts] or [None] * len(grads)
    for i, weight in enumerate(contiguous_weights(bucket)):
        yield kernels.ScapeRow(
            bucket.lengths[i],
            bits=mask.bits[i],
            held=held[i],
            old=old[i],
            values=mean.parts[i],
            w=weight,
            m=state["exp_avg"][i],
            step=state["step"][i],
            update=int(mean.have_gradients[i]),
            residual=residuals[i],
            grad=grads[i],
            public=published_parameter(bucket, i),
            rounding_errors=rounding_errors[i],
        )
