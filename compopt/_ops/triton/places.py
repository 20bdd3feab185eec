"""Tables of launches that are kept from step to step, for as long as all tensors lie where they
lay.

A table holds addresses. So it is kept beside everything that these follow from, its key; what is
not equal to the key of the step before is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..._state.buckets import Bucket
from ..._state.masks import Mask, Tensors
from ..._wire.requests import Payload, Together

# Of one bucket weights and gradients that are contiguous: copies, where they were not. They have to
# live until a kernel has been launched.
Copies = tuple[list[Tensor], Tensors]
# What addresses follow from; None: from more than is known, so that nothing is kept.
Key = tuple[object, ...] | None
Made = TypeVar("Made")


class Tables:
    """The tables of one back end's launches, the last of each use."""

    def __init__(self) -> None:
        self._held: dict[object, tuple[Key, Any]] = {}

    def __call__(self, use: object, key: Key, make: Callable[[], Made]) -> Made:
        """What was kept for this ``use``, a table or several; where that had another ``key``, a new
        one.
        """
        held = self._held.get(use)
        if key is not None and held is not None and held[0] == key:
            made: Made = held[1]
            return made
        self._held.pop(use, None)
        made = make()
        if key is not None:
            self._held[use] = key, made
        return made


def addresses(tensors: Iterable[Tensor | None]) -> list[int] | None:
    """Where each begins, -1 where there is none; None where one is not contiguous, and is copied
    before a kernel reads it.
    """
    found = []
    for t in tensors:
        if t is None:
            found.append(-1)
        elif t.is_contiguous():
            found.append(t.data_ptr())
        else:
            return None
    return found


def bits_places(bucket: Bucket, mask: Mask) -> Key:
    """What tells where the bits of a mask lie: in a state of the bucket, or where they say."""
    name = state_of(bucket, mask)
    return known(addresses(mask.bits)) if name is None else (name, bucket.made)


def state_of(bucket: Bucket, mask: Mask) -> str | None:
    """Which state of the bucket the bits of a mask are; None where they are none."""
    return next((name for name, held in bucket.state.items() if mask.bits is held), None)


def known(*parts: object) -> Key:
    """A key of these; None where one of them is."""
    return None if any(part is None for part in parts) else parts


def places(bucket: Bucket) -> Key:
    """What tells where the state of a bucket and its parameters lie."""
    return known(bucket, bucket.made, addresses(bucket.locals))


def read_places(grads: Sequence[Tensor | None]) -> Key:
    """What tells where gradients lie, and of which dtype they are."""
    return known(addresses(grads), next((str(g.dtype) for g in grads if g is not None), "none"))


def commit_places(one: Together, present: Sequence[bool]) -> Key:
    """What tells where the tensors lie that a commit writes, and the average that it reads."""
    return known(places(one.bucket), message(one.args[0]), tuple(present))


def message(payload: Payload) -> Key:
    """What tells how a message is laid out, and where."""
    flat, dropped = payload.flat, payload.dropped
    rest = -1 if dropped is None else dropped.data_ptr()
    return flat.data_ptr(), flat.dtype, rest, tuple(payload.lengths)


class Before:
    """The momenta of before of one bucket: in flat memory, or one by one."""

    def __init__(self, bucket: Bucket, tensors: list[Tensor] | None, flat: Tensor | None = None):
        self.flat, self.sizes, self._tensors = flat, bucket.sizes["exp_avg"], tensors

    @property
    def tensors(self) -> list[Tensor]:
        if self._tensors is None:
            assert self.flat is not None
            self._tensors = list(self.flat.split(self.sizes))
        return self._tensors

    @property
    def places(self) -> Key:
        """What tells where they lie."""
        if self.flat is None:
            return known(addresses(self.tensors))
        return self.flat.data_ptr(), tuple(self.sizes)
