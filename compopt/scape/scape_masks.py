"""SCAPE's masks: which rank selects which elements (line 15), and the masks a bucket keeps.

A bucket keeps two masks. Off the *momentum mask*, ``cache["momentum_mask"]``, its momentum is 0;
the bits are ``state["mask"]``. The *next* mask, ``cache["next_mask"]``, was selected in the last
step and is what the coming step sends; it is gathered after the commit, while the ranks train on.

``scape`` and ``sharded_scape`` ask it who selects, and gather by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .._engine.options import dense_start_of, ramp_of
from .._engine.stats import Stats
from .._ops.operations import Ops
from .._state.bits import make_bits, set_all_bits_, split_positions
from .._state.bucket import Bucket
from .._state.masks import (
    Mask,
    MaskPartition,
    Tensors,
    assemble_mask,
    bits_by_tensor,
    encode_mask,
    partition_mask,
    store_mask,
)
from .._wire.payload import Payload
from .._wire.requests import AllGather, RequestGenerator

# Who selects what


def density_at(bucket: Bucket, t: int) -> float:
    """Return the density of the mask that step t uses: 1 in the dense start, then falling."""
    group = bucket.group
    steps, ramp = t - dense_start_of(bucket) - 1, ramp_of(group)
    density: float = group["density"]
    if steps < 0:
        return 1.0
    return density if ramp == 0 else max(density, density ** (steps / ramp))


def mask_partition_at(bucket: Bucket, t: int, ranks: int) -> MaskPartition | None:
    """Return who selects what of the mask that step t uses; None where that is all ones, or nothing
    is compressed.
    """
    lengths, density = bucket.compressed_lengths, density_at(bucket, t)
    return partition_mask(lengths, ranks, density) if density < 1 and any(lengths) else None


def next_mask_partition(bucket: Bucket, ranks: int) -> MaskPartition | None:
    """Return who selects what of the next step's mask in the coming step."""
    return mask_partition_at(bucket, bucket.group["step"] + 2, ranks)


