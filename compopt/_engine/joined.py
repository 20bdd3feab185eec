"""One state dict of two optimizers, as torch.distributed.checkpoint takes it.

It keeps "state" and "param_groups", and drops what stands beside them. So what a base keeps of a
tensor stands within the wrapper's entry for it, under "base", and its options in the wrapper's
groups; where both have an option of one name, the base's is "base.NAME" there.

And it loads into what is there already. So there is something before the base's first step, too:
what a step on zeros would leave. "begun" says whether it means anything.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._state.devices import is_accelerator
from .face import Group
from .loading import NOT_OPTIONS

PREFIX = "base."


def join(saved: dict[str, Any], base: Optimizer, options: list[Group]) -> dict[str, Any]:
    """``saved``, of the wrapper, with the base's state. ``options``: the wrapper's, by group."""
    theirs = base.state_dict()
    for packed, group, own in zip(
        saved["param_groups"], theirs["param_groups"], options, strict=True
    ):
        hidden = {PREFIX + name: group[name] for name in group.keys() & own.keys() - {"params"}}
        places = packed["params"]
        packed.clear()
        packed.update({**group, **hidden, **own, "params": places})
    params = [(p, group) for group in base.param_groups for p in group["params"]]
    for place, (p, group) in enumerate(params):
        if place in saved["state"]:
            entry = theirs["state"].get(place)
            begun = torch.tensor(float(bool(entry)), dtype=torch.float32)
            held = {**(entry or _first_state(base, p, group)), "begun": begun}
            saved["state"][place] = {**saved["state"][place], "base": held}
    return {**saved, "base": theirs}


def part(
    saved: dict[str, Any], known: set[str], groups: list[Group]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What is the wrapper's, and what is the base's; that is None where there is none of it.

    ``known``: the wrapper's options. ``groups``: the base's.
    """
    state, packed = saved["state"], saved["param_groups"]
    own = {
        "state": {key: _without_base(entry) for key, entry in state.items()},
        "param_groups": [
            {name: group[name] for name in group if name in known or name in NOT_OPTIONS}
            for group in packed
        ],
    }
    if "base" in saved:
        return own, saved["base"]
    if not any(isinstance(entry, dict) and "base" in entry for entry in state.values()):
        return saved, None
    held = {key: entry["base"] for key, entry in state.items() if "base" in entry}
    theirs = [_of_base(group, known, now) for group, now in zip(packed, groups, strict=True)]
    return own, {"state": _begun(held), "param_groups": theirs}


def _without_base(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {name: value for name, value in entry.items() if name != "base"}


def _begun(held: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        key: {name: value for name, value in entry.items() if name != "begun"}
        for key, entry in held.items()
        if float(entry.get("begun", len(entry))) > 0
    }


def _of_base(group: Group, known: set[str], now: Group) -> Group:
    """The base's part of a saved group: all that is not ours, which is the user's too."""
    ours = known | NOT_OPTIONS - {"params", "param_names"}
    theirs = {
        name: value
        for name, value in group.items()
        if name not in ours and not name.startswith(PREFIX)
    }
    for name in now:
        if PREFIX + name in group:
            theirs[name] = group[PREFIX + name]
        elif name not in theirs and name in group:  # flattened: only names of the base's are left
            theirs[name] = group[name]
    return theirs


def _first_state(base: Optimizer, p: Tensor, group: Group) -> dict[str, Any]:
    """State as ``base`` makes it at its first step, of zeros; nothing where that cannot be found.

    By a copy of it that knows a stand-in for this tensor only.
    """
    if not p.requires_grad:
        return {}
    stand_in = torch.nn.Parameter(torch.zeros_like(p))
    stand_in.grad = torch.zeros_like(p)
    copy = object.__new__(type(base))
    copy.__dict__.update(base.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler's, which counts
    copy.__dict__.update(_optimizer_step_pre_hooks=OrderedDict())
    copy.__dict__.update(_optimizer_step_post_hooks=OrderedDict())
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": [stand_in]}]
    devices = [p.device] if is_accelerator(p.device) else []
    kind = p.device.type if devices else "cpu"  # whose random numbers are kept in any case
    with contextlib.suppress(Exception), torch.random.fork_rng(devices, device_type=kind):
        copy.step()
    return dict(copy.state[stand_in])
