"""Masks of all buckets brought to their places, a launch for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..._state.masks import Mask
from ..._wire.requests import Together
from .selection import TritonSelection, found
from .tables import note_starts

if TYPE_CHECKING:
    from .ops import TritonOps


def stored(ops: TritonOps, asked: list[Together]) -> list[Mask]:
    """As ``masks.stored``."""
    return _stored([(one, *one.args) for one in asked])


def _stored(asked: list[tuple[Together, Mask, str]]) -> list[Mask]:
    pairs = [
        (to, bits)
        for one, mask, name in asked
        for to, bits in zip(one.bucket.state[name], mask.bits, strict=True)
        if to is not None and bits is not None
    ]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [bits for _, bits in pairs])
    return [mask.over(one.bucket.state[name]) for one, mask, name in asked]


def cleared(ops: TritonOps, asked: list[Together]) -> list[None]:
    """As ``masks.cleared``."""
    torch._foreach_zero_([one.bucket.flat[one.args[0]] for one in asked])
    return [None] * len(asked)


def counted(ops: TritonOps, asked: list[Together]) -> list[None]:
    """How many elements are selected before each block, of all these masks."""
    by_device: dict[torch.device, list[Together]] = {}
    for one in asked:
        by_device.setdefault(one.bucket.device, []).append(one)
    for ours in by_device.values():
        note_starts([one.bucket for one in ours], [one.args[0] for one in ours])
    return [None] * len(asked)


def found_next(ops: TritonOps, asked: list[Together]) -> list[Mask]:
    """What all ranks have selected, as next masks."""
    masks: dict[int, Mask] = {}
    by_device: dict[torch.device, list[Together]] = {}
    for one in asked:
        selection, messages = one.args
        if isinstance(selection, TritonSelection):
            by_device.setdefault(one.bucket.device, []).append(one)
        else:  # PyTorch's operators have selected
            masks[id(one)] = selection.found(messages)
    for ours in by_device.values():
        masks |= zip(map(id, ours), found([one.args for one in ours]), strict=True)
    return _stored([(one, masks[id(one)], "next_mask") for one in asked])
