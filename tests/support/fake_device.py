"""A device that is not the CPU, in Python: PyTorch's PrivateUse1, whose tensors hold a tensor of the host inside.

It computes what the CPU computes, to the bit, and writes down what a real one would wait for or refuse:

- ``accesses``: the host wants to know a number of the device (``.item()``, ``.tolist()``, ``bool(x)``), or how many
  there are (``nonzero``), or waits for a copy into memory of its own;
- ``mixed``: an operator is given tensors of both, which are not one number of the host's, nor a copy;
- ``launches``, ``uploads`` and ``moved``, where that is asked for: operators that are work for the device, copies to
  it, bytes of its memory.

Each is said by the place in compopt that led to it; of ``moved`` there is one number.
A process that has registered the device keeps it: use a child.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from device_calls import COPIES, aten, launches, moves, place, waits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those that an operator is given, alone or in lists. This and ``mapped`` are torch's pytrees, but quick."""
    results = []
    for x in values:
        if isinstance(x, torch.Tensor):
            results.append(x)
        elif isinstance(x, list | tuple):
            results += tensors_of(x)
    return results


@functools.cache
def kind_of(packet: Any) -> tuple[bool, bool]:
    """Return whether operators of this name pin memory, or ask for it, and whether they copy."""
    return packet in (aten._pin_memory, aten.is_pinned), packet in COPIES


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """With ``change`` made to whatever is in these lists."""
    if type(x) in (list, tuple):
        return type(x)([mapped(change, y) for y in x])
    return change(x)


class OnDevice(torch.Tensor):
    """A tensor of the device; ``held`` is what it holds."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: torch.Tensor):
        self.held = held

    def __repr__(self) -> str:
        return f"on the device: {self.held!r}"

    def tolist(self) -> Any:
        """Torch's refuses subclasses; what it does with other devices is this."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Device.running().compute(function, args, kwargs or {})


def _held(x: Any) -> Any:
    return x.held if isinstance(x, OnDevice) else torch.device("cpu") if isinstance(x, torch.device) else x


class Device(TorchDispatchMode):
    """While it is entered, tensors can be made there, and what is done with them is written down."""

    stack: list[Device] = []

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts  # launches, uploads and moved, which take as long as all the rest
        self.accesses: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.moved = 0
        self.pinned: list[torch.Tensor] = []  # kept, so that no other tensor lies where one of them was

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would take seconds to import, and has nothing to do here

    @classmethod
    def running(cls) -> Device:
        return cls.stack[-1]

    def __enter__(self):
        self.stack.append(self)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=...): by a copy that is seen
        return super().__enter__()

    def __exit__(self, *error):
        self.stack.pop()
        torch._C._set_only_lift_cpu_tensors(bool(self.stack))
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.compute(function, args, kwargs or {})

    def compute(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = tensors_of((*args, *kwargs.values()) if kwargs else args)
        ours = [x for x in given if isinstance(x, OnDevice)]
        packet = function.overloadpacket
        is_pin, is_copy = kind_of(packet)
        if is_pin:
            return self._pin(packet, given[0])
        to = kwargs.get("device")
        on_device = to.type == NAME if to is not None else bool(ours)
        if is_copy:
            on_device = self._copied(packet, args, kwargs)
        elif ours:
            self._look(function, packet, args, kwargs, given, ours)
        if not ours and not on_device:
            return function(*args, **kwargs)
        inner = {name: mapped(_held, x) for name, x in kwargs.items() if name != "pin_memory"} if kwargs else kwargs
        result = function(*mapped(_held, args), **inner)
        for x in ours:
            assert x.shape == x.held.shape, f"{function} changed a shape in place"
        result = self._wrapped(result, {id(x.held): x for x in ours}) if on_device else result
        if self.counts:
            self._count(function, (args, kwargs), result, given, on_device)
        return result

    def _count(self, function, kept, result, given, on_device) -> None:
        """A launch, or a copy from the host, where compopt asks for it."""
        where = place()
        if where and on_device and function.overloadpacket in COPIES and not isinstance(given[-1], OnDevice):
            self.uploads[where] += 1
        elif where and launches(function):
            self.launches[f"{where}: {function.overloadpacket}"] += 1
            self.moved += moves(function, *kept, result, lambda x: isinstance(x, OnDevice))

    def _wrapped(self, result: Any, outer: dict[int, OnDevice]) -> Any:
        """Return what an operator returns: tensors that it was given, or new ones of the device."""

        def on_device(held: Any) -> Any:
            if not isinstance(held, torch.Tensor):
                return held
            return outer[id(held)] if id(held) in outer else OnDevice(held)

        return mapped(on_device, result)

    def _look(self, function, packet, args, kwargs, given, ours) -> None:
        """Count where this operator would make the host wait, and refuse what a real device would not take."""
        if waits(function, args, kwargs):
            self._note(self.accesses)
        if len(ours) == len(given):
            return
        hosts = [x for x in given if not isinstance(x, OnDevice)]
        number = all(x.dim() == 0 for x in hosts) and isinstance(args[0], OnDevice | float | int)
        if not (number and not packet.__name__.startswith(("_fused", "_foreach"))):
            self._note(self.mixed)
            raise RuntimeError(f"Expected all tensors to be on the same device, but {packet} was given two.")

    def _copied(self, packet, args, kwargs) -> bool:
        """Return True if a copy ends on the device; the host waits where it goes from there to pageable memory."""
        if packet is aten._to_copy:
            source, to = args[0], kwargs.get("device")
            there = isinstance(source, OnDevice) if to is None else to.type == NAME
            waits = isinstance(source, OnDevice) and not there
        else:
            there, source = isinstance(args[0], OnDevice), args[1]
            late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            waits = isinstance(source, OnDevice) and not there and not (late and self._is_pinned(args[0]))
        if waits:
            self._note(self.accesses)
        return there

    def _note(self, where: Counter[str]) -> None:
        if message := place():
            where[message] += 1

    def _pin(self, packet, tensor: torch.Tensor) -> Any:
        if packet is aten.is_pinned:
            return self._is_pinned(tensor)
        assert not isinstance(tensor, OnDevice), "a tensor of the device cannot be pinned"
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        where = tensor.untyped_storage().data_ptr()
        return any(where == kept.untyped_storage().data_ptr() for kept in self.pinned)


class Event:
    """A point that the device has passed: the host may ask, and waits where it waits for it."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Device.running()._note(Device.running().accesses)


class Stream:
    """Everything happens at once here; which stream was current is all that can be seen of streams."""

    current: list[Stream] = []

    def __init__(self, device: Any = None):
        self.events = 0

    def record_event(self) -> Event:
        self.events += 1
        return Event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None: ...


class Module(_DummyBackendModule):
    """``torch.pretend``."""

    Stream, default = Stream, Stream()

    def synchronize(self, device: Any = None) -> None: ...

    def set_device(self, index: int) -> None: ...

    def current_stream(self, device: Any = None) -> Stream:
        return self.default

    @contextmanager
    def stream(self, stream: Stream):
        Stream.current.append(stream)
        yield
        Stream.current.pop()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def _lazy_init(self) -> None: ...


@functools.cache
def register() -> torch.device:
    """Make it PyTorch's accelerator, for the rest of this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    return torch.device(NAME, 0)
