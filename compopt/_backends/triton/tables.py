"""Tables for launches: rows of addresses for all tensors, kept for as long as these stay in place.

A table holds addresses, so it is cached beside its key: everything that the addresses follow from.
Where the key differs from that of the step before, the table is made again.

``triton_updates`` and ``triton_lowrank`` make such tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import compopt_kernels as kernels
import torch
from torch import Tensor

from ..._ops.operations import Ops
from ..._state.bucket import Bucket
from ..._state.masks import Mask, Tensors
from ..._state.tensors import to_local
from ..._wire.payload import Payload

# What addresses follow from; None: from more than is known, so that nothing is cached.
Key = tuple[object, ...] | None
Made = TypeVar("Made")


class TableCache:
    """The tables of one backend's launches, the last of each use."""

    def __init__(self) -> None:
        self._cached: dict[object, tuple[Key, Any]] = {}

    def __call__(self, use: object, key: Key, make: Callable[[], Made]) -> Made:
        """Return the cached value for this ``use``; make it again if the ``key`` has changed."""
        entry = self._cached.get(use)
        if key is not None and entry is not None and entry[0] == key:
            cached: Made = entry[1]
            return cached
        self._cached.pop(use, None)
        made = make()
        if key is not None:
            self._cached[use] = key, made
        return made


def triton_device() -> str:
    """Return the type of device that Triton compiles for here: "cuda" for NVIDIA's and AMD's, or
    "xpu". Raise what its driver raises where it cannot be built.
    """
    from triton.runtime import driver

    kind: str = driver.active.get_active_torch_device().type
    return kind


class KernelOps(Ops):
    """The device of the kernels, and the tables of their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu" if kernels.INTERPRETED else triton_device()
        self.tables = TableCache()
        # Raise now where no kernel can be built.
        kernels.pack_bits(torch.ones(8, dtype=torch.bool, device=self.device))


# Keys


def make_key(*parts: object) -> Key:
    """Return a key of these parts; None where one of them is None."""
    return None if any(part is None for part in parts) else parts


def addresses(tensors: Iterable[Tensor | None]) -> list[int] | None:
    """Return where each begins, -1 for None; None where one is not contiguous: a kernel then reads
    a copy.
    """
    places = []
    for t in tensors:
        if t is None:
            places.append(-1)
        elif t.is_contiguous():
            places.append(t.data_ptr())
        else:
            return None
    return places


def mask_key(bucket: Bucket, mask: Mask) -> Key:
    """Return what determines the addresses of a mask's bits."""
    name = state_name_of(bucket, mask)
    return make_key(addresses(mask.bits)) if name is None else (name, bucket.storage_version)


def state_name_of(bucket: Bucket, mask: Mask) -> str | None:
    """Return the name of the bucket's state that holds the bits of a mask, or None."""
    return next((name for name, bits in bucket.state.items() if mask.bits is bits), None)


def bucket_key(bucket: Bucket) -> Key:
    """Return what determines the addresses of a bucket's state and parameters."""
    return make_key(bucket, bucket.storage_version, addresses(bucket.local_params))


def gradients_key(grads: Sequence[Tensor | None]) -> Key:
    """Return the addresses of gradients, and their dtype."""
    dtype = next((str(g.dtype) for g in grads if g is not None), "none")
    return make_key(addresses(grads), dtype)


def payload_key(payload: Payload) -> Key:
    """Return the address of a payload, and what its layout follows from."""
    flat, rounding_errors = payload.flat, payload.rounding_errors
    errors_address = -1 if rounding_errors is None else rounding_errors.data_ptr()
    return flat.data_ptr(), flat.dtype, errors_address, tuple(payload.lengths)


# Blocks, and how many elements are selected before each


def blocks_of(bucket: Bucket) -> kernels.Blocks:
    return kernels.make_blocks(tuple(bucket.lengths), bucket.device)


def blocks_of_all(buckets: Sequence[Bucket]) -> kernels.Blocks:
    lengths = tuple(n for bucket in buckets for n in bucket.lengths)
    return kernels.make_blocks(lengths, buckets[0].device)


def block_offsets(tables: TableCache, bucket: Bucket, mask: Mask) -> Tensor:
    """Return for each block how many elements of its tensor are selected before it."""
    if mask.block_offsets is None:
        blocks = blocks_of(bucket)
        if not mask.is_sparse:
            mask.block_offsets = blocks.firsts
            return mask.block_offsets
        table = tables(
            ("block offsets", bucket.index, state_name_of(bucket, mask)),
            make_key(bucket, mask_key(bucket, mask)),
            lambda: kernels.block_offsets_table(blocks, mask.bits),
        )
        mask.block_offsets = kernels.block_offsets(blocks, table)
    return mask.block_offsets


def block_offsets_of_all(
    tables: TableCache, buckets: Sequence[Bucket], masks: Sequence[Mask]
) -> Tensor:
    """Return the ``block_offsets`` of all these buckets, one after the other."""
    if not any(mask.is_sparse for mask in masks):
        firsts: Tensor = blocks_of_all(buckets).firsts
        return firsts
    offsets = [block_offsets(tables, *pair) for pair in zip(buckets, masks, strict=True)]
    return offsets[0] if len(offsets) == 1 else torch.cat(offsets)


# Tensors for rows, and what is done after a launch


def flatten(tensors: Tensors) -> Tensors:
    """Return the tensors as contiguous vectors, which kernels read; others are copied."""
    return [None if t is None else t.contiguous().view(-1) for t in tensors]


def contiguous_weights(bucket: Bucket) -> list[Tensor]:
    return [w.contiguous() for w in bucket.weights]


def published_parameter(bucket: Bucket, i: int) -> Tensor | None:
    """Return the parameter to which the kernel writes the updated master; None where there is no
    master, or ``copy_back`` writes it.
    """
    p = to_local(bucket.params[i].detach())
    return p if "master" in bucket.state and p.is_contiguous() else None


def copy_back(bucket: Bucket, i: int, weight: Tensor) -> None:
    """Copy a contiguous copy of weight i to where it came from, and its master to the parameter,
    where the kernel could not.
    """
    if weight.data_ptr() != bucket.weight(i).data_ptr():
        bucket.weight(i).copy_(weight)
    if published_parameter(bucket, i) is None:
        bucket.publish_master(i)
