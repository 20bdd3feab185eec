"""Whether a commit writes a tensor: known on the host, or behind a gate of the device."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor


class Gates:
    """Booleans of the device, of all tensors of a step, in the forms that operators want.

    What is asked for is made once for all of them.
    """

    def __init__(self, writes: Tensor):
        self._writes = writes

    @cached_property
    def writes(self) -> tuple[Tensor, ...]:
        return self._writes.unbind()

    @cached_property
    def ones(self) -> tuple[Tensor, ...]:
        return self._writes.float().unbind()

    @cached_property
    def zeros(self) -> tuple[Tensor, ...]:
        return self._writes.logical_not().float().unbind()

    def cut(self, start: int, stop: int) -> list[Gate]:
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
