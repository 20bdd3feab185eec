"""Calls of an operator to a device and to the host: shared by the fake device and by the count of launches.

- ``waits``: the host wants to know a number of the device, or how many there are.
- ``launches``: it is work for the device; views, new memory and questions are none.
- ``moves``: the bytes that it reads and writes there.
- ``place``: the module and function of compopt that led to it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import compopt

PACKAGE, TESTS = str(Path(compopt.__file__).parent), str(Path(__file__).parents[1])
aten = torch.ops.aten
COPIES = {aten._to_copy, aten.copy_, aten.copy}
FREE = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
    aten._reshape_alias, aten.lift_fresh, aten.detach, aten.is_pinned, aten._pin_memory, aten.resize_, aten.set_,
    aten.is_same_size,
}  # fmt: skip
# of what they write, these read nothing
FILLS = {aten.zero_, aten.fill_, aten.copy_, aten._foreach_copy_, aten._foreach_zero_}
# of their first argument these read, or write, only what an index names
READ_AT, WRITE_AT = {aten.index_select, aten.gather}, {aten.index_copy_, aten.scatter_, aten.index_add_}


def place() -> str:
    """The module and function of compopt that asks; empty where a test asks for itself."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            module = file.removeprefix(PACKAGE + "/").removesuffix(".py").replace("/", ".")
            return f"{module} {frame.f_code.co_name}"
        if file.startswith(TESTS) and Path(file).stem not in ("device_calls", "fake_device"):
            return ""
        frame = frame.f_back
    return ""


@functools.cache
def results_of(function: Any) -> tuple[bool, bool, bool]:
    """Return whether its result, or its shape, is a matter of numbers on the device, and whether it takes an index."""
    knows, sized = torch.Tag.data_dependent_output in function.tags, torch.Tag.dynamic_output_shape in function.tags
    return knows, sized, function.overloadpacket is aten.index


def waits(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if the host would wait for what this operator, which is no copy, finds on the device."""
    knows, sized, is_index = results_of(function)
    sized = sized and kwargs.get("output_size") is None
    if is_index:
        sized = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return knows or sized


def launches(function: Any) -> bool:
    """Return True for work of the device. One operator counts once, though some are several kernels (topk, qr)."""
    if function.namespace == "c10d" or function.overloadpacket in FREE:
        return False
    returns = function._schema.returns
    views = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not views and function.overloadpacket is not aten._local_scalar_dense


def bytes_of(x: Tensor) -> int:
    """Of the elements there are: expanded ones lie in memory once."""
    shown = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    count = 1
    for n in shown:
        count *= n
    return (count if x.numel() else 0) * x.element_size()


def moves(function: Any, args: tuple, kwargs: dict[str, Any], result: Any, here: Callable[[Tensor], bool]) -> int:
    """Bytes that the operator reads and writes where ``here`` says so of a tensor."""
    packet, total, written = function.overloadpacket, 0, set()
    schema = function._schema.arguments
    named = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(schema)]
    small = sum(bytes_of(x) for _, v in named[1:] for x in tree_leaves(v) if isinstance(x, Tensor) and here(x))
    if packet in READ_AT:
        return small + 2 * sum(bytes_of(x) for x in tree_leaves(result) if isinstance(x, Tensor))
    if packet is aten.index_fill_:
        return small + args[2].numel() * args[0].element_size()
    if packet in WRITE_AT:  # the values are given, and written as often
        return small + (bytes_of(args[-1]) if isinstance(args[-1], Tensor) else 0)
    for argument, value in named:
        for x in tree_leaves(value):
            if not isinstance(x, Tensor) or not here(x):
                continue
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes:
                written.add(id(x))
            only = changes and (argument.is_out or packet in FILLS)
            total += bytes_of(x) * (2 if changes and not only else 1)
    for x in tree_leaves(result):
        if isinstance(x, Tensor) and here(x) and id(x) not in written:
            total += bytes_of(x)
    return total
