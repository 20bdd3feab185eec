"""Compression at the stage boundaries of torch.distributed.pipelining: a wrapper around each
neighboring stage.

    first = SendCompressed(nn.Sequential(*blocks[:6]), TopK(0.1))
    second = ReceiveCompressed(nn.Sequential(*blocks[6:]), TopK(0.1), shape=(8, 128, 1024))
    stage = PipelineStage([first, second][rank], rank, 2, device)      # and any schedule of torch's

The sender returns the payload, and the gradient that comes back has the size of the values. The
last tensor of the payload has no elements: its shape encodes the compressor and its settings, and
the receiver compares them with its own before it uses the payload. A stage in the middle is wrapped
twice.

The gradient of `Quantize` comes back unquantized. It does not fit in the payload, so it is sent
beside it, over a group of the two ranks that only this boundary uses (every rank calls new_group)::

    pair = dist.new_group([0, 1])
    first = SendCompressed(nn.Sequential(*blocks[:6]), Quantize(2), pair=pair)

Every such gradient has a number, which returns in place of the payload. To infer shapes, torch's
pipelining runs the backward of some stages and not of others; the number tells the gradients of
those backwards from the first real one.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .._state.tensors import to_local, without_autocast
from .._wire.groups import ProcessGroup
from .base import Compressor, apply_function
from .codecs import Identity

# Gradients in flight: one of shape inference, which nobody receives, one in transfer, one being
# computed.
MAX_IN_FLIGHT = 3
NUMBERS = 128  # of gradients, modulo: integers that bfloat16 represents exactly


# Stages


def _label(compressor: Compressor, shape: tuple[int, ...], values: Tensor) -> tuple[int, ...]:
    """Hash what both ends must agree on: the kind of compressor, its settings, the activation."""
    kind = f"{type(compressor).__name__}, enabled={compressor.enabled}"
    texts = kind, compressor.extra_repr(), f"{tuple(shape)}, {values.dtype}"
    return tuple(1 + zlib.crc32(text.encode()) % 65521 for text in texts)


class _Boundary(nn.Module):
    """A wrapped stage. Its state dict has the keys of the stage, and those of the compressor."""

    codec = ""  # the compressor's name in the state dict

    def __init__(
        self, stage: nn.Module, compressor: Compressor, *, pair: ProcessGroup | None = None
    ) -> None:
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
        compressor = self._modules[self.codec]
        assert isinstance(compressor, Compressor)
        return compressor

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the stage, whose names the state dict uses; not those by which it is
        copied.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("stage"), name)


def _without_stage(
    module: _Boundary, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Remove the wrapper's name from the keys, and from the modules' metadata."""
    _rename_prefix(state, prefix + "stage.", prefix)
    _rename_prefix(getattr(state, "_metadata", {}), prefix + "stage.", prefix)


