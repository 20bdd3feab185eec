"""Collectives of code that is not ours, refused before they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import list_ranks_of_call


class ForeignCollective(RuntimeError):
    """Somebody else communicates among the ranks of a ``RefuseCollectives``; names the operator."""


class RefuseCollectives(TorchDispatchMode):
    """A context in which this thread cannot communicate with others of these ranks.

    It sees each operator that is called, not those that a DTensor calls within one: these are part
    of the arithmetic of shards.
    """

    def __init__(self, ranks: Iterable[int]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._ranks = frozenset(ranks)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: functions that are compiled stay so in this context."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if "c10d" in func.namespace:
            names = (argument.name for argument in func._schema.arguments)
            ranks = list_ranks_of_call(func, {**dict(zip(names, args, strict=False)), **named})
            if len(self._ranks.intersection(ranks)) > 1:
                raise ForeignCollective(f"{func.namespace}.{func.__name__}")
        return func(*args, **named)
