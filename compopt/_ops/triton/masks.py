"""Masks of all buckets brought to their places, a launch for each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._state.masks import Mask
from ..._wire.requests import Together
from .selection import TritonSelection, decoded
from .tables import KernelOps, note_starts


def stored(ops: KernelOps, asked: list[Together]) -> list[Mask]:
    """As ``masks.stored``."""
    return _stored([(one, *one.args) for one in asked])


def _stored(asked: list[tuple[Together, Mask, str]]) -> list[Mask]:
    pairs: list[tuple[Tensor, Tensor]] = []
    for one, mask, name in asked:
        state, flat = one.bucket.state, one.bucket.flat
        kept = next((held for held in flat if mask.bits is state.get(held)), None)
        if kept is not None:  # its bits follow each other as these do
            pairs.append((flat[name], flat[kept]))
            continue
        rows = zip(state[name], mask.bits, strict=True)
        pairs += [(to, bits) for to, bits in rows if to is not None and bits is not None]
    _copy(pairs)
    return [mask.over(one.bucket.state[name]) for one, mask, name in asked]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [bits for _, bits in pairs])


def cleared(ops: KernelOps, asked: list[Together]) -> list[None]:
    """As ``masks.cleared``."""
    torch._foreach_zero_([one.bucket.flat[one.args[0]] for one in asked])
    return [None] * len(asked)


def counted(ops: KernelOps, asked: list[Together]) -> list[None]:
    """How many elements are selected before each block, of all these masks."""
    by_device: dict[torch.device, list[Together]] = {}
    for one in asked:
        by_device.setdefault(one.bucket.device, []).append(one)
    for ours in by_device.values():
        note_starts(ops.tables, [one.bucket for one in ours], [one.args[0] for one in ours])
    return [None] * len(asked)


def found_next(ops: KernelOps, asked: list[Together]) -> list[Mask]:
    """What all ranks have selected, as next masks."""
    masks: dict[int, Mask] = {}
    by_device: dict[torch.device, list[Together]] = {}
    for one in asked:
        selection, messages = one.args
        if isinstance(selection, TritonSelection):
            by_device.setdefault(one.bucket.device, []).append(one)
        else:  # PyTorch's operators have selected
            (masks[id(one)],) = _stored([(one, selection.found(messages), "next_mask")])
    for ours in by_device.values():
        flats = decoded([one.args for one in ours])
        _copy([(one.bucket.flat["next_mask"], flat) for one, flat in zip(ours, flats, strict=True)])
        own = [one.args[0].mask(one.bucket.state["next_mask"]) for one in ours]
        note_starts(ops.tables, [one.bucket for one in ours], own)
        masks |= zip(map(id, ours), own, strict=True)
    return [masks[id(one)] for one in asked]
