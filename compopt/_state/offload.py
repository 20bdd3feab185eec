"""State that lives in host memory and passes through two device buffers, a tensor at a time.

While tensor i is worked on, tensor i + 1 is on its way in and tensor i - 1 on its way out, each on
a stream of its own. What must have happened before what is written here once
(``DoubleBuffer.each``), in terms of three streams and of events between them; ``DeviceStreams`` is
these on an accelerator, ``NoStreams`` where a device has none. The tests put a third there that
delays every stream as far as the events allow.

Three waits are needed: work, for what comes in; the way out, for the work; the way into a buffer,
for what was last in it. A tensor always passes through the same buffer, so the last covers the way
in of what has just gone out, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .tensors import get_device_module, has_streams


class Streams(Protocol):
    """Where copies run.

    ``stream`` is "in" or "out"; an event is anything, and None has always happened.
    """

    def copy(self, stream: str, to: Tensor, source: Tensor, after: Any) -> Any:
        """Copy when the event ``after`` has happened; returns the event of its end."""

    def worked(self) -> Any:
        """The event of the end of all work given to the device so far."""

    def hold(self, event: Any) -> None:
        """Let work that is given to the device from now on wait for ``event``."""

    def finish(self) -> None:
        """Wait, on the host, until everything has ended."""


class NoStreams:
    """Everything happens at once, in the order in which it is asked for."""

    def copy(self, stream: str, to: Tensor, source: Tensor, after: Any) -> None:
        to.copy_(source)

    def worked(self) -> None: ...

    def hold(self, event: Any) -> None: ...

    def finish(self) -> None: ...


class DeviceStreams:
    """A stream for each direction, beside the one that is current when work is issued."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = {name: self._module.Stream(device) for name in ("in", "out")}

    @property
    def _module(self) -> Any:
        return get_device_module(self.device)  # not kept: an optimizer is copied and pickled

    def copy(self, stream: str, to: Tensor, source: Tensor, after: Any) -> Any:
        own = self.streams[stream]
        if after is not None:
            own.wait_event(after)
        with self._module.stream(own):
            to.copy_(source, non_blocking=True)
        return own.record_event()

    def worked(self) -> Any:
        return self._module.current_stream(self.device).record_event()

    def hold(self, event: Any) -> None:
        self._module.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()


class DoubleBuffer:
    """Two device buffers for tensors of one dtype, as large as the largest that passed through."""

    def __init__(self, streams: Streams, dtype: torch.dtype, device: torch.device):
        self.streams = streams
        self.buffers = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]
        self.free: list[Any] = [None, None]  # when each buffer may be written to

    def each(self, tensors: Sequence[Tensor], write: bool) -> Iterator[Tensor]:
        """Every host tensor, on the device, valid until the next is asked for.

        With ``write`` it is then stored. None stays None: of some kinds of state tensors have none.
        """
        passing = [t for t in tensors if t is not None]
        self._grow(max((t.numel() for t in passing), default=0))
        arriving = [self._fetch(k, t) for k, t in enumerate(passing[:1])]
        k = 0
        for tensor in tensors:
            if tensor is None:
                yield tensor
                continue
            self.streams.hold(arriving[k])
            if k + 1 < len(passing):
                arriving.append(self._fetch(k + 1, passing[k + 1]))
            try:
                yield self._view(k, tensor)
            finally:  # also where nobody asks for what comes after the last
                end = self.streams.worked()
                if write:
                    end = self.streams.copy("out", tensor, self._view(k, tensor), end)
                self.free[k % 2] = end
            k += 1

    def _view(self, k: int, tensor: Tensor) -> Tensor:
        return self.buffers[k % 2][: tensor.numel()].view(tensor.shape)

    def _fetch(self, k: int, tensor: Tensor) -> Any:
        return self.streams.copy("in", self._view(k, tensor), tensor, self.free[k % 2])

    def _grow(self, n: int) -> None:
        if self.buffers[0].numel() < n:
            self.streams.finish()
            self.buffers = [torch.empty(n, dtype=b.dtype, device=b.device) for b in self.buffers]
            self.free = 2 * [self.streams.worked()]  # what used this memory before has to end


class Offload:
    """The host's share of an optimizer's state: which kinds, and the buffers they pass through."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self.buffers: dict[tuple[str, torch.dtype, torch.device], DoubleBuffer] = {}
        self.streams: dict[torch.device, Streams] = {}

    def each(
        self, name: str, tensors: Sequence[Tensor], device: torch.device, write: bool
    ) -> Iterator[Tensor]:
        """As :meth:`DoubleBuffer.each`; every kind of state has buffers of its own."""
        dtype = next((t.dtype for t in tensors if t is not None), torch.float32)
        if device not in self.streams:
            self.streams[device] = DeviceStreams(device) if has_streams(device) else NoStreams()
        if (name, dtype, device) not in self.buffers:
            self.buffers[name, dtype, device] = DoubleBuffer(self.streams[device], dtype, device)
        return self.buffers[name, dtype, device].each(tensors, write)

    def finish(self) -> None:
        """Wait until host memory holds what it should.

        Call it before anything but ``each`` reads or writes there.
        """
        for streams in self.streams.values():
            streams.finish()
