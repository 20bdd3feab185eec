"""What a compressor of activations sends and computes, found by running its own code on tensors
that have a shape and no memory.

So there is one source of both, the codec itself: also one of your own. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..activations import Compressor
from ..activations.codecs import Alone
from .devices import Speed

# torch.topk, in passes over what it selects from: 18 to 32 on a CPU, 22 and 32 in MCBench's
# table 6.
TOP_K_PASSES = 25
# A QR factorisation comes at this share of a product's speed.
QR_SHARE = 1 / 20
# These allocate, or give a tensor another shape, and move nothing.
FREE = {"aten::empty_like", "aten::empty", "aten::new_empty", "aten::_unsafe_view"}
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm"}


@dataclass
class Work:
    """What operations cost: bytes moved in memory, FLOPs of products in float32 and 16 bits."""

    traffic: float = 0.0
    flops: float = 0.0
    half_flops: float = 0.0

    def seconds(self, speed: Speed) -> float:
        """Of one rank; passes and products follow one another."""
        return (
            self.traffic / speed.memory_bytes_per_s
            + self.flops / speed.flops_per_s
            + self.half_flops / speed.half_flops_per_s
        )


@dataclass(frozen=True)
class Exchange:
    """One all-reduce of a row-parallel layer's output through a compressor, on one rank.

    Args:
        reduced, gathered: bytes that this rank hands to each all-reduce and all-gather, forward.
        reduced_back: the same of all-reduces in backward: an auto-encoder's weights'.
        forward, backward: the compressor's own work.
    """

    reduced: tuple[int, ...]
    gathered: tuple[int, ...]
    reduced_back: tuple[int, ...]
    forward: Work
    backward: Work


@dataclass(frozen=True)
class Crossing:
    """One activation across a stage boundary, and its gradient back.

    Args:
        forth, back: bytes that cross.
        send, receive: work of the sender and the receiver, forward.
        receive_back, send_back: the same, backward.
    """

    forth: int
    back: int
    send: Work
    receive: Work
    receive_back: Work
    send_back: Work


class _Counter(TorchDispatchMode):
    """Adds up what every operation inside costs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

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
        if name in FREE or any(views):
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._count(name, given, made)
        return out

    def _count(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        if name == "aten::topk":
            self.work.traffic += TOP_K_PASSES * given[0].nbytes
            return
        if name == "aten::index":
            # Only what is chosen is read.
            given = [*given[1:], *made]
        self.work.traffic += sum(x.nbytes for x in (*given, *made))
        if name == "aten::linalg_qr":
            rows, columns = sorted(given[0].shape[-2:], reverse=True)
            self.work.flops += 4 * rows * columns**2 / QR_SHARE
        elif name in PRODUCTS:
            flops = 2.0 * made[0].numel() * given[-2].shape[-1]
            if made[0].element_size() < 4:
                self.work.half_flops += flops
            else:
                self.work.flops += flops


class _Ranks(Alone):
    """Ranks that only write down what they are handed."""

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


@contextmanager
def _counted() -> Iterator[Work]:
    with _Counter() as counter:
        yield counter.work


def _activation(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _back(y: Tensor, x: Tensor, codec: Compressor, gradient: Tensor) -> tuple[Tensor, Work]:
    """The gradient of x, and the work of it and of the gradients of the codec's weights."""
    needed = [x, *codec.parameters()]
    with _counted() as work:
        found = torch.autograd.grad(y, needed, gradient, allow_unused=True)
    return found[0], work


def exchange_of(
    codec: Compressor, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> Exchange:
    """What one all-reduce through this compressor takes, on each of `ranks` ranks.

    Args:
        codec: made on the meta device, ``with torch.device("meta")``.
        shape, dtype: of the activation, (sequences, tokens, hidden).
    """
    x, group = _activation(shape, dtype), _Ranks(ranks)
    # A codec that draws must not draw from the caller's generator.
    with torch.random.fork_rng(devices=[]), _counted() as forward:
        y = codec(x, group)
    _, backward = _back(y, x, codec, torch.empty_like(y))
    return Exchange(
        tuple(group.reduced), tuple(group.gathered), tuple(group.reduced_back), forward, backward
    )


def crossing_of(codec: Compressor, shape: tuple[int, ...], dtype: torch.dtype) -> Crossing:
    """What a stage boundary wrapped in SendCompressed and ReceiveCompressed takes.

    Args:
        codec: made on the meta device.
        shape, dtype: of one micro-batch's activation.
    """
    x = _activation(shape, dtype)
    beside = codec.straight_through and not codec.fits_payload()
    with torch.random.fork_rng(devices=[]), _counted() as send:
        values, side = codec.compress(x.detach() if beside else x)
    forth = values.nbytes + (0 if side is None else side.nbytes)
    arrived = values.detach().requires_grad_()
    with _counted() as receive:
        y = codec.decompress(arrived, side, shape)
    if beside:
        return _beside(codec, x, values, Crossing(forth, 0, send, receive, Work(), Work()))
    gradient, receive_back = _back(y, arrived, codec, torch.empty_like(y))
    _, send_back = _back(values, x, codec, gradient)
    return Crossing(forth, gradient.nbytes, send, receive, receive_back, send_back)


def _beside(codec: Compressor, x: Tensor, values: Tensor, found: Crossing) -> Crossing:
    """A gradient that returns beside the payload, in whose place its number does."""
    bits = codec.gradient_bits
    packed, receive_back, send_back = x, Work(), Work()
    if bits is not None:
        with _counted() as receive_back:
            packed = codec.pack(x, bits)
        with _counted() as send_back:
            codec.unpack(packed, tuple(x.shape), bits)
    back = values.nbytes + packed.nbytes
    return Crossing(found.forth, back, found.send, found.receive, receive_back, send_back)
