"""Costs of the compressors of activations: bytes, computation and accuracy.

What one sends and computes is found by running its own code on tensors without memory. So there is
one source of both, the codec itself: also one of your own. Nothing is timed. Accuracies are
measured.

``layer_prediction`` makes times of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..activations import AutoEncoder, PowerSGD, Quantize, RandomK, TopK
from ..activations.base import Compressor, TensorParallelRanks
from .hardware import QR_SLOWDOWN, TOP_K_PASSES, Speed

# Percent of digits classified correctly without compression, in the setup of the rows below.
UNCOMPRESSED = 94.3
MEASURED_ON = (
    "digits by a 4-layer encoder of width 64, fine-tuned for 300 steps at tensor 2 x pipeline 2, "
    "layers and boundary compressed, three seeds"
)


@dataclass(frozen=True)
class Kind:
    """A compressor, and its ``settings`` for a number of tokens and a width.

    ``label`` is its name in bench/results/mcbench-quality.csv, ``accuracy`` the mean percent on
    `MEASURED_ON`. ``options`` are keyword arguments.
    """

    codec: Callable[..., Compressor]
    settings: Callable[[int, int], tuple[float, ...]]
    label: str
    accuracy: float
    options: dict[str, int] = field(default_factory=dict)

    def text(self, tokens: int, hidden: int) -> str:
        """The constructor call."""
        words = [f"{value:g}" for value in self.settings(tokens, hidden)]
        words += [f"{name}={value}" for name, value in self.options.items()]
        return f"{getattr(self.codec, '__name__', '')}({', '.join(words)})"

    def make(self, tokens: int, hidden: int) -> Compressor:
        """Construct it without memory, to count its operations."""
        with torch.device("meta"):
            return self.codec(*self.settings(tokens, hidden), **self.options)


def same_setting(value: float) -> Callable[[int, int], tuple[float, ...]]:
    return lambda tokens, hidden: (value,)


def code_width(ratio: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda tokens, hidden: (hidden, max(1, round(hidden / ratio)))


def factor_ranks(ratio: int) -> Callable[[int, int], tuple[int, ...]]:
    """The rank whose factors are ``ratio`` times smaller than the activation, and the width."""

    def settings(tokens: int, hidden: int) -> tuple[int, ...]:
        rank = round(tokens * hidden / ratio / (tokens + hidden))
        return max(1, min(hidden, rank)), hidden

    return settings


# By name; a new compressor is one line here. Half of the bytes of a TopK are positions. "Both
# ways": the gradient returns in as few bits as the payload.
COMPRESSORS: dict[str, Kind] = {
    "AutoEncoder, 1/20": Kind(AutoEncoder, code_width(20), "A1", 76.7),
    "AutoEncoder, 1/10": Kind(AutoEncoder, code_width(10), "A2", 86.4),
    "TopK, 1/40": Kind(TopK, same_setting(1 / 40), "T1", 83.6),
    "TopK, 1/20": Kind(TopK, same_setting(1 / 20), "T2", 91.9),
    "RandomK, 1/20": Kind(RandomK, same_setting(1 / 20), "R1", 58.9),
    "RandomK, 1/10": Kind(RandomK, same_setting(1 / 10), "R2", 77.4),
    "PowerSGD, 1/20": Kind(PowerSGD, factor_ranks(20), "P1", 18.5),
    "PowerSGD, 1/10": Kind(PowerSGD, factor_ranks(10), "P2", 38.4),
    "Quantize, 2 bits": Kind(Quantize, same_setting(2), "Q1", 93.3),
    "Quantize, 4 bits": Kind(Quantize, same_setting(4), "Q2", 94.1),
    "Quantize, 8 bits": Kind(Quantize, same_setting(8), "8 bits", 94.1),
    "Quantize, 4 both ways": Kind(
        Quantize, same_setting(4), "4 bits back too", 93.9, {"gradient_bits": 4}
    ),
    "Quantize, 8 both ways": Kind(
        Quantize, same_setting(8), "8 bits back too", 94.2, {"gradient_bits": 8}
    ),
}


# Operators that allocate or change a shape, and move nothing.
FREE_OPERATORS = {"aten::empty_like", "aten::empty", "aten::new_empty", "aten::_unsafe_view"}
PRODUCT_OPERATORS = {"aten::mm", "aten::bmm", "aten::addmm"}


@dataclass
class Work:
    """Bytes moved in memory, and FLOPs of matrix products and factorizations in float32 and in 16
    bits.
    """

    traffic: float = 0.0
    flops: float = 0.0
    half_flops: float = 0.0

    def seconds(self, speed: Speed) -> float:
        """Seconds on one rank; passes and products follow one another."""
        return (
            self.traffic / speed.memory_bytes_per_s
            + self.flops / speed.flops_per_s
            + self.half_flops / speed.half_flops_per_s
        )


def dtype_of(activation_bytes: int) -> torch.dtype:
    """bfloat16 or float32; ValueError for other sizes."""
    if activation_bytes not in (2, 4):
        raise ValueError(f"activation_bytes must be 2 or 4; got {activation_bytes}.")
    return torch.bfloat16 if activation_bytes == 2 else torch.float32


@dataclass(frozen=True)
class Exchange:
    """One all-reduce of a row-parallel layer's output through a compressor, on one rank.

    Bytes that this rank hands to each all-reduce and all-gather in forward, and to all-reduces in
    backward (of an auto-encoder's weights); and the compressor's own work.
    """

    reduced: tuple[int, ...]
    gathered: tuple[int, ...]
    reduced_back: tuple[int, ...]
    forward: Work
    backward: Work


@dataclass(frozen=True)
class Crossing:
    """One activation across a stage boundary, and its gradient back: bytes each way, and the work
    of sender and receiver, each way.
    """

    forth: int
    back: int
    send: Work
    receive: Work
    receive_back: Work
    send_back: Work


class _WorkCounter(TorchDispatchMode):
    """Adds up the cost of every operation inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __enter__(self) -> Work:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self.work

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        views = [
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ]
        if name in FREE_OPERATORS or any(views):
            return out
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name == "aten::topk":
            self.work.traffic += TOP_K_PASSES * inputs[0].nbytes
            return out
        if name == "aten::index":
            # Only the selected elements are read.
            inputs = [*inputs[1:], *outputs]
        self.work.traffic += sum(x.nbytes for x in (*inputs, *outputs))
        if name == "aten::linalg_qr":
            rows, columns = sorted(inputs[0].shape[-2:], reverse=True)
            self.work.flops += 4 * rows * columns**2 * QR_SLOWDOWN
        elif name in PRODUCT_OPERATORS:
            flops = 2.0 * outputs[0].numel() * inputs[-2].shape[-1]
            if outputs[0].element_size() < 4:
                self.work.half_flops += flops
            else:
                self.work.flops += flops
        return out


class _RecordingRanks(TensorParallelRanks):
    """Ranks that only record the bytes that they are handed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reduced: list[int] = []
        self.gathered: list[int] = []
        self.reduced_back: list[int] = []

    def sum(self, x: Tensor) -> Tensor:
        self.reduced.append(x.nbytes)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        self.gathered.append(x.nbytes)
        return [x] * self.size

    def shared(self, weight: Tensor) -> Tensor:
        view = weight.view_as(weight)
        view.register_hook(lambda gradient: self.reduced_back.append(gradient.nbytes))
        return view


def _count_backward(
    y: Tensor, x: Tensor, codec: Compressor, gradient: Tensor
) -> tuple[Tensor, Work]:
    """The gradient of x, and the work of computing it and those of the codec's weights."""
    needed = [x, *codec.parameters()]
    with _WorkCounter() as work:
        gradients = torch.autograd.grad(y, needed, gradient, allow_unused=True)
    return gradients[0], work


def exchange_of(
    codec: Compressor, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> Exchange:
    """Count the bytes and work of one all-reduce of an activation of this shape, (sequences,
    tokens, hidden), through a compressor on the meta device, on each of ``ranks`` ranks.
    """
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    group = _RecordingRanks(ranks)
    # A codec's random numbers must not come from the caller's generator.
    with torch.random.fork_rng(devices=[]), _WorkCounter() as forward:
        y = codec(x, group)
    _, backward = _count_backward(y, x, codec, torch.empty_like(y))
    return Exchange(
        tuple(group.reduced), tuple(group.gathered), tuple(group.reduced_back), forward, backward
    )


def crossing_of(codec: Compressor, shape: tuple[int, ...], dtype: torch.dtype) -> Crossing:
    """Count the bytes and work of one micro-batch's activation across a stage boundary, wrapped in
    SendCompressed and ReceiveCompressed with a compressor on the meta device.
    """
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    is_separate = codec.straight_through and not codec.fits_payload()
    with torch.random.fork_rng(devices=[]), _WorkCounter() as send:
        values, side = codec.compress(x.detach() if is_separate else x)
    forth = values.nbytes + (0 if side is None else side.nbytes)
    arrived = values.detach().requires_grad_()
    with _WorkCounter() as receive:
        y = codec.decompress(arrived, side, shape)
    if not is_separate:
        gradient, receive_back = _count_backward(y, arrived, codec, torch.empty_like(y))
        _, send_back = _count_backward(values, x, codec, gradient)
        return Crossing(forth, gradient.nbytes, send, receive, receive_back, send_back)
    packed, receive_back, send_back = x, Work(), Work()
    if codec.gradient_bits is not None:
        with _WorkCounter() as receive_back:
            packed = codec.pack(x, codec.gradient_bits)
        with _WorkCounter() as send_back:
            codec.unpack(packed, shape, codec.gradient_bits)
    # What returns the number of the gradient (see ``pipeline``) has the payload's size.
    back = values.nbytes + packed.nbytes
    return Crossing(forth, back, send, receive, receive_back, send_back)
