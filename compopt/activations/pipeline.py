"""Compression at the stage boundaries of torch.distributed.pipelining: a wrapper around each
neighbouring stage.

    first = SendCompressed(nn.Sequential(*blocks[:6]), TopK(0.1))
    second = ReceiveCompressed(nn.Sequential(*blocks[6:]), TopK(0.1), shape=(8, 128, 1024))
    stage = PipelineStage([first, second][rank], rank, 2, device)      # and any schedule of torch's

What the sender returns is what crosses the network, and the gradient that comes back has the size
of the values. The last tensor of it has no elements: its shape says which compressor made it, and
the receiver compares that with its own before a byte is trained on. A stage in the middle is
wrapped twice.

The gradient of `Quantize` comes back in full. It has no place in the payload, so it travels beside
it, over a group of the two ranks that only this boundary uses (every rank calls new_group)::

    pair = dist.new_group([0, 1])
    first = SendCompressed(nn.Sequential(*blocks[:6]), Quantize(2), pair=pair)
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .._wire.collectives import ProcessGroup
from .codecs import Compressor, applied
from .pair import Pair, ReturnBeside, SendBeside


def _label(compressor: Compressor, shape: tuple[int, ...], like: Tensor) -> tuple[int, ...]:
    """What both ends must agree on, in three numbers: the kind, its settings, the activation."""
    kind = f"{type(compressor).__name__}, enabled={compressor.enabled}"
    words = kind, compressor.extra_repr(), f"{tuple(shape)}, {like.dtype}"
    return tuple(1 + zlib.crc32(text.encode()) % 65521 for text in words)


class _Boundary(nn.Module):
    """A wrapped stage.

    Its state-dict keys are the stage's own, with those of the compressor beside them.
    """

    # The compressor's name in the state dict.
    codec = ""

    def __init__(self, stage: nn.Module, compressor: Compressor, pair: ProcessGroup | None) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(
                "compressor must be a Compressor, as in TopK(0.1); got "
                f"{type(compressor).__name__}."
            )
        beside = compressor.straight_through and not compressor.fits_payload()
        if pair is None and beside:
            raise ValueError(
                f"the gradient of {compressor} returns across a stage boundary beside the payload: "
                "pass pair=torch.distributed.new_group([sender, receiver]) to both ends, or set "
                "gradient_bits to at most bits, which quantizes it."
            )
        super().__init__()
        self.stage = stage
        self.add_module(self.codec, compressor)
        self.pair = Pair(pair, compressor) if pair is not None and beside else None
        nn.Module.register_state_dict_post_hook(self, _without_stage)
        nn.Module.register_load_state_dict_pre_hook(self, _with_stage)

    @property
    def compressor(self) -> Compressor:
        """The compressor of this end."""
        found = self._modules[self.codec]
        assert isinstance(found, Compressor)
        return found

    def __getattr__(self, name: str) -> Any:
        """Parts of the stage by their own names, by which a state dict calls them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("stage"), name)


def _without_stage(
    module: _Boundary, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Keys as the stage itself would have them, and what load_state_dict wants to know of its
    modules' versions.
    """
    _rename(state, prefix + "stage.", prefix)
    _rename(getattr(state, "_metadata", {}), prefix + "stage.", prefix)


def _with_stage(module: _Boundary, state: dict[str, Any], prefix: str, *_: object) -> None:
    own = prefix + module.codec + "."
    _rename(state, prefix, prefix + "stage.", but=own)


def _rename(names: dict[str, Any], old: str, new: str, but: str | None = None) -> None:
    for key in list(names):
        if key.startswith(old) and not (but and key.startswith(but)):
            names[new + key[len(old) :]] = names.pop(key)


class SendCompressed(_Boundary):
    """A stage whose output leaves compressed: the values, a side tensor where there is one, and a
    label without size.

    Args:
        stage: returns one activation.
        compressor: of the same kind and settings as the receiver's. An AutoEncoder's encoder is
            trained here.
        pair: a process group of the two ranks, for a compressor whose gradient returns beside the
            payload.
    """

    codec = "outgoing"

    def __init__(
        self, stage: nn.Module, compressor: Compressor, *, pair: ProcessGroup | None = None
    ) -> None:
        super().__init__(stage, compressor, pair)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return self._send(self.stage(*args, **kwargs))

    @_disable_dynamo
    def _send(self, x: Tensor) -> tuple[Tensor, ...]:
        label = x.new_empty((0, *_label(self.compressor, x.shape, x)))
        if not self.compressor.enabled:
            return x.contiguous(), label
        if self.pair is not None:
            values, side = self.compressor.compress(x.detach())
            values = applied(SendBeside, x, values, self.pair)
        else:
            values, side = self.compressor.compress(x)
        return tuple(tensor.contiguous() for tensor in (values, side) if tensor is not None) + (
            label,
        )


class ReceiveCompressed(_Boundary):
    """A stage whose input arrives compressed.

    Args:
        stage: takes one activation, and the keyword arguments of the schedule's step.
        compressor: of the same kind and settings as the sender's. An AutoEncoder's decoder is
            trained here.
        shape: the activation of one micro-batch, for example (sequences, tokens, hidden).
        pair: as the sender's.
    """

    codec = "incoming"

    def __init__(
        self,
        stage: nn.Module,
        compressor: Compressor,
        shape: tuple[int, ...],
        *,
        pair: ProcessGroup | None = None,
    ) -> None:
        if not shape or min(shape) < 1:
            raise ValueError(
                f"shape must be that of one micro-batch's activation; got {tuple(shape)}."
            )
        super().__init__(stage, compressor, pair)
        self.shape = tuple(shape)

    def forward(self, *payload: Tensor, **kwargs: Any) -> Any:
        return self.stage(self._receive(*payload), **kwargs)

    @_disable_dynamo
    def _receive(self, values: Tensor, *rest: Tensor) -> Tensor:
        self._compare(values, rest[-1] if rest else None)
        side = rest[0] if len(rest) == 2 else None
        if not self.compressor.enabled:
            return values
        if self.pair is None:
            return self.compressor.decompress(values, side, self.shape)
        with torch.no_grad():
            x = self.compressor.decompress(values, side, self.shape)
        return applied(ReturnBeside, values, x, self.pair)

    def _compare(self, values: Tensor, label: Tensor | None) -> None:
        what = f"activation {self.shape} in {values.dtype}"
        ours = f"{self.compressor}, {what}, enabled={self.compressor.enabled}"
        if label is None or label.ndim != 4 or len(label):
            raise RuntimeError(
                f"this stage expects what SendCompressed sends ({ours}); the stage before is no "
                "such."
            )
        wanted = _label(self.compressor, self.shape, values)
        names = (
            "the kind of compressor",
            "its settings (bits, density, rank, seed)",
            "the activation's shape or dtype",
        )
        pairs = zip(names, wanted, label.shape[1:], strict=True)
        differ = [name for name, mine, theirs in pairs if mine != theirs]
        if differ:
            raise RuntimeError(
                f"the two ends of a stage boundary differ in {' and '.join(differ)}. This one: "
                f"{ours}."
            )