def _with_stage(module: _Boundary, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Add the wrapper's name to all keys but the compressor's."""
    _rename_prefix(state, prefix, prefix + "stage.", excluded=prefix + module.codec + ".")


def _rename_prefix(
    entries: dict[str, Any], old: str, new: str, excluded: str | None = None
) -> None:
    keys = [
        key
        for key in entries
        if key.startswith(old) and not (excluded and key.startswith(excluded))
    ]
    # All are removed first: a new name may be another entry's old one.
    values = [entries.pop(key) for key in keys]
    for key, value in zip(keys, values, strict=True):
        entries[new + key[len(old) :]] = value


class SendCompressed(_Boundary):
    """A stage with a compressed output: the values, a side tensor if there is one, and an empty
    tensor whose shape is the label of the compressor.

    Args:
        stage: returns one tensor, the activation.
        compressor: of the same kind and settings as the receiver's. An AutoEncoder's encoder is
            trained here.
        pair: a process group of the two ranks, for a compressor whose gradient returns beside the
            payload.
    """

    codec = "outgoing"

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return self._encode_output(self.stage(*args, **kwargs))

    @_disable_dynamo
    def _encode_output(self, x: Tensor) -> tuple[Tensor, ...]:
        if not isinstance(x, Tensor) or to_local(x) is not x:
            raise TypeError(
                "a stage in SendCompressed must return one tensor that is no DTensor; "
                f"{type(self.stage).__name__} returned {type(x).__name__}."
            )
        values, side = self._compress(x)
        payload = (values,) if side is None else (values, side)
        label = x.new_empty((0, *_label(self.compressor, x.shape, values)))
        return (*(tensor.contiguous() for tensor in payload), label)

    def _compress(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.compressor.enabled:
            return x, None
        with without_autocast(x):
            if self.pair is None:
                return self.compressor.compress(x)
            values, side = self.compressor.compress(x.detach())
            return apply_function(_SendBeside, x, values, self.pair), side


class ReceiveCompressed(_Boundary):
    """A stage with a compressed input.

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
        super().__init__(stage, compressor, pair=pair)
        self.shape = tuple(shape)

    def forward(self, *payload: Tensor, **kwargs: Any) -> Any:
        return self.stage(self._decode_input(*payload), **kwargs)

    @_disable_dynamo
    def _decode_input(self, values: Tensor, *rest: Tensor) -> Tensor:
        self._check_label(values, rest[-1] if rest else None)
        side = rest[0] if len(rest) == 2 else None
        if not self.compressor.enabled:
            return values
        if self.pair is None:
            with without_autocast(values):
                return self.compressor.decompress(values, side, self.shape)
        with torch.no_grad(), without_autocast(values):
            x = self.compressor.decompress(values, side, self.shape)
        return apply_function(_ReturnBeside, values, x, self.pair)

    def _check_label(self, values: Tensor, label: Tensor | None) -> None:
        activation = f"activation {self.shape} in {values.dtype}"
        ours = f"{self.compressor}, {activation}, enabled={self.compressor.enabled}"
        if label is None or label.ndim != 4 or len(label):
            raise RuntimeError(
                f"this stage expects a payload of SendCompressed ({ours}), and its input is none: "
                "wrap the stage before it in SendCompressed."
            )
        expected = _label(self.compressor, self.shape, values)
        names = (
            "the kind of compressor",
            "its settings (bits, density, rank, seed)",
            "the activation's shape or dtype",
        )
        triples = zip(names, expected, label.shape[1:], strict=True)
        differences = [name for name, here, there in triples if here != there]
        if differences:
            raise RuntimeError(
                f"the two ends of a stage boundary differ in {' and '.join(differences)}. This "
                f"one: {ours}. Give both ends the same compressor and shape."
            )


# Gradients beside the payload


class Pair:
    """The two ends of a boundary, which send gradients in the order of their backwards."""

    def __init__(self, group: dist.ProcessGroup, codec: Compressor) -> None:
        if dist.get_world_size(group) != 2:
            raise ValueError(
                "pair must be a group of the boundary's two ranks, as new_group([0, 1]) makes; "
                f"this one has {dist.get_world_size(group)}."
            )
        self.group, self.codec = group, codec
        self.other = dist.get_global_rank(group, 1 - dist.get_rank(group))
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._number = 0  # of the next gradient

    def __deepcopy__(self, memo: dict[int, object]) -> Pair:
        return self  # a process group cannot be copied

    def send_gradient(self, gradient: Tensor) -> int:
        """Start sending a gradient, and return its number."""
        while len(self._sent) >= MAX_IN_FLIGHT:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()
        bits = self.codec.gradient_bits
        packed = gradient.contiguous() if bits is None else self.codec.pack(gradient, bits)
        self._sent.append((dist.isend(packed, self.other, group=self.group), packed))
        self._number += 1
        return (self._number - 1) % NUMBERS

    def receive_gradient(self, number: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Receive the gradient of this number, of an activation of this shape, with the dtype and
        device of `like`; discard those before it.
        """
        bits = self.codec.gradient_bits
        size = math.prod(shape) if bits is None else self.codec.size(shape, bits, like.dtype)
        packed = torch.empty(size, dtype=like.dtype, device=like.device)
        for _ in range((number - self._number) % NUMBERS + 1):
            dist.recv(packed, self.other, group=self.group)
            self._number += 1
        return packed.view(shape) if bits is None else self.codec.unpack(packed, shape, bits)


class _SendBeside(torch.autograd.Function):
    """Return the payload of x; in backward, receive the gradient of x.

    The payload's gradient holds -1 minus the number of the gradient of x; a positive number means
    that none was sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, pair: Pair) -> Tensor:
        ctx.pair, ctx.shape = pair, tuple(x.shape)
        return values.detach()  # zero-bubble schedules detach in place, which a view refuses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        number = -1 - int(gradient.flatten()[0])
        if number < 0:
            return gradient.new_zeros(ctx.shape), None, None
        return ctx.pair.receive_gradient(number, ctx.shape, gradient), None, None


class _ReturnBeside(torch.autograd.Function):
    """Return the activation x of a payload; in backward, send the gradient of x, and return its
    number as the payload's gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, pair: Pair) -> Tensor:
        ctx.pair, ctx.shape = pair, values.shape
        return x.detach()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        number = ctx.pair.send_gradient(gradient)
        return gradient.new_full(ctx.shape, -1.0 - number), None, None


# Warm-up, and fine-tuning without compressors


def set_compression(model: nn.Module, enabled: bool) -> None:
    """Turn every compressor of the model on or off, on all ranks alike, as in a warm-up without
    compression.

    A tensor-parallel model may be switched at any step. Payloads of stage boundaries change in
    size: create PipelineStage and the schedule again.
    """
    for module in model.modules():
        if isinstance(module, Compressor):
            module.enabled = bool(enabled)


def drop_compressors(model: nn.Module) -> nn.Module:
    """Return the model without compressors, on all ranks alike, for fine-tuning (MCBench, table
    5).

    The other keys of the state dict stay as they are, those of a model that never had compressors:
    load the checkpoint before, or with strict=False afterwards. Create PipelineStage and the
    optimizer again.
    """
    while isinstance(model, _Boundary):
        model = model.stage
    for module in list(model.modules()):
        # named_children() has a child under one name only.
        for name, child in list(module._modules.items()):
            if isinstance(child, Compressor):
                setattr(module, name, Identity())
            elif isinstance(child, _Boundary):
                setattr(module, name, drop_compressors(child))
    return model
