"""Who deals with which part of a bucket's mask, how much is selected, and the masks a bucket keeps
from one step to the next.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from .._engine.when import dense_steps, ramp_of
from .._ops.math import kept
from .._ops.ops import Ops
from .._state.bits import count_shared, cut_bytes, offsets_of
from .._state.buckets import Bucket
from .._state.deal import Deal, Piece, make_deal
from .._state.masks import Mask, Tensors, cleared, stored
from .._wire.requests import Asking, Payload

SLACK = 0.05  # a sampled threshold may miss the wanted count by this share of it


@lru_cache(maxsize=256)
def deal(lengths: tuple[int, ...], ranks: int, density: float) -> Deal:
    """Cut the mask of tensors with these lengths (0: not compressed) into one equal range for every
    rank.
    """
    offsets = offsets_of(lengths)
    cuts = cut_bytes(offsets[-1], ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for i, (n, offset) in enumerate(zip(lengths, offsets, strict=False)):
        k, stop = kept(density, n), 0
        rank = bisect_right(cuts, offset) - 1
        while stop < n:
            start, stop = stop, min(n, 8 * (cuts[rank + 1] - offset))
            wanted = k * stop // n - k * start // n  # the pieces' add up to the tensor's
            most = math.floor(wanted * (1 + SLACK))
            pieces[rank].append(
                Piece(i, start, stop, 8 * (offset - cuts[rank]) + start, wanted, most)
            )
            rank += 1
    return make_deal([(cuts[rank], cuts[rank + 1], tuple(pieces[rank])) for rank in range(ranks)])


def density_at(bucket: Bucket, t: int) -> float:
    """Density of the mask that step t uses: 1 in the warm-up, then falling."""
    h = bucket.group
    k, ramp = t - dense_steps(bucket) - 1, ramp_of(h)
    density: float = h["density"]
    if k < 0:
        return 1.0
    return density if ramp == 0 else max(density, density ** (k / ramp))


def deal_at(bucket: Bucket, t: int, ranks: int) -> Deal | None:
    """Who selects what of the mask that step t uses; None where that is all ones, or nothing is
    compressed.
    """
    lengths, density = compressed_lengths(bucket), density_at(bucket, t)
    return deal(lengths, ranks, density) if density < 1 and any(lengths) else None


def deal_now(bucket: Bucket, ranks: int) -> Deal | None:
    """Who selects what of the mask that is selected in the coming step: the next step's, or its
    own.
    """
    h = bucket.group
    return deal_at(bucket, h["step"] + 1 + h["mask_delay"], ranks)


def values_kept(bucket: Bucket, density: float) -> list[int]:
    """How many values a step sends of each tensor that sends this share of what is compressed."""
    pairs = zip(bucket.lengths, bucket.compressed, strict=True)
    return [kept(density, n) if c else n for n, c in pairs]


def mask_values(bucket: Bucket, ranks: int) -> float:
    """What a rank's part of a mask takes, as bits or coded, in values of 4 bytes."""
    d: float = bucket.group["density"]
    bits = min(1.0, d * math.log2(math.e / d))
    return bits * sum(compressed_lengths(bucket)) / 32 / ranks


def compressed_lengths(bucket: Bucket) -> tuple[int, ...]:
    return tuple(n if c else 0 for n, c in zip(bucket.lengths, bucket.compressed, strict=True))


def keep(bucket: Bucket, ops: Ops, mask: Mask, mean: Payload) -> Asking[None]:
    """Note that the momenta of tensors that took part in a step are on its mask now."""
    present, held, bits = bucket.present(mean), bucket.cache["mask"], bucket.state["mask"]
    for i, here in enumerate(present):
        if here:
            bucket.cache["owed"][i] = mean.dropped is not None
    if bucket.group["mask_delay"] == 0:  # later nobody knows the mask of before
        _note_shared(bucket, mask, held, present)
    if all(present) and mask.sparse:
        stays = yield from ops.commit("mask.stored", stored, bucket, mask, "mask")
        bucket.cache["mask"] = stays
        return
    positions: Tensors = []
    for i, (here, own) in enumerate(zip(present, bits, strict=True)):
        new, old, taken = mask.positions[i], held.positions[i], mask.bits[i]
        positions.append(new if here else old)
        if here and taken is not None:
            own.copy_(taken)
        elif here and old is not None:
            fill_ones(own, bucket.lengths[i])
    own_bits = [None if p is None else b for p, b in zip(positions, bits, strict=True)]
    bucket.cache["mask"] = Mask(bucket, bits=own_bits, positions=positions)


def _note_shared(bucket: Bucket, mask: Mask, held: Mask, present: list[bool]) -> None:
    for i, here in enumerate(present):
        bits, old = mask.bits[i], held.positions[i]
        if here and bits is not None and old is not None:
            bucket.cache["shared"][i] = int(count_shared(bits, old)), mask.sizes[i]


def restore(bucket: Bucket, decode: Callable[[Tensor, int, int | None], Tensor]) -> None:
    """Fill the bucket's cache by its state, which was set from outside."""
    state, count = bucket.state, len(bucket.params)
    bucket.cache["shared"] = [None] * count
    # Residuals may be other than 0 on the mask: rounding leaves that.
    bucket.cache["owed"] = [True] * count
    bits: Tensors = [None] * count
    for i, n in enumerate(compressed_lengths(bucket)):
        if n and _is_everywhere(bucket, i):
            fill_ones(state["mask"][i], n)
        elif n:
            bits[i] = state["mask"][i]
    bucket.cache["mask"] = Mask(bucket, bits=bits, decode=decode)
    if bucket.flat["next_mask"].any():
        bucket.cache["next_mask"] = Mask(bucket, bits=state["next_mask"], decode=decode)


def _is_everywhere(bucket: Bucket, i: int) -> bool:
    """Whether the momentum of compressed tensor i is on no mask."""
    if not bucket.cut:
        return bucket.state["exp_avg"][i].numel() == bucket.lengths[i]
    return not bucket.state["mask"][i].any()


def mask_now(bucket: Bucket) -> Mask:
    """The mask that was found one step ago; all, where there is none."""
    found = None if bucket.alone else bucket.cache.get("next_mask")
    return found or Mask(bucket)


def make_room(bucket: Bucket, mean: Payload, mask: Mask) -> list[Tensor]:
    """Momenta as large as what is on the mask, contents undefined; returns those of before."""
    old = bucket.state["exp_avg"]
    present = zip(bucket.present(mean), mask.sizes, bucket.sizes["exp_avg"], strict=True)
    bucket.resize("exp_avg", [size if here else held for here, size, held in present])
    return old


def forget_next(bucket: Bucket, ops: Ops) -> Asking[None]:
    """Until the next mask has arrived the bucket has none."""
    bucket.cache.pop("next_mask", None)
    yield from ops.commit("mask.cleared", cleared, bucket, "next_mask")


def fill_ones(mask: Tensor, n: int) -> None:
    mask.fill_(255)
    if n % 8:
        mask[-1] = (1 << n % 8) - 1
