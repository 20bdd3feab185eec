"""State into flat storage, and into the one format of state dicts.

In memory masks are bits and a momentum that is zero off its mask keeps only what is on it. In a
state dict every state has its parameter's shape, and is a DTensor where the parameter is one: so
torch.distributed.checkpoint can cut and join it like the parameter, and a checkpoint loads under
another wrapper or another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._state.buckets import Bucket, local
from .._state.devices import is_accelerator
from .._state.layouts import Layout, Member

FORMAT = 1  # of state dicts; written into every group, beside the class. 0: none was written yet


def fill(
    bucket: Bucket, layouts: Mapping[str, Layout], state: MutableMapping[Tensor, dict[str, Any]]
) -> None:
    """Allocate the bucket's state, and make ``state`` show views of it.

    What ``state`` holds so far is copied in.
    """
    held = [{name: local(value) for name, value in state.get(p, {}).items()} for p in bucket.params]
    for name, layout in layouts.items():
        bucket.allocate(name, layout, held)
    bucket.count(_counts(bucket, held))
    for i, (p, old) in enumerate(zip(bucket.params, held, strict=True)):
        member, entry = bucket.member(i), {"step": bucket.state["step"][i]}
        if "master" in layouts:
            old.setdefault("master", local(p.detach()))
        for name, layout in layouts.items():
            view = bucket.state[name][i]
            if view is None:
                continue
            if name in old:
                view.copy_(layout.part(old[name], member).view(view.shape))
            entry[name] = layout.shown(view, member)
        state[p] = entry
    bucket.entries = [state[p] for p in bucket.params]


def _counts(bucket: Bucket, held: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """How many steps each tensor has taken; as torch's own optimizers keep it, on the device."""
    on = bucket.device if is_accelerator(bucket.device) else "cpu"
    counts = torch.zeros(len(held), dtype=torch.float32, device=on)
    for count, old in zip(counts.unbind(), held, strict=True):
        if "step" in old:
            count.copy_(old["step"])
    return counts


def spread(
    bucket: Bucket, i: int, layouts: Mapping[str, Layout], entry: dict[str, Any]
) -> dict[str, Any]:
    """The state of tensor i as a state dict has it: all in the tensor's shape."""
    member, spread_out = bucket.member(i), dict(entry)
    for name, layout in layouts.items():
        if name not in entry:
            continue
        gathered = bucket.gathered[name][i] if name in bucket.gathered else None
        if gathered is None:
            spread_out[name] = layout.whole(entry[name], member, entry)
        else:
            spread_out[name] = member.laid_out(gathered.to(bucket.device))
    return spread_out


def compact(entry: dict[str, Any], layouts: Mapping[str, Layout], member: Member) -> dict[str, Any]:
    """What ``spread`` made, or another optimizer's state, as small as it is kept in memory."""
    held = {
        name: local(value) if isinstance(value, Tensor) else value
        for name, value in entry.items()
        if name in layouts or name == "step"
    }
    return {
        name: layouts[name].compact(value, member, held) if name in layouts else value
        for name, value in held.items()
    }
