"""States as JSON and tensors: in files, and in messages to ranks that have no snapshot.

Nothing here is a pickle, so reading runs no code, whoever wrote the bytes. A state may hold dicts,
lists, tuples, sets, deques, Counters, numbers, strings, bytes, tensors, and NumPy's arrays and
numbers; ``pack`` refuses everything else by its name. Packed bytes are::

    8 bytes     the length of the header
    header      JSON: [the state, with a number in the place of each tensor, [dtype, shape] of each]
    tensors     the memory of each, which begins at a multiple of 64
"""

from __future__ import annotations

import base64
import ctypes
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._state.tensors import to_local

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}
ALIGNMENT = 64
# containers by their names in JSON
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


class Packed(NamedTuple):
    """A state as JSON, and its tensors, in host memory of their own."""

    plain: Any
    tensors: list[Tensor]

    def encode_header(self) -> bytes:
        specs = [[str(t.dtype).removeprefix("torch."), [*t.shape]] for t in self.tensors]
        return json.dumps([self.plain, specs]).encode()

    def write(self, write: Callable[[Any], object]) -> int:
        """Pass all bytes to ``write``, in parts; return how many they are."""
        header = self.encode_header()
        parts = [len(header).to_bytes(8, "little"), header, *map(memory_of, self.tensors)]
        position = 0
        for number, part in enumerate(parts):
            padding = bytes(-position % ALIGNMENT if number > 1 else 0)
            write(padding)
            write(part)
            position += len(padding) + len(part)
        return position


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host; the tensor has to outlive it."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


# Packing


def pack(state: Any, name: str = "state") -> Packed:
    """Return a copy of a state as JSON and tensors; of a DTensor this rank's part.

    Raises TypeError if it holds something else; the message begins with ``name``.
    """
    tensors: list[Tensor] = []
    return Packed(_pack(state, name, tensors), tensors)


def _pack(value: Any, where: str, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_pack(entry, f"{where}[{i}]", tensors) for i, entry in enumerate(value)]
    if kind in MAPPINGS.values():
        pairs = [
            [_pack(key, where, tensors), _pack(entry, f"{where}[{key!r}]", tensors)]
            for key, entry in value.items()
        ]
        return {kind.__name__: pairs}
    if kind in SEQUENCES.values() or kind is torch.Size:
        entries = [_pack(entry, f"{where}[{i}]", tensors) for i, entry in enumerate(value)]
        return {"tuple" if kind is torch.Size else kind.__name__: entries}
    if kind is deque:
        return {"deque": [_pack([*value], where, tensors), value.maxlen]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Tensor):
        return _pack_tensor(value, where, tensors)
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "?biufc":
        raw = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        tensors.append(raw)
        # is it an array?
        return {"numpy": [value.dtype.str, [*value.shape], hasattr(value, "__len__"), len(tensors)]}
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a snapshot does not hold: it "
        "holds numbers, strings, bytes, tensors, arrays, and dicts, lists, tuples and sets of them."
    )


def _pack_tensor(value: Tensor, where: str, tensors: list[Tensor]) -> Any:
    local = to_local(value).detach().to("cpu", copy=True)
    if type(local) is not Tensor or local.layout is not torch.strided or local.is_quantized:
        raise TypeError(
            f"{where} is a {type(local).__qualname__} of layout {local.layout}, which a snapshot "
            "does not hold: it holds plain dense tensors."
        )
    tensors.append(local.resolve_conj().resolve_neg().contiguous())
    return {"tensor": len(tensors)}


# Unpacking


def unpack(packed: Packed) -> Any:
    """Return the state, which holds the packed tensors.

    Raises some Exception where ``pack`` has not made this.
    """
    plain, tensors = packed
    if isinstance(plain, list):
        return [unpack(Packed(entry, tensors)) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind in MAPPINGS:
        pairs = [[unpack(Packed(part, tensors)) for part in pair] for pair in content]
        return MAPPINGS[kind](dict(pairs) if kind == "Counter" else pairs)
    if kind in SEQUENCES:
        return SEQUENCES[kind](unpack(Packed(content, tensors)))
    if kind == "deque":
        return deque(unpack(Packed(content[0], tensors)), content[1])
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "complex":
        return complex(*content)
    if kind == "tensor":
        return tensors[content - 1]
    if kind == "numpy":
        return _unpack_array(tensors[content[3] - 1], *content[:3])
    raise ValueError(f"unknown kind {kind!r}")


def _unpack_array(raw: Tensor, dtype: str, shape: list[int], is_array: bool) -> Any:
    import numpy as np

    kind = np.dtype(dtype)
    if kind.kind not in "?biufc":
        raise ValueError(f"an array of {kind}")
    array = np.frombuffer(bytearray(memory_of(raw)), kind, count=int(np.prod(shape)))
    array = array.reshape(shape)
    return array if is_array else array[()]


def decode_header(header: bytes, limit: int) -> Packed:
    """Return a state with memory for its tensors, whose values have yet to come.

    Raises some Exception if the header is damaged, or its tensors take more than ``limit`` bytes.
    """
    plain, specs = json.loads(header)
    shapes = [(DTYPES[name], tuple(map(int, shape))) for name, shape in specs]
    sizes = [_count_bytes(dtype, shape) for dtype, shape in shapes]
    if min(sizes, default=0) < 0 or sum(sizes) > limit:
        raise ValueError(f"tensors of {sum(sizes)} bytes where {limit} are")
    empty = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in shapes]
    return Packed(plain, empty)


def _count_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    *_, count = accumulate((1, *shape), lambda a, b: a * b)
    return count * dtype.itemsize if min(shape, default=0) >= 0 else -1


def read(fill: Callable[[memoryview], object], size: int) -> Packed:
    """Read ``size`` bytes that ``Packed.write`` wrote; ``fill`` fills memory with the next ones.

    Raises some Exception if they are damaged.
    """
    length = bytearray(8)
    fill(memoryview(length))
    count = int.from_bytes(length, "little")
    if count > size - 8:
        raise ValueError(f"a header of {count} bytes in a file of {size}")
    header = bytearray(count)
    fill(memoryview(header))
    packed, position = decode_header(bytes(header), size - 8 - count), 8 + count
    for tensor in packed.tensors:
        padding, memory = bytearray(-position % ALIGNMENT), memory_of(tensor)
        if position + len(padding) + len(memory) > size:
            raise ValueError("a tensor ends behind the file")
        fill(memoryview(padding))
        fill(memory)
        position += len(padding) + len(memory)
    if position != size:
        raise ValueError(f"{size - position} bytes behind the last tensor")
    return packed
