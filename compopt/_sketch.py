"""How values at an index that all ranks know cross the network: compactly, or in a count sketch.

A code is made for all shards of a bucket at once. ``sizes[r]`` is how many numbers go to rank r, ``fill`` writes this
rank's share of each, and ``decode`` turns the mean of what arrived at the owner back into values at its index. Both are
linear, so the mean of codes is the code of the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._shards import Shards


class Compact:
    """The values themselves, in the order of the index."""

    leftovers = 0

    def __init__(self, shards: Shards, index: Tensor):
        self.index, self.sizes = index, shards.counts(index)

    def fill(self, parts: list[Tensor], positions: Tensor, values: Tensor) -> None:
        """Write ``values`` at ``positions``, some of the index, and zeros at the rest of it, for every owner."""
        every = values.new_zeros(self.index.numel())
        every[torch.searchsorted(self.index, positions)] = values
        for part, own in zip(parts, every.split(self.sizes), strict=True):
            part.copy_(own)

    def decode(self, code: Tensor) -> Tensor:
        """Values at the index of the shard whose owner received ``code``."""
        return code
