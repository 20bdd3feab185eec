"""The compressors: what crosses the network instead of an activation, and its gradient."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn


class Alone:
    """One rank that has nobody to add to: a stage boundary, or a process on its own. `MeshRanks` is its counterpart."""

    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; every rank gets it, so the gradient passes unchanged."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x. A rank's gradient is that of its own entry."""
        return [x]

    def shared(self, weight: Tensor) -> Tensor:
        """A weight all ranks share but use on different activations: its gradient is summed over the ranks."""
        return weight


ALONE = Alone()


class Compressor(nn.Module):
    """Base class. Subclasses give `compress`, `decompress` and `bytes`; calling a compressor does one all-reduce.

    Attributes:
        summable: True when the values of several ranks may be added before `decompress`. Otherwise every rank's
            payload is gathered, decompressed and added up.
    """

    summable = False

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor | None]:
        """What is sent for x: (values, side). Gradients flow through the values only; `side` is equal on all ranks
        where the compressor is summable. `ranks` is there for methods that must agree on something first."""
        raise NotImplementedError

    def decompress(self, values: Tensor, side: Tensor | None, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """The activation of that shape, from what was sent."""
        raise NotImplementedError

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one rank's payload for an activation of that shape."""
        raise NotImplementedError

    def forward(self, x: Tensor, ranks: Alone = ALONE) -> Tensor:
        """The sum of x over the ranks, as far as compression lets through."""
        values, side = self.compress(x, ranks)
        if self.summable:
            return self.decompress(ranks.sum(values), side, x.shape)
        sides = [None] * ranks.size if side is None else ranks.gather(side)
        parts = [self.decompress(v, s, x.shape) for v, s in zip(ranks.gather(values), sides, strict=True)]
        return sum(parts[1:], parts[0])


class Identity(Compressor):
    """No compression: the same exchange, everything sent. The reference the others are compared with."""

    summable = True

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, None]:
        return x, None

    def decompress(self, values: Tensor, side: None, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return values.view(shape)

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape) * dtype.itemsize


class AutoEncoder(Compressor):
    """Two learned matrices: `hidden` numbers a token become `code` and back (MCBench, section 3.1). Exact gradients.

    The encoder starts as random orthonormal columns and the decoder as their transpose, so that what arrives first is
    a projection of the activation. At a stage boundary the sender trains the encoder, the receiver the decoder.
    """

    summable = True

    def __init__(self, hidden: int, code: int) -> None:
        super().__init__()
        if not 1 <= code <= hidden:
            raise ValueError(f"code must be between 1 and hidden; got code={code}, hidden={hidden}.")
        self.encoder = nn.Parameter(nn.init.orthogonal_(torch.empty(hidden, code, dtype=torch.get_default_dtype())))
        self.decoder = nn.Parameter(self.encoder.detach().t().contiguous())

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, None]:
        return x @ ranks.shared(self.encoder), None

    def decompress(self, values: Tensor, side: None, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return (values @ self.decoder).view(shape)

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape[:-1]) * self.encoder.shape[1] * dtype.itemsize


def _kept(density: float, n: int) -> int:
    return max(1, round(density * n))


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1; got {density}.")


class TopK(Compressor):
    """The `density` part of the elements that is largest in magnitude, with int32 positions. Exact gradients."""

    def __init__(self, density: float) -> None:
        super().__init__()
        _check_density(density)
        self.density = density

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1)
        index = flat.detach().abs().topk(_kept(self.density, flat.numel()), sorted=False).indices
        return flat[index], index.int()

    def decompress(self, values: Tensor, side: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        index = side.long().clamp(0, n - 1)  # torch's pipelining first runs stages on uninitialised memory
        return values.new_zeros(n).index_put((index,), values).view(shape)

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return _kept(self.density, math.prod(shape)) * (dtype.itemsize + 4)


class RandomK(Compressor):
    """A `density` part of the elements at random positions that all ranks share. Exact gradients.

    Positions are (a*j + b) mod n for a random b and a random a without common factor with n: every element is equally
    likely, n is never sampled on the host, and two numbers tell a receiver which ones. Nothing is scaled up.
    """

    summable = True

    def __init__(self, density: float, seed: int = 0) -> None:
        super().__init__()
        _check_density(density)
        self.density = density
        self._random = random.Random(seed)

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor]:
        n = x.numel()
        step = next(a for a in iter(lambda: self._random.randrange(1, n + 1), None) if math.gcd(a, n) == 1)
        side = torch.tensor([step, self._random.randrange(n)], dtype=torch.int64, device=x.device)
        return x.reshape(-1)[self._positions(side, n)], side

    def _positions(self, side: Tensor, n: int) -> Tensor:
        return (
            torch.arange(_kept(self.density, n), dtype=torch.int64, device=side.device) * side[0] + side[1]
        ).remainder(n)

    def decompress(self, values: Tensor, side: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        return values.new_zeros(n).index_put((self._positions(side, n),), values).view(shape)

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return _kept(self.density, math.prod(shape)) * dtype.itemsize + 16


class PowerSGD(Compressor):
    """Rank-`rank` factors of the (tokens, hidden) matrix, a power iteration a call (Vogels et al. 2019), fp32 or wider.

    The column basis P is taken as given, so the gradient is the exact one of the projection x -> P P^T x: a documented
    straight-through, as the derivative of the QR factorisation is left out.
    """

    summable = True

    def __init__(self, rank: int, hidden: int, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= rank <= hidden:
            raise ValueError(f"rank must be between 1 and hidden; got rank={rank}, hidden={hidden}.")
        random = torch.Generator().manual_seed(seed)
        start = torch.randn(hidden, rank, generator=random, dtype=torch.get_default_dtype())
        self.register_buffer("basis", start)  # what the last call ended with, the start of the next

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor]:
        matrix = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            wide = torch.promote_types(self.basis.dtype, torch.float32)  # a QR of half-precision numbers falls apart
            columns = ranks.sum(matrix.to(wide) @ self.basis.to(wide))
            orthonormal = torch.linalg.qr(columns).Q.to(x.dtype)
        values = matrix.t() @ orthonormal
        self._remember(values)
        return values, orthonormal

    def decompress(self, values: Tensor, side: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        self._remember(values)  # now summed over the ranks, hence equal on all of them
        return (side @ values.t()).view(shape)

    @torch.no_grad()
    def _remember(self, values: Tensor) -> None:
        if values.shape == self.basis.shape:  # fewer tokens than the rank: keep the wider basis
            usable = values.isfinite().all()  # one bad batch must not spoil every later one
            self.basis.copy_(torch.where(usable, values.to(self.basis.dtype), self.basis))

    def bytes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        tokens, (hidden, rank) = math.prod(shape[:-1]), self.basis.shape
        return min(rank, tokens) * (tokens + hidden) * dtype.itemsize
