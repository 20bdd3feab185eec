"""What kernels are given: rows of tensors that walk over memory, and what comes back from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._state.buckets import Bucket, local
from ..._state.masks import Mask, Tensors
from ..._wire.requests import Together
from ..commits import count_steps
from ..makers import triton_device
from ..ops import Ops
from .places import Tables, bits_places, known, state_of


class KernelOps(Ops):
    """What functions that launch kernels need: a device, and the tables that kernels are given."""

    def __init__(self, devices: set[str] | frozenset[str] = frozenset()) -> None:
        super().__init__(devices)
        self.device = "cpu" if kernels.INTERPRETED else triton_device()
        self.tables = Tables()
        # Where none can be built, raise now.
        kernels.pack_bits(torch.ones(8, dtype=torch.bool, device=self.device))

    def positions(self, bits: Tensor, n: int, size: int | None = None) -> Tensor:
        """As the reference; where ``size`` is not known this waits for the device."""
        if bits.device.type != self.device:
            return super().positions(bits, n, size)
        blocks = kernels.cut((n,), bits.device)
        size = int(kernels.unpack_bits(bits, n).sum()) if size is None else size
        found: list[Tensor] = kernels.positions(
            blocks, [bits], kernels.count(blocks, [bits]), [size]
        )
        return found[0]

    def largest(self, xs: Iterable[Tensor], ks: Iterable[int]) -> list[Tensor]:
        """For each tensor the packed mask of its k elements of largest magnitude."""
        rows = [
            kernels.TopKRow(
                x.numel(),
                k,
                x,
                torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device),
            )
            for x, k in zip(xs, ks, strict=True)
        ]
        if rows:
            kernels.top_k(kernels.cut(tuple(row.n for row in rows), rows[0].x.device), rows)
        return [row.bits for row in rows]


def blocks_of(bucket: Bucket) -> kernels.Blocks:
    return kernels.cut(tuple(bucket.lengths), bucket.device)


def starts_of(bucket: Bucket, mask: Mask) -> Tensor:
    """For each block: how many elements of its tensor are selected before it."""
    if mask.starts is None:
        blocks = blocks_of(bucket)
        mask.starts = kernels.count(blocks, mask.bits) if mask.sparse else blocks.firsts
    return mask.starts


def starts_of_all(buckets: Sequence[Bucket], masks: Sequence[Mask]) -> Tensor:
    """``starts_of`` all these buckets."""
    if not any(mask.sparse for mask in masks):
        firsts: Tensor = blocks_of_all(buckets).firsts
        return firsts
    found = masks[0].together
    if found is not None and all(
        mask.together is not None
        and mask.together[0] is found[0]
        and mask.together[1:] == (n, len(masks))
        for n, mask in enumerate(masks)
    ):
        return found[0]
    starts = [starts_of(*pair) for pair in zip(buckets, masks, strict=True)]
    return starts[0] if len(starts) == 1 else torch.cat(starts)


def note_starts(tables: Tables, buckets: Sequence[Bucket], masks: Sequence[Mask]) -> None:
    """Find ``starts_of`` several masks together."""
    blocks = blocks_of_all(buckets)
    pairs = [*zip(buckets, masks, strict=True)]
    table = tables(
        ("count", buckets[0].index, state_of(*pairs[0])),
        known(*(known(bucket, bits_places(bucket, mask)) for bucket, mask in pairs)),
        lambda: kernels.count_table(blocks, [bits for mask in masks for bits in mask.bits]),
    )
    starts = kernels.count(blocks, table)
    counts = [blocks_of(bucket).count for bucket in buckets]
    for n, (mask, own) in enumerate(zip(masks, starts.split(counts), strict=True)):
        mask.starts, mask.together = own, (starts, n, len(masks))


def flattened(tensors: Tensors) -> Tensors:
    """A kernel walks over memory: what is laid out otherwise is copied."""
    return [None if t is None else t.reshape(-1) for t in tensors]


def contiguous_weights(bucket: Bucket) -> list[Tensor]:
    return [w.contiguous() for w in bucket.weights]


def published(bucket: Bucket, i: int) -> Tensor | None:
    """The parameter that the kernel brings the updated master to; None where there is no master, or
    a copy is due.
    """
    p = local(bucket.params[i].detach())
    return p if "master" in bucket.state and p.is_contiguous() else None


def bring_back(bucket: Bucket, weights: list[Tensor], present: Sequence[bool]) -> None:
    """Copies of weights to where they came from, and masters to parameters, where the kernel could
    not. What the kernel has left as it was is written as it was.
    """
    for i, (ours, theirs) in enumerate(zip(weights, bucket.weights, strict=True)):
        if present[i] and ours.data_ptr() != theirs.data_ptr():
            theirs.copy_(ours)
        if present[i] and published(bucket, i) is None:
            bucket.publish(i)


def alike(asked: list[Together]) -> list[list[Together]]:
    """Buckets that one launch takes: of one group's options, of the same dtypes, on one device."""
    groups: dict[object, list[Together]] = {}
    for one in asked:
        bucket, mean = one.bucket, one.args[0]
        key = id(bucket.group), bucket.dtype, bucket.grad_dtype, mean.flat.dtype, bucket.device
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def blocks_of_all(buckets: Sequence[Bucket]) -> kernels.Blocks:
    """Of all tensors of these buckets."""
    lengths = tuple(n for bucket in buckets for n in bucket.lengths)
    return kernels.cut(lengths, buckets[0].device)


def count_all_steps(asked: list[Together]) -> None:
    """Count one step more of each tensor that any rank has a gradient of."""
    present = [is_present for one in asked for is_present in one.bucket.present(one.args[0])]
    counts = [one.bucket.counts for one in asked]
    flat = [count for count in counts if count is not None]
    if len(flat) == len(asked) and all(present):
        torch._foreach_add_(flat, 1)
        return
    count_steps([step for one in asked for step in one.bucket.state["step"]], present)
