"""Some of the elements: the largest, or a random choice that all ranks share."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from .codecs import ALONE, Alone, Compressor, given
from .recompute import Replay


def _kept(density: float, n: int) -> int:
    return min(n, max(1, round(density * n)))


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1; got {density}.")


class TopK(Compressor):
    """The `density` part of the elements that is largest in magnitude, with int32 positions.

    Exact gradients.
    """

    def __init__(self, density: float) -> None:
        super().__init__()
        _check_density(density)
        self.density = density

    def extra_repr(self) -> str:
        return f"density={self.density}"

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1)
        index = flat.detach().abs().topk(_kept(self.density, flat.numel()), sorted=False).indices
        return flat[index], index.int()

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        # torch's pipelining first runs stages on uninitialised memory.
        index = given(side).long().clamp(0, max(n - 1, 0))
        return values.new_zeros(n).index_put((index,), values).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return _kept(self.density, math.prod(shape)) * (dtype.itemsize + 4)


class RandomK(Compressor):
    """A `density` part of the elements at random positions that all ranks share. Exact gradients.

    Positions are (a*j + b) mod n for a random b and a random a without common factor with n: every
    element is equally likely, n is never sampled on the host, and two numbers tell a receiver which
    ones. Nothing is scaled up. The k-th forward draws them from `seed` and k; activation
    checkpointing, which computes it again, meets the same ones.
    """

    summable = True

    def __init__(self, density: float, seed: int = 0) -> None:
        super().__init__()
        _check_density(density)
        self.density, self.seed = density, seed
        self._forwards = 0
        self._replay: Replay[tuple[int, int]] = Replay()

    def extra_repr(self) -> str:
        return f"density={self.density}, seed={self.seed}"

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor]:
        n = x.numel()
        side = torch.tensor(self._replay(lambda: self._draw(n)), dtype=torch.int64, device=x.device)
        return x.reshape(-1)[self._positions(side, n)], side

    def _draw(self, n: int) -> tuple[int, int]:
        self._forwards += 1
        drawn, most = random.Random(f"{self.seed}, {self._forwards}"), max(n, 1)
        step = next(
            a for a in iter(lambda: drawn.randrange(1, most + 1), None) if math.gcd(a, most) == 1
        )
        return step, drawn.randrange(most)

    def _positions(self, side: Tensor, n: int) -> Tensor:
        places = torch.arange(_kept(self.density, n), dtype=torch.int64, device=side.device)
        return (places * side[0] + side[1]).remainder(max(n, 1))

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        index = self._positions(given(side), n)
        return values.new_zeros(n).index_put((index,), values).view(shape)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return _kept(self.density, math.prod(shape)) * dtype.itemsize + 16
