"""SCAPE's selection and masks by Triton kernels: of one bucket, or of all in the same launches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import (
    Mask,
    MaskPartition,
    SelectionRange,
    Tensors,
    bits_by_tensor,
    code_layout,
)
from ..._state.residuals import Residuals
from .tables import (
    KernelOps,
    Key,
    addresses,
    block_offsets_of_all,
    blocks_of,
    flatten,
    gradients_key,
    make_key,
    mask_key,
    state_name_of,
    store_block_offsets,
)

ROOM = 256 * 2**20  # bytes of line 10's x in memory at a time
ALIGNMENT = 16  # bytes: of messages and masks in the memory that they share


class TritonSelection:
    """The elements that this rank selects of one bucket in one step: exactly k of every slice, so
    that all sizes are known.

    The counterpart of ``scape_masks.Selection``, for all tensors of a bucket.
    """

    def __init__(self, bucket: Bucket, ops: KernelOps, partition: MaskPartition, rank: int):
        self.bucket, self.ops, self.partition = bucket, ops, partition
        self.own_range: SelectionRange = partition.by_rank[rank]
        self.bits = torch.empty(self.own_range.nbytes, dtype=torch.uint8, device=bucket.device)
        self.code = self.bits  # set by the selection where messages are codes
        # elements of each tensor selected by all ranks, computed once for this partition
        cached: tuple[MaskPartition, list[int]] | None = bucket.cache.get("selected")
        if cached is None or cached[0] is not partition:
            sizes = [0 if c else n for n, c in zip(bucket.lengths, bucket.compressed, strict=True)]
            for piece in (piece for byte_range in partition.by_rank for piece in byte_range.slices):
                sizes[piece.tensor] += piece.k
            bucket.cache["selected"] = cached = partition, sizes
        self.sizes = cached[1]

    def encode(self) -> Tensor:
        """Return this rank's message."""
        if self.partition.is_elias_fano:
            return self.code
        return torch.nn.functional.pad(
            self.bits, (0, self.partition.message_bytes - len(self.bits))
        )

    def assemble(self, messages: Tensor) -> Mask:
        """Return the mask that all ranks have selected."""
        (flat,) = assemble_bits([(self, messages)])
        mask = self.mask_over(bits_by_tensor(self.bucket, flat))
        store_block_offsets(self.ops.tables, [self.bucket], [mask])
        return mask

    def mask_over(self, bits: Sequence[Tensor | None]) -> Mask:
        """Return the mask that has these bits."""
        return Mask(self.bucket, bits=bits, sizes=self.sizes)


class SelectionInputs(NamedTuple):
    """A selection, and what it reads: gradients, and the momenta before this step."""

    selection: TritonSelection
    grads: Sequence[Tensor | None]
    old: list[Tensor]

    @property
    def tensors(self) -> slice:
        """Return the tensors from the first that this rank selects of to the last."""
        slices = self.selection.own_range.slices
        return slice(slices[0].tensor, slices[-1].tensor + 1)

    @property
    def key(self) -> Key:
        """Return what determines the addresses that the selection reads and writes."""
        selection, bucket = self.selection, self.selection.bucket
        return make_key(
            bucket,
            bucket.storage_version,
            selection.own_range,
            selection.bits.data_ptr(),
            addresses(self.old),
            gradients_key(self.grads[self.tensors]),
            mask_key(bucket, bucket.cache["momentum_mask"]),
        )


def select_all(inputs: Sequence[SelectionInputs]) -> None:
    """Select of buckets with the same options and dtypes, as many at a time as there is ``ROOM``
    for x, and encode the messages.
    """
    batch: list[SelectionInputs] = []
    used = 0
    for one in inputs:
        width = one.selection.bucket.compute_dtype.itemsize
        size = width * sum(piece.stop - piece.start for piece in one.selection.own_range.slices)
        if batch and used + size > ROOM:
            _select_batch(batch)
            batch, used = [], 0
        batch.append(one)
        used += size
    _select_batch(batch)
    _encode([one.selection for one in inputs if one.selection.partition.is_elias_fano])


