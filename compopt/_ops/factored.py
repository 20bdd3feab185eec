"""AdamW on averaged gradients that are products of narrow matrices: what a back end is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from .._wire.requests import Payload


class Factored(NamedTuple):
    """Tensor ``i``, as a contiguous matrix of ``rows`` rows.

    Its averaged gradient is ``R p^T``, R of shape (rows, r), p of (columns, r), kept column after
    column; ``own`` is what this rank sent of p, ``dropped`` what rounding took off it.
    """

    i: int
    rows: int
    columns: int
    R: Tensor
    p: Tensor
    own: Tensor
    dropped: Tensor | None


class Factors(Protocol):
    """What is known of one bucket's tensors at one step."""

    # On this rank's gradient.
    clipped: float

    def factored(self, mean: Payload, present: Sequence[int]) -> list[Factored]:
        """Those of ``present`` whose averaged gradient is a product."""

    def whole(self, present: Sequence[int]) -> list[int]:
        """The others."""

    def feed_back(self, i: int, mean: Payload, factor: float) -> None:
        """What remains of a tensor that was sent whole."""

    def share(self, factor: float) -> float:
        """How much of the new error is kept of what is a product."""
