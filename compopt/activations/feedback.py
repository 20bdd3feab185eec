"""Error feedback for activations: what one forward held back is added to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from .codecs import ALONE, Alone, Compressor
from .recompute import Replay, recomputing


class ErrorFeedback(Compressor):
    """Adds what `codec` took off this rank's last activation to the next one of the same shape, in
    training.

    For comparison with the data-parallel habit: what is added belongs to other tokens than those it
    is added to, so that it can help only where all tokens share what is held back.
    """

    def __init__(self, codec: Compressor) -> None:
        super().__init__()
        self.codec = codec
        self.summable, self.straight_through = codec.summable, codec.straight_through
        self.gradient_bits = codec.gradient_bits
        # Of other tokens: not worth a place in a checkpoint.
        self._error: Tensor | None = None
        self._replay: Replay[Tensor | None] = Replay()

    def extra_repr(self) -> str:
        return f"{type(self.codec).__name__}({self.codec.extra_repr()})"

    def fits_payload(self) -> bool:
        """As the codec's."""
        return self.codec.fits_payload()

    def learn(self, total: Tensor) -> None:
        self.codec.learn(total)

    def compress(self, x: Tensor, ranks: Alone = ALONE) -> tuple[Tensor, Tensor | None]:
        error = self._replay(lambda: self._error) if self.training else None
        if error is not None and error.shape != x.shape:
            error = None
        y = x if error is None else x + error.to(x.dtype)
        values, side = self.codec.compress(y, ranks)
        if self.training and not recomputing():
            with torch.no_grad():
                error = y - self.codec.decompress(values.detach(), side, x.shape)
                self._error = error if error.isfinite().all() else None
        return values, side

    def decompress(self, values: Tensor, side: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return self.codec.decompress(values, side, shape)

    def pack(self, x: Tensor, bits: int) -> Tensor:
        return self.codec.pack(x, bits)

    def size(self, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> int:
        return self.codec.size(shape, bits, dtype)

    def unpack(self, values: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
        return self.codec.unpack(values, shape, bits)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        return self.codec.bytes(shape, dtype)