def _select_batch(inputs: list[SelectionInputs]) -> None:
    inputs = [one for one in inputs if one.selection.own_range.slices]
    if not inputs:
        return
    ops, bucket = inputs[0].selection.ops, inputs[0].selection.bucket
    group, device, dtype = bucket.group, bucket.device, bucket.compute_dtype
    slices = [(one.selection.bits, p) for one in inputs for p in one.selection.own_range.slices]
    sizes = [piece.stop - piece.start for _, piece in slices]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    grads: list[Tensors] = []  # copies have to live until kernels have been launched
    # the blocks of the tensors that are selected of, and of those between them
    lengths = [n for one in inputs for n in one.selection.bucket.lengths[one.tensors]]
    blocks = kernels.make_blocks(tuple(lengths), device)

    def tables() -> tuple[kernels.Table, kernels.Table]:
        grads[:] = [flatten([*one.grads[one.tensors]]) for one in inputs]
        xs = flat.split(sizes)
        rows = _moment_rows(inputs, grads, xs)
        top_k_rows = [
            kernels.TopKRow(len(x), piece.k, x, bits[piece.first_bit // 8 :])
            for x, (bits, piece) in zip(xs, slices, strict=True)
        ]
        return kernels.moment_table(blocks, rows), kernels.top_k_table(top_k_rows)

    key = make_key(flat.data_ptr(), *(one.key for one in inputs))
    moment, top_k = ops.tables(("selection", bucket.index), key, tables)
    buckets = [one.selection.bucket for one in inputs]
    offsets = block_offsets_of_all(buckets, [bucket.cache["momentum_mask"] for bucket in buckets])
    kernels.moment(blocks, offsets, moment, betas=group["betas"], maximize=group["maximize"])
    kernels.top_k(kernels.make_blocks(tuple(sizes), device), top_k)


def _moment_rows(
    inputs: list[SelectionInputs], grads: list[Tensors], xs: Sequence[Tensor]
) -> list[kernels.ScapeRow]:
    """Return the rows of these tensors; ``xs``: where x goes, of each slice."""
    rows, remaining, ahead = [], iter(xs), 0
    for one, selected_grads in zip(inputs, grads, strict=True):
        bucket, slices = one.selection.bucket, {p.tensor: p for p in one.selection.own_range.slices}
        momentum_mask = bucket.cache["momentum_mask"]
        residual, old = Residuals(bucket).stored, one.old
        counts = blocks_of(bucket).per_tensor
        ahead += sum(counts[: one.tensors.start])
        for i, grad in enumerate(selected_grads, one.tensors.start):
            piece = slices.get(i)
            rows.append(
                kernels.ScapeRow(
                    bucket.lengths[i],
                    None,
                    momentum_mask.bits[i],
                    old[i],
                    residual=residual[i],
                    grad=grad,
                    x=next(remaining) if piece else None,
                    begin=piece.start if piece else 0,
                    end=piece.stop if piece else 0,
                    ahead=ahead,
                )
            )
        ahead += sum(counts[one.tensors.stop :])
    return rows


# Messages


def _encode(selections: list[TritonSelection]) -> None:
    """Encode the messages of selections whose messages are codes."""
    if not selections:
        return
    ops, bucket = selections[0].ops, selections[0].bucket
    sizes = [selection.partition.message_bytes for selection in selections]
    words, starts, codes = _allocate_aligned_zeros(sizes, bucket.device)

    def table() -> kernels.Table:
        rows = [
            kernels.EncodeRow(8 * len(one.bits), one.bits, 8 * start, *code_layout(one.own_range))
            for one, start in zip(selections, starts, strict=True)
        ]
        return kernels.encode_table(rows, bucket.device)

    key = tuple(
        (one.own_range, one.partition.message_bytes, one.bits.data_ptr()) for one in selections
    )
    rows = ops.tables(("encode", bucket.index), key, table)
    lengths = tuple(8 * len(one.bits) for one in selections)
    kernels.encode_masks(kernels.make_blocks(lengths, bucket.device), rows, words)
    for selection, code in zip(selections, codes, strict=True):
        selection.code = code


def assemble_bits(pairs: Sequence[tuple[TritonSelection, Tensor]]) -> list[Tensor]:
    """Return the bits of buckets on one device, from all ranks' messages for each."""
    sizes = [selection.partition.by_rank[-1].last_byte for selection, _ in pairs]
    bucket = pairs[0][0].bucket
    words, starts, flats = _allocate_aligned_zeros(sizes, bucket.device)
    elias_fano = []
    for (selection, messages), flat, start in zip(pairs, flats, starts, strict=True):
        if selection.partition.is_elias_fano:
            elias_fano.append((selection.partition, messages, 8 * start))
        else:
            rows = zip(messages, selection.partition.by_rank, strict=True)
            torch.cat([message[: byte_range.nbytes] for message, byte_range in rows], out=flat)
    if not elias_fano:
        return flats

    def table() -> tuple[kernels.Blocks, kernels.Table]:
        rows = []
        for partition, messages, first_bit in elias_fano:
            for message, byte_range in zip(messages, partition.by_rank, strict=True):
                upper, row_bits, low = code_layout(byte_range)
                first = first_bit + 8 * byte_range.first_byte
                rows.append(kernels.DecodeRow(upper, message, first, row_bits, low))
        blocks = kernels.make_blocks(tuple(row.upper for row in rows), bucket.device)
        return blocks, kernels.decode_table(rows, bucket.device)

    key = tuple(
        (partition, m.data_ptr(), m.stride(), first_bit) for partition, m, first_bit in elias_fano
    )
    kernels.decode_masks(*pairs[0][0].ops.tables(("decode", bucket.index), key, table), words)
    return flats


def _allocate_aligned_zeros(
    sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, list[int], list[Tensor]]:
    """Return zeros for messages or masks of these many bytes: the words of all, the first byte of
    each, and the bytes of each.
    """
    *starts, end = accumulate((n + -n % ALIGNMENT for n in sizes), initial=0)
    words = torch.zeros(end // 4, dtype=torch.int32, device=device)
    flat = words.view(torch.uint8)
    parts = [flat[start : start + n] for start, n in zip(starts, sizes, strict=True)]
    return words, starts, parts


# Masks of all buckets, a launch for each operation


def store_masks(ops: KernelOps, calls: list[tuple[Bucket, Mask, str]]) -> list[Mask]:
    """The counterpart of ``masks.store_mask``."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for bucket, mask, name in calls:
        source = state_name_of(bucket, mask)
        if source is not None:  # its bits follow each other as these do
            pairs.append((bucket.flat[name], bucket.flat[source]))
            continue
        rows = zip(bucket.state[name], mask.bits, strict=True)
        pairs += [(to, bits) for to, bits in rows if to is not None and bits is not None]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [bits for _, bits in pairs])
    return [mask.with_bits(bucket.state[name]) for bucket, mask, name in calls]


def clear_masks(ops: KernelOps, calls: list[tuple[Bucket, str]]) -> list[None]:
    """The counterpart of ``masks.clear_mask``."""
    torch._foreach_zero_([bucket.flat[name] for bucket, name in calls])
    return [None] * len(calls)


def store_next_masks(
    ops: KernelOps, calls: list[tuple[Bucket, TritonSelection, Tensor]]
) -> list[Mask]:
    """The counterpart of ``scape_masks.store_next_mask``."""
    if not all(isinstance(selection, TritonSelection) for _, selection, _ in calls):
        # selections of shards are the reference's
        sharded = [(bucket, one.assemble(messages), "next_mask") for bucket, one, messages in calls]
        return store_masks(ops, sharded)
    stored: dict[int, Mask] = {}
    for device in dict.fromkeys(bucket.device for bucket, _, _ in calls):
        group = [call for call in calls if call[0].device == device]
        buckets, selections, messages = zip(*group, strict=True)
        flats = assemble_bits([*zip(selections, messages, strict=True)])
        torch._foreach_copy_([bucket.flat["next_mask"] for bucket in buckets], flats)
        masks = [
            selection.mask_over(selection.bucket.state["next_mask"]) for selection in selections
        ]
        store_block_offsets(ops.tables, buckets, masks)
        stored |= zip(map(id, buckets), masks, strict=True)
    return [stored[id(bucket)] for bucket, _, _ in calls]
