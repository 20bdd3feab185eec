"""How values at an index that all ranks know cross the network: what ``codec=`` may say, a line of
``CODES`` each.

A code is made for all shards of a bucket at once. Codes are linear, so the mean of codes is the
code of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from .._state.shards import Shards
from .sketch import Sketch


class Code(Protocol):
    """Values at an ``index``, ascending, among the bits of a bucket's mask.

    ``counts``: how many of it each rank owns. ``ratio``: how many compressed elements there are for
    a number sent, where a code can choose; ``seed`` draws what is random in it, the same on all
    ranks.
    """

    exact: bool  # it must travel in float32 at least
    index: Tensor
    sizes: list[int]  # how many numbers go to each rank
    leftovers: int  # elements, over all shards, that are sent as they are though they were coded

    def __init__(
        self, shards: Shards, index: Tensor, counts: list[int], ratio: float, seed: int
    ): ...

    def fill(self, parts: list[Tensor], values: Tensor) -> None:
        """Write for every owner its part of ``values``, this rank's at the index."""

    def decode(self, code: Tensor) -> Tensor:
        """Values at the index of this rank's shard, from the mean of what its owner was sent."""
        ...


class Compact:
    """The values themselves, in the order of the index."""

    exact = False
    leftovers = 0

    def __init__(self, shards: Shards, index: Tensor, counts: list[int], ratio: float, seed: int):
        self.index, self.sizes = index, counts

    def fill(self, parts: list[Tensor], values: Tensor) -> None:
        torch._foreach_copy_(parts, list(values.split(self.sizes)))

    def decode(self, code: Tensor) -> Tensor:
        return code


CODES: Mapping[str, type[Code]] = {"compact": Compact, "sketch": Sketch}
