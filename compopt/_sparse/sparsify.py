"""What TAGC sends of a bucket's shards, and what a rank holds back of them: lines 1 and 2 of its
algorithm.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from torch import Tensor

from .._ops.operations import Ops
from .._state.bits import bits_at
from .._state.buckets import Bucket
from .._state.shards import Shards
from .top_k import select_top_k_of_each


class Left(NamedTuple):
    """What line 2 leaves of all shards: values at positions among the bits of the mask, and these
    bits, but of values that are 0.

    On a device positions are in no order within a shard, and some values may be 0.
    """

    positions: Tensor
    values: Tensor
    bits: Tensor
    marks: Tensor  # of all gradients, finite or not


def sparsify(bucket: Bucket, ops: Ops) -> Left:
    """Lines 1 and 2: in every shard, the largest of gradient and accumulator."""
    shards, sparsity = bucket.shards, bucket.group["sparsity"]
    x = ops.scratch(bucket.flat["residual"], 8 * shards.offsets[-1], use="x")
    grads, residual = bucket.grads(), bucket.state["residual"]
    whole: list[Tensor | None] = [None] * len(grads)
    for i, n in enumerate(bucket.compressed_lengths):
        if n:
            first, last = 8 * shards.offsets[i], 8 * shards.offsets[i + 1]
            whole[i] = x[first : first + n]
            if first + n < last:
                x[first + n : last] = 0
    marks = ops.add_residuals(bucket, grads, [*residual], whole)
    counts = [shards.compressed_in(r) for r in range(shards.ranks)]
    return Left(*largest_of_shards(x, shards, counts, sparsity, ops), marks)


def largest_of_shards(
    x: Tensor, shards: Shards, counts: list[int], sparsity: float, ops: Ops
) -> tuple[Tensor, Tensor, Tensor]:
    """Lines 2 and 3: positions among all of ``x`` and values of the largest of every shard, of
    which shard r has ``counts[r]`` elements; and the bits of those that are not 0.
    """
    parts = [x[8 * first : 8 * last] for first, last in itertools.pairwise(shards.cuts)]
    pairs = zip(parts, counts, strict=True)
    ks = [most_left(sparsity, n) if sparsity else len(part) for part, n in pairs]
    positions = select_top_k_of_each(parts, ks, ops)
    values, size = x.index_select(0, positions), shards.offsets[-1]
    # gradients of embeddings are mostly zeros; and so is what is between tensors
    if x.device.type != "cpu":  # how many are not 0 is not asked: those that are set no bit
        return positions, values, bits_at(positions, size, values != 0)
    if not values.all():
        positions, values = positions[values != 0], values[values != 0]
    return positions, values, bits_at(positions, size)


def most_left(sparsity: float, n: int) -> int:
    """How many of n elements may be left where at least ``sparsity`` of them are zeroed; one where
    there are any.
    """
    return min(n, max(1, n - math.ceil(round(sparsity * n, 6))))
