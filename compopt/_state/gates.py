"""Whether a commit writes a tensor: known on the host, or behind a gate of the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor


class Gates:
    """Booleans of the device, of all tensors of a step, in the forms that operators want.

    What is asked for is made once for all of them. ``memory``, as many float32, is where kernels
    look: the same in every step, so that what they are told of it stays true.
    """

    def __init__(self, writes: Tensor, applied: Tensor, memory: Tensor):
        self.all, self.applied = writes, applied  # whether the step is applied at all
        self._memory = memory

    @cached_property
    def writes(self) -> tuple[Tensor, ...]:
        return self.all.unbind()

    @cached_property
    def flags(self) -> Tensor:
        """1 and 0, float32, in the memory that stays."""
        return self._memory.copy_(self.all)

    @cached_property
    def ones(self) -> tuple[Tensor, ...]:
        return self.flags.unbind()

    @cached_property
    def zeros(self) -> tuple[Tensor, ...]:
        return self.all.logical_not().float().unbind()

    def cut(self, start: int, stop: int) -> list[Gated]:
        """Those of some tensors."""
        return [Gated(self, i) for i in range(start, stop)]


class Gated:
    """Whether one tensor is written, where only the device knows: without a dimension.

    True, as ``bool`` takes it: there is a commit to enqueue.
    """

    __slots__ = ("_gates", "_i")

    def __init__(self, gates: Gates, i: int):
        self._gates, self._i = gates, i

    @property
    def applied(self) -> Tensor:
        """Whether the step is applied, to whatever tensors; a boolean."""
        return self._gates.applied

    @property
    def writes(self) -> Tensor:
        """As a boolean."""
        return self._gates.writes[self._i]

    @property
    def one(self) -> Tensor:
        """1 where it is, else 0; float32."""
        return self._gates.ones[self._i]

    @property
    def zero(self) -> Tensor:
        """0 where it is, else 1; float32."""
        return self._gates.zeros[self._i]


# Where the host knows it is False or True.
Gate = bool | Gated


def writes_of(gates: Sequence[Gated]) -> Tensor:
    """Those of tensors that follow each other, as booleans in one vector."""
    first, last = gates[0], gates[-1]
    return first._gates.all[first._i : last._i + 1]


def flags_of(gates: Sequence[Gated]) -> Tensor:
    """The same as 1 and 0, float32, in the memory that stays."""
    first, last = gates[0], gates[-1]
    return first._gates.flags[first._i : last._i + 1]
