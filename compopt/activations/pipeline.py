"""Compression at the stage boundaries of torch.distributed.pipelining: a wrapper around each neighbouring stage.

    first = SendCompressed(nn.Sequential(*blocks[:6]), TopK(0.1))
    second = ReceiveCompressed(nn.Sequential(*blocks[6:]), TopK(0.1), shape=(8, 128, 1024))
    stage = PipelineStage([first, second][rank], rank, 2, device)      # and any schedule of torch's

What the sender returns is what crosses the network, and the gradient that comes back has the size of the values. A
stage in the middle is wrapped twice.
"""

from __future__ import annotations

from torch import Tensor, nn

from .codecs import Compressor


class SendCompressed(nn.Module):
    """A stage whose output leaves compressed: one tensor, or two where the compressor has a side tensor.

    Args:
        stage: returns one activation.
        compressor: of the same kind and size as the receiver's. An AutoEncoder's encoder is trained here.
    """

    def __init__(self, stage: nn.Module, compressor: Compressor) -> None:
        super().__init__()
        self.stage, self.compressor = stage, compressor

    def forward(self, *args, **kwargs) -> Tensor | tuple[Tensor, Tensor]:
        values, side = self.compressor.compress(self.stage(*args, **kwargs))
        return values.contiguous() if side is None else (values.contiguous(), side.contiguous())


class ReceiveCompressed(nn.Module):
    """A stage whose input arrives compressed.

    Args:
        stage: takes one activation, and the keyword arguments of the schedule's step.
        compressor: of the same kind and size as the sender's. An AutoEncoder's decoder is trained here.
        shape: the activation of one micro-batch, for example (sequences, tokens, hidden).
    """

    def __init__(self, stage: nn.Module, compressor: Compressor, shape: tuple[int, ...]) -> None:
        super().__init__()
        if not shape or min(shape) < 1:
            raise ValueError(f"shape must be that of one micro-batch's activation; got {tuple(shape)}.")
        self.stage, self.compressor, self.shape = stage, compressor, tuple(shape)

    def forward(self, values: Tensor, side: Tensor | None = None, **kwargs):
        return self.stage(self.compressor.decompress(values, side, self.shape), **kwargs)