class Selection:
    """The elements that this rank selects of one bucket in one step, one tensor at a time."""

    def __init__(self, bucket: Bucket, ops: Ops, partition: MaskPartition, rank: int):
        self.bucket, self.ops, self.partition, self.rank = bucket, ops, partition, rank
        self.own_range = partition.by_rank[rank]
        self.slices = {piece.tensor: piece for piece in self.own_range.slices}
        # the selected positions of each tensor, counted from the start of its slice
        self.selected: dict[int, Tensor] = {}

    def select(self, i: int, x: Tensor) -> None:
        """Select the largest of ``x``, this rank's slice of tensor i."""
        self.selected[i] = self.ops.top_k_positions(x, self.slices[i].k)

    @cached_property
    def positions(self) -> Tensor:
        """The selected positions among the bits of this rank's range, int64."""
        device = self.bucket.device
        parts = [self.selected[i].long().add_(p.first_bit) for i, p in self.slices.items()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def encode(self) -> Tensor:
        """Return this rank's message."""
        bits = make_bits(self.positions, self.own_range.nbytes)
        return encode_mask(self.positions, bits, self.partition, self.rank)

    def assemble(self, messages: Tensor) -> Mask:
        """Return the mask that all ranks have selected."""
        bits, positions = assemble_mask(messages, self.partition, self.rank, self.positions)
        index = split_positions(positions, self.bucket.compressed_lengths)
        return Mask(self.bucket, bits=bits_by_tensor(self.bucket, bits), positions=index)


# The masks of a bucket, from step to step


def mask_to_send(bucket: Bucket) -> Mask:
    """Return the mask that was selected one step ago; all ones, where there is none."""
    selected = None if bucket.sends_nothing else bucket.cache.get("next_mask")
    return selected or Mask(bucket)


def exchange_masks(
    bucket: Bucket, mask: Mask, mean: Payload, selection: Selection | None
) -> RequestGenerator[None]:
    """Store this step's mask, on which momenta are now, and gather the selections of all ranks as
    the next step's mask (line 15). It runs after the commit.
    """
    _store_momentum_mask(bucket, mask, mean)
    # until the next mask has arrived the bucket has none
    bucket.cache.pop("next_mask", None)
    bucket.flat["next_mask"].zero_()
    if selection:
        messages = yield AllGather(selection.encode())  # awaited when the next step needs it
        bucket.cache["next_mask"] = store_mask(bucket, selection.assemble(messages), "next_mask")


def _store_momentum_mask(bucket: Bucket, mask: Mask, mean: Payload) -> None:
    """Note that the momenta of tensors with a gradient on any rank are on this mask now."""
    have_gradients, momentum_mask = mean.have_gradients, bucket.cache["momentum_mask"]
    if all(have_gradients) and mask.is_sparse:
        bucket.cache["momentum_mask"] = store_mask(bucket, mask, "mask")
        return
    state, positions = bucket.state["mask"], [*momentum_mask.positions]
    for i, bits in enumerate(mask.bits):
        if not have_gradients[i]:
            continue
        positions[i] = mask.positions[i]
        if bits is not None:
            state[i].copy_(bits)
        elif momentum_mask.positions[i] is not None:
            set_all_bits_(state[i], bucket.lengths[i])
    pairs = zip(positions, state, strict=True)
    bits_of_state = [None if index is None else bits for index, bits in pairs]
    bucket.cache["momentum_mask"] = Mask(bucket, bits=bits_of_state, positions=positions)


def restore_masks(bucket: Bucket) -> None:
    """Derive the bucket's cache from its state, which was loaded."""
    state = bucket.state
    bits: Tensors = [None] * len(bucket.params)
    for i, n in enumerate(bucket.compressed_lengths):
        if n and _has_dense_momentum(bucket, i):
            set_all_bits_(state["mask"][i], n)
        elif n:
            bits[i] = state["mask"][i]
    bucket.cache["momentum_mask"] = Mask(bucket, bits=bits)
    if bucket.flat["next_mask"].any():
        bucket.cache["next_mask"] = Mask(bucket, bits=state["next_mask"])


def _has_dense_momentum(bucket: Bucket, i: int) -> bool:
    if not bucket.is_sharded:
        return bucket.state["exp_avg"][i].numel() == bucket.lengths[i]
    return not bucket.state["mask"][i].any()


# Stats


@dataclass
class ScapeStats(Stats):
    """Adds what SCAPE did in the last step.

    ``density``: share of the compressed elements that was exchanged. ``payload_bytes`` and
    ``mask_bytes``: bytes this rank handed over of each. ``mask_overlap()``: share of the newest
    mask that was in the mask before it (Figure 6).
    """

    density: float = 1.0
    payload_bytes: int = 0
    mask_bytes: int = 0
    mask_overlap: Callable[[], float] = field(default=lambda: 0.0, repr=False)


def scape_stats(
    stats: Stats, buckets: Sequence[Bucket], applied: bool, ranks: int, overlap: Callable[[], float]
) -> ScapeStats:
    """Add SCAPE's own numbers to what all optimizers report of a step."""
    selected = total = mask_bytes = 0
    for bucket in buckets:
        sizes = bucket.cache["momentum_mask"].sizes
        for n, size in zip(bucket.compressed_lengths, sizes, strict=True):
            selected, total = selected + (size if n else 0), total + n
        partition = mask_partition_at(bucket, bucket.group["step"] + 1, ranks)
        if partition and applied:
            mask_bytes += partition.message_bytes
    return ScapeStats(
        **vars(stats),
        density=selected / max(1, total),
        mask_bytes=mask_bytes,
        payload_bytes=stats.bytes_sent - mask_bytes - stats.parameter_bytes,
        mask_overlap=overlap,
    )


def mask_size_in_values(bucket: Bucket, ranks: int) -> float:
    """Return the size of a rank's part of a mask, as bits or coded, in values of 4 bytes."""
    d: float = bucket.group["density"]
    bits = min(1.0, d * math.log2(math.e / d))
    return bits * sum(bucket.compressed_lengths) / 32 / ranks
