"""Memory that is used again: new pages cost more than what is computed in them."""

from __future__ import annotations

import torch
from torch import Tensor


def at_a_time(block: int, x: Tensor) -> int:
    """How many elements, or rows, of x to work on at a time: so many stay in a core's cache. A
    device is given all of them at once.
    """
    return block if x.device.type == "cpu" else max(1, len(x))


class Scratch:
    """Memory of one owner, who works on one thread at a time: two optimizers never share it."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, use: str, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """n elements, contents undefined, until the next call for the same ``use``."""
        key = (use, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < n:
            held = self._held[key] = torch.empty(n, dtype=dtype, device=device)
        return held[:n]

    @property
    def held(self) -> list[Tensor]:
        """What there is of it."""
        return list(self._held.values())
