"""What TAGC sends of a bucket's shards, and what a rank holds back of them: lines 1 and 2 of its
algorithm.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops.ops import Ops
from .._state.buckets import Bucket
from .._state.masks import bits_at
from .._state.shards import Shards
from .dealing import compressed_lengths
from .selection import largest


class Left(NamedTuple):
    """What line 2 leaves of all shards: values at positions among the bits of the mask, and these
    bits.
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
    for i, n in enumerate(compressed_lengths(bucket)):
        if n:
            first, last = 8 * shards.offsets[i], 8 * shards.offsets[i + 1]
            whole[i] = x[first : first + n]
            x[first + n : last] = 0
    marks = ops.add_up(bucket, grads, [*residual], whole)
    counts = [shards.compressed_in(r) for r in range(shards.ranks)]
    positions, values = largest_of_shards(x, shards, counts, sparsity, ops)
    return Left(positions, values, bits_at(positions, shards.offsets[-1]), marks)


def largest_of_shards(
    x: Tensor, shards: Shards, counts: list[int], sparsity: float, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Line 2: positions among all of ``x``, ascending, and values of the largest of every shard,
    of which shard r has ``counts[r]`` elements.
    """
    found = []
    for r, (first, last) in enumerate(itertools.pairwise(shards.cuts)):
        k = most_left(sparsity, counts[r]) if sparsity else 8 * (last - first)
        found.append(largest(x[8 * first : 8 * last], k, ops).add_(8 * first))
    positions = torch.cat(found)
    values = x.index_select(0, positions)
    # line 3: gradients of embeddings are mostly zeros; and so is what is between tensors
    if not values.all():
        positions, values = positions[values != 0], values[values != 0]
    return positions, values


def most_left(sparsity: float, n: int) -> int:
    """How many of n elements may be left where at least ``sparsity`` of them are zeroed; one where
    there are any.
    """
    return min(n, max(1, n - math.ceil(round(sparsity * n, 6))))
