"""PowerSGD's factors of an activation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .codecs import ALONE, Alone, Compressor, given
from .recompute import Replay, recomputing


class PowerSGD(Compressor):
    """Rank-`rank` factors of the (tokens, hidden) matrix, a power iteration a call (Vogels et al.
    2019), fp32 or wider.

    The column basis P is taken as given, so the gradient is the exact one of the projection x -> P
    P^T x: a documented straight-through, as the derivative of the QR factorisation is left out. The
    row basis moves in training only, and not when activation checkpointing computes a forward
    again.
    """

    summable = True
    # What the last call ended with, the start of the next.
    basis: Tensor

    def __init__(self, rank: int, hidden: int, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= rank <= hidden:
            raise ValueError(
                f"rank must be between 1 and hidden; got rank={rank}, hidden={hidden}."
            )
        self.seed = seed
        start = torch.empty(hidden, rank, dtype=torch.get_default_dtype())
        self.register_buffer("basis", start)
        self._replay: Replay[Tensor] = Replay()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the first basis. After `to_empty`, for a model that was made on the meta device."""
        if not self.basis.is_meta:
            generator = torch.Generator().manual_seed(self.seed)
            self.basis.copy_(
                torch.randn(
                    self.basis.shape, generator=generator, dtype=torch.float32, device="cpu"
                )
            )

    def extra_repr(self) -> str:
        return f"rank={self.basis.shape[1]}, hidden={self.basis.shape[0]}, seed={self.seed}"

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor]:
        matrix = x.reshape(-1, x.shape[-1])
        basis = self._replay(lambda: self.basis)
        with torch.no_grad():
            # A QR of half-precision numbers falls apart.
            wide = torch.promote_types(basis.dtype, torch.float32)
            columns = ranks.sum(matrix.to(wide) @ basis.to(wide))
            orthonormal = torch.linalg.qr(columns).Q.to(x.dtype)
        values = matrix.t() @ orthonormal
        self.learn(values)
        return values, orthonormal

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return (given(side) @ values.t()).view(shape)

    @torch.no_grad()
    def learn(self, total: Tensor) -> None:
        if not self.training or recomputing():
            return
        # Of fewer tokens than the rank: keep the wider basis.
        if total.shape == self.basis.shape:
            # One bad batch must not spoil every later one.
            usable = total.isfinite().all()
            # A new tensor: a forward that is computed again may need the old one.
            self.basis = torch.where(usable, total.to(self.basis.dtype), self.basis)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        tokens, (hidden, rank) = math.prod(shape[:-1]), self.basis.shape
        return min(rank, tokens) * (tokens + hidden) * dtype.itemsize
