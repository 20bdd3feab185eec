"""State in host memory that passes through two device buffers, one tensor at a time.

While the step works on tensor i, tensor i + 1 is copied in and tensor i - 1 is copied out, each on
its own stream. ``DoubleBuffer.iterate`` states the order in terms of three streams and events
between them. ``DeviceStreams`` implements them on an accelerator, ``NoStreams`` on a device without
streams. Tests use a third implementation, which delays every stream as far as the events allow.

There are three waits: work waits for the copy in, the copy out waits for the work, and the copy
into a buffer waits for the last copy out of it. A tensor always passes through the same buffer, so
the third also orders a copy in after the copy out of the same tensor.

``Bucket`` asks for offloaded state by ``Bucket.iterate_state``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .tensors import get_device_module, has_streams


class Streams(Protocol):
    """The streams on which copies run.

    ``stream`` is "in" or "out". An event may be any object; None has always happened.
    """

    def copy(self, stream: str, to: Tensor, source: Tensor, after: Any) -> Any:
        """Copy after the event ``after``; return the event of its completion."""

    def record_work(self) -> Any:
        """Return the event of the completion of all work issued so far."""

    def delay_work(self, event: Any) -> None:
        """Make work that is issued from now on wait for ``event``."""

    def finish(self) -> None:
        """Block the host until all copies have completed."""


class NoStreams:
    """Synchronous copies, in the order in which they are requested."""

    def copy(self, stream: str, to: Tensor, source: Tensor, after: Any) -> None:
        to.copy_(source)

    def record_work(self) -> None: ...

    def delay_work(self, event: Any) -> None: ...

    def finish(self) -> None: ...


class DeviceStreams:
    """One stream for each direction, beside the current stream, on which work is issued."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = {name: self._module.Stream(device) for name in ("in", "out")}

    @property
    def _module(self) -> Any:
        # not an attribute: modules cannot be copied or pickled, optimizers can
        return get_device_module(self.device)

    def copy(self, stream: str, to: Tensor, source: Tensor, after: Any) -> Any:
        device_stream = self.streams[stream]
        if after is not None:
            device_stream.wait_event(after)
        with self._module.stream(device_stream):
            to.copy_(source, non_blocking=True)
        return device_stream.record_event()

    def record_work(self) -> Any:
        return self._module.current_stream(self.device).record_event()

    def delay_work(self, event: Any) -> None:
        self._module.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()


class DoubleBuffer:
    """Two device buffers for tensors of one dtype, as large as the largest that passed through."""

    def __init__(self, streams: Streams, dtype: torch.dtype, device: torch.device):
        self.streams = streams
        self.buffers = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]
        self.free: list[Any] = [None, None]  # events after which each buffer may be overwritten

    def iterate(self, tensors: Sequence[Tensor], write: bool) -> Iterator[Tensor]:
        """Yield every host tensor on the device, valid until the next is requested.

        With ``write`` it is then copied back. None, for a tensor without such state, is yielded
        unchanged.
        """
        passing = [t for t in tensors if t is not None]
        largest = max((t.numel() for t in passing), default=0)
        if self.buffers[0].numel() < largest:
            self.streams.finish()
            self.buffers = [b.new_empty(largest) for b in self.buffers]
            # work that used the old memory has to complete first
            self.free = 2 * [self.streams.record_work()]
        arrivals = [self._copy_in(k, t) for k, t in enumerate(passing[:1])]
        k = 0
        for tensor in tensors:
            if tensor is None:
                yield tensor
                continue
            self.streams.delay_work(arrivals[k])
            if k + 1 < len(passing):
                arrivals.append(self._copy_in(k + 1, passing[k + 1]))
            try:
                yield self._view_buffer(k, tensor)
            finally:  # also where the caller does not request the next tensor
                end = self.streams.record_work()
                if write:
                    end = self.streams.copy("out", tensor, self._view_buffer(k, tensor), end)
                self.free[k % 2] = end
            k += 1

    def _view_buffer(self, k: int, tensor: Tensor) -> Tensor:
        return self.buffers[k % 2][: tensor.numel()].view(tensor.shape)

    def _copy_in(self, k: int, tensor: Tensor) -> Any:
        return self.streams.copy("in", self._view_buffer(k, tensor), tensor, self.free[k % 2])


class Offload:
    """The kinds of state that are stored on the host, and the buffers through which they pass."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self.buffers: dict[tuple[str, torch.dtype, torch.device], DoubleBuffer] = {}
        self.streams: dict[torch.device, Streams] = {}

    def iterate(
        self, name: str, tensors: Sequence[Tensor], device: torch.device, write: bool
    ) -> Iterator[Tensor]:
        """Iterate as :meth:`DoubleBuffer.iterate`; every kind of state has its own buffers."""
        dtype = next((t.dtype for t in tensors if t is not None), torch.float32)
        if device not in self.streams:
            self.streams[device] = DeviceStreams(device) if has_streams(device) else NoStreams()
        if (name, dtype, device) not in self.buffers:
            self.buffers[name, dtype, device] = DoubleBuffer(self.streams[device], dtype, device)
        return self.buffers[name, dtype, device].iterate(tensors, write)

    def finish(self) -> None:
        """Wait until all copies to host memory have completed.

        Call it before host memory is read or written other than by ``iterate``.
        """
        for streams in self.streams.values():
            streams.finish()
