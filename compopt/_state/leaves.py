"""What an entry of an optimizer's state consists of, of whatever kind; copies of it.

An entry may hold tensors, tensors that consist of others (torchao's 8-bit moments), numbers, lists
and dicts (SOAP's bases), and objects that hold these (GaLore's projections).

``Wrapper`` copies by it, and ``resharding`` and ``base_state`` send by it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .tensors import to_local

Group = dict[str, Any]
CONSTANTS = (str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Leaves:
    """The tensors and numbers that an entry consists of.

    ``tensors``: plain ones, of a tensor that consists of others its parts; ``paths``: their names,
    in a list or tuple with the index in brackets.
    ``scalars``: a container and a key of each number. ``kinds``: descriptions, which are equal on
    ranks whose entries have the same form. ``unknown``: the types of objects that cannot be sent.
    """

    tensors: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    scalars: list[tuple[Any, Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)

    def add_value(self, value: Any, path: str, container: Any = None, key: Any = None) -> None:
        """Add ``value``, which is under ``key`` in ``container``, and all that it holds."""
        if isinstance(value, torch.nn.Parameter):
            self.kinds.append(f"{path} parameter")
        elif isinstance(value, Tensor):
            self._add_tensor(to_local(value), path)
        elif is_plain_number(value):
            self.scalars.append((container, key))
            self.kinds.append(f"{path} {type(value).__name__}")
        elif isinstance(value, CONSTANTS):
            self.kinds.append(f"{path} {value!r}")
        elif isinstance(value, tuple):  # its numbers cannot be replaced: they count as constants
            self.kinds.append(f"{path} {[x for x in value if is_plain_number(x)]!r}")
            self._add_items([(n, x) for n, x in enumerate(value) if not is_plain_number(x)], path)
        elif isinstance(value, dict):
            self._add_items(sorted(value.items(), key=lambda item: repr(item[0])), path, value)
        elif isinstance(value, list):
            self._add_items([*enumerate(value)], path, value)
        elif vars_of(value):
            self.kinds.append(f"{path} {type(value).__qualname__}")
            self._add_items(sorted(vars_of(value).items()), path, vars_of(value))
        else:
            self.unknown.add(type(value).__qualname__)

    def add_learned(self, groups: Sequence[Group], given: Collection[str]) -> None:
        """Add the numbers and tensors of groups, but for the options that are ``given`` to a
        constructor.
        """
        for number, group in enumerate(groups):
            for name in sorted(group.keys() - set(given)):
                if is_plain_number(group[name]) or isinstance(group[name], Tensor):
                    self.add_value(group[name], f"{number}.{name}", group, name)

    def read_scalars(self) -> list[float]:
        return [float(container[key]) for container, key in self.scalars]

    def write_scalars(self, values: Sequence[float]) -> None:
        """Replace numbers, which keep their types."""
        for (container, key), number in zip(self.scalars, values, strict=True):
            container[key] = type(container[key])(number)

    def _add_items(
        self, items: Sequence[tuple[Any, Any]], path: str, container: Any = None
    ) -> None:
        if container is not None:  # objects may refer to each other
            if id(container) in self._seen:
                return
            self._seen.add(id(container))
        self.kinds.append(f"{path} {len(items)}")
        for key, value in items:
            name = f"{path}.{key}" if isinstance(container, dict) else f"{path}[{key}]"
            self.add_value(value, name, container, key)

    def _add_tensor(self, value: Tensor, path: str) -> None:
        if names := list_parts(value):
            self.kinds.append(f"{path} {type(value).__qualname__} {tuple(value.shape)}")
            for name in names:
                self._add_tensor(getattr(value, name), f"{path}.{name}")
        else:
            self.tensors.append(value)
            self.paths.append(path)
            self.kinds.append(f"{path} {tuple(value.shape)} {value.dtype}")


def is_plain_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def vars_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object that holds state; none of a function, class or module."""
    if callable(value) or isinstance(value, torch.nn.Module):
        return {}
    return getattr(value, "__dict__", {})


def list_parts(tensor: Tensor) -> list[str]:
    """Return the attributes of a tensor that consists of others; none of a plain one, or of a
    DTensor, which can be cloned.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None and to_local(tensor) is tensor else []


def copy_state(value: Any) -> Any:
    """Return a deep copy, also of tensors that cannot be cloned, but consist of some that can."""
    compound = find_compound(value)
    return copy.deepcopy(value, {id(tensor): copy_compound(tensor) for tensor in compound})


def find_compound(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, lists and tuples that consist of others."""
    if isinstance(value, Tensor):
        if list_parts(value):
            yield value
    elif isinstance(value, MutableMapping):
        for one in value.values():
            yield from find_compound(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from find_compound(one)


def copy_compound(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, part by part if it consists of others."""
    if not (names := list_parts(tensor)):
        return tensor.detach().clone()
    cls: Any = type(tensor)
    context = cls.__tensor_flatten__(tensor)[1]
    parts = {name: copy_compound(getattr(tensor, name)) for name in names}
    copied: Tensor = cls.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return copied


def read_leaves(value: Any) -> Leaves:
    """Return what an entry of a state, or another value, consists of."""
    leaves = Leaves()
    leaves.add_value(value, "")
    return leaves


def read_base(saved: dict[str, Any], given: Collection[str]) -> Leaves:
    """Return what ranks share of the base's in the state dict of a wrapper: its state, and what it
    learns in groups.
    """
    beside = saved.get("base", {})
    entries = {key: entry["base"] for key, entry in saved["state"].items() if "base" in entry}
    leaves = read_leaves({**beside.get("state", {}), **entries})
    leaves.add_learned(beside.get("param_groups", ()), given)
    return leaves
