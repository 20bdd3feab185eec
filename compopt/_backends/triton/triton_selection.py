"""SCAPE's selection and its messages by Triton kernels, a launch for all tensors of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import compopt_kernels as kernels
import torch
from torch import Tensor

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
from .tables import (
    KernelOps,
    addresses,
    block_offsets,
    blocks_of,
    flatten,
    gradients_key,
    make_key,
    mask_key,
)


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
