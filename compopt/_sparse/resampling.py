"""What Radius keeps from step to step: its mask, and what is held back off it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .._ops.math import kept
from .._ops.ops import Ops
from .._state.buckets import Bucket
from .._state.masks import Mask
from .._wire.requests import Payload


def held_back(bucket: Bucket, ops: Ops, phase: str) -> tuple[Iterator[Tensor | None] | None, float]:
    """The residuals, where the step sends them, and the factor on them (line 8).

    All are sent at a resample step, and at a dense one that follows sparse ones; at every step what
    rounding has taken off.
    """
    again = phase == "dense" and bucket.owes  # the dense start was taken up again
    if not (again or bucket.rounds or phase == "resample"):
        return None, 1.0
    forget_sent(bucket, ops)
    scale = bucket.group["residual_scale"] if phase == "resample" else 1.0
    return bucket.each("residual"), scale


def keep_where_absent(
    bucket: Bucket, mean: Payload, masks: list[Tensor]
) -> tuple[list[Tensor], list[int | None]]:
    """The new masks, but the old one of a tensor without a gradient on any rank.

    What it owes stays, off the old mask; on a new one it would be taken for sent. Returned with how
    many elements of each tensor are selected, which an old mask does not tell.
    """
    density, present = bucket.group["density"], bucket.present(mean)
    pairs = zip(bucket.lengths, bucket.compressed, strict=True)
    sizes: list[int | None] = [kept(density, n) if c else n for n, c in pairs]
    masks = masks.copy()
    for place, i in enumerate(i for i, c in enumerate(bucket.compressed) if c):
        old = bucket.state["mask"][i]
        if not present[i] and old.any():
            masks[place], sizes[i] = old.clone(), None
    return masks, sizes


def forget_mask(bucket: Bucket) -> None:
    """Until the new mask has arrived the bucket has none."""
    bucket.cache.pop("mask", None)
    bucket.flat["mask"].zero_()


def keep_mask(bucket: Bucket, ops: Ops, flat: Tensor, sizes: list[int | None]) -> None:
    """From now on the steps are sparse, on these bits."""
    bucket.flat["mask"].copy_(flat)
    bits = bucket.state["mask"]
    bucket.cache["mask"] = Mask(bucket, bits=bits, sizes=sizes, decode=ops.positions)


def settled(bucket: Bucket, mean: Payload, phase: str) -> None:
    """Note whether residuals are owed, beside what rounding drops; a dense step has sent them."""
    if phase == "dense" and bucket.owes and not bucket.rounds:
        present = bucket.present(mean)
        for residual, here in zip(bucket.each("residual", write=True), present, strict=True):
            if here and residual is not None:
                residual.zero_()
    # in this order: a sparse step may not know who was present
    bucket.cache["owes"] = phase == "sparse" or (bucket.owes and not all(bucket.present(mean)))


def forget_sent(bucket: Bucket, ops: Ops) -> None:
    """Line 16, "0 on the mask": once before the residual is read, for all sparse steps that shared
    this mask.
    """
    if not bucket.cache.get("sent", False):
        return
    residuals, mask = bucket.each("residual", write=True), bucket.cache["mask"]
    for residual, index in zip(residuals, mask.positions, strict=True):
        if index is not None:
            ops.clear_(residual, index)
    bucket.cache["sent"] = False  # last: where this is interrupted it is done again


def restore(bucket: Bucket, ops: Ops) -> None:
    """The mask of a state that was set from outside, where there is one."""
    bits = bucket.state["mask"]
    if any(bucket.compressed) and all(b is None or not b.numel() or b.any() for b in bits):
        bucket.cache["mask"] = Mask(bucket, bits=bits, decode=ops.positions)
