"""A gradient that returns across a stage boundary beside the payload, over a group of the two
ranks.

Every gradient has a number, and its number is what returns in the payload's place: to find out
shapes, torch's pipelining goes through the backward of some stages and not of others, and what was
sent then must not be taken for the first real gradient.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .codecs import Compressor

# One that nobody asked for, one on its way, one being made.
IN_FLIGHT = 3
# That bfloat16 holds exactly.
NUMBERS = 128


class Pair:
    """The two ends of a boundary.

    Gradients are sent in the order of the backwards, which both ends share.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Compressor) -> None:
        if dist.get_world_size(group) != 2:
            raise ValueError(
                "pair must be a group of the boundary's two ranks, as new_group([0, 1]) makes; "
                f"this one has {dist.get_world_size(group)}."
            )
        self.group, self.codec = group, codec
        self.other = dist.get_global_rank(group, 1 - dist.get_rank(group))
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        # Of the next gradient.
        self._number = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Pair:
        # A process group cannot be copied.
        return self

    def send(self, gradient: Tensor) -> int:
        """Start sending; returns the gradient's number."""
        while len(self._sent) >= IN_FLIGHT:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()
        bits = self.codec.gradient_bits
        packed = gradient.contiguous() if bits is None else self.codec.pack(gradient, bits)
        self._sent.append((dist.isend(packed, self.other, group=self.group), packed))
        self._number += 1
        return (self._number - 1) % NUMBERS

    def receive(self, number: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The gradient of that number, of an activation of that shape, as `like` is in precision
        and device.
        """
        bits = self.codec.gradient_bits
        size = math.prod(shape) if bits is None else self.codec.size(shape, bits, like.dtype)
        packed = torch.empty(size, dtype=like.dtype, device=like.device)
        for _ in range((number - self._number) % NUMBERS + 1):
            dist.recv(packed, self.other, group=self.group)
            self._number += 1
        return packed.view(shape) if bits is None else self.codec.unpack(packed, shape, bits)


class SendBeside(torch.autograd.Function):
    """The payload of x.

    What returns for it is the number of x's gradient, below zero; else none was sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, pair: Pair) -> Tensor:
        ctx.pair, ctx.shape = pair, tuple(x.shape)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        number = -1 - int(gradient.flatten()[0])
        if number < 0:
            return gradient.new_zeros(ctx.shape), None, None
        return ctx.pair.receive(number, ctx.shape, gradient), None, None


class ReturnBeside(torch.autograd.Function):
    """What a payload was unpacked to.

    Its gradient is sent; in the payload's place returns the gradient's number.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, x: Tensor, pair: Pair) -> Tensor:
        ctx.pair, ctx.shape = pair, values.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        number = ctx.pair.send(gradient)
        return gradient.new_full(ctx.shape, -1.0 - number), None, None
