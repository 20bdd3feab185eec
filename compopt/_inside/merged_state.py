"""State dicts of a wrapper and its base, merged into one.

torch.distributed.checkpoint keeps "state" and "param_groups" and drops everything else. So the
base's state of a tensor is in the wrapper's entry, under "base", and the base's options are in the
wrapper's groups, as "base.NAME" if both have an option of that name. The rest of the base's state
dict is beside them, under "base".

torch.distributed.checkpoint loads into existing entries only: so before the base's first step an
entry holds the state that a step on zeros would leave, and "begun" is 0.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.checkpoint import NOT_OPTIONS
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Group
from .._state.tensors import is_accelerator
from . import combined

PREFIX = "base."  # before the name of a base's option that the wrapper has too


def save_entry(
    base: Optimizer, p: Tensor, group: Group, entry: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the state of ``p`` as it is saved: that of a first step on zeros before there is one,
    and "begun".
    """
    begun = torch.tensor(float(bool(entry)), dtype=torch.float32, device="cpu")
    return {**(entry or make_first_state(base, p, group)), "begun": begun}


def read_entry(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state that ``save_entry`` has saved; nothing before the first step."""
    if not float(saved.get("begun", len(saved))) > 0:
        return {}
    return {name: value for name, value in saved.items() if name != "begun"}


def make_first_state(base: Optimizer, p: Tensor, group: Group) -> dict[str, Any]:
    """Return the state of ``p`` before its first step, as ``make_state`` of its optimizer makes it.

    An optimizer without it takes a step on zeros: a copy steps a stand-in for this tensor only. The
    state is empty if that raises. One of this package that averages has state from the beginning.
    """
    base = combined.find_owner(base, group)
    if not p.requires_grad or isinstance(base, CompressedOptimizer):
        return {}
    if callable(make_state := getattr(base, "make_state", None)):
        return dict(make_state(p, group))
    stand_in = torch.nn.Parameter(torch.zeros_like(p))
    stand_in.grad = torch.zeros_like(p)
    copied = object.__new__(type(base))
    copied.__dict__.update(base.__dict__)
    copied.__dict__.pop("step", None)  # the counting one that a scheduler sets
    copied.__dict__.update(_optimizer_step_pre_hooks=OrderedDict())
    copied.__dict__.update(_optimizer_step_post_hooks=OrderedDict())
    copied.state = defaultdict(dict)
    copied.param_groups = [{**group, "params": [stand_in]}]
    devices = [p.device] if is_accelerator(p.device) else []
    kind = p.device.type if devices else "cpu"  # fork_rng always keeps the CPU's
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            copied.step()
    except Exception:
        return {}  # what there is by then may be a part of it
    return dict(copied.state[stand_in])


def split_state_dict(
    saved: dict[str, Any], known: set[str], groups: list[Group]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the wrapper's state dict, and the base's, or None if there is none.

    ``known``: the wrapper's options. ``groups``: the base's.
    """
    state, saved_groups = saved["state"], saved["param_groups"]
    wrapper_state = {
        key: {name: value for name, value in entry.items() if name != "base"}
        for key, entry in state.items()
    }
    wrapper_groups = [
        {name: value for name, value in group.items() if name in known or name in NOT_OPTIONS}
        for group in saved_groups
    ]
    wrapper_saved = {"state": wrapper_state, "param_groups": wrapper_groups}
    keys = [key for group in saved_groups for key in group["params"] if key in state]
    base_state = {key: read_entry(state[key].get("base", {})) for key in keys}  # as it is stepped
    base_state = {key: entry for key, entry in base_state.items() if entry}
    if "base" in saved:
        beside = saved["base"]
        # a checkpoint of an earlier version has all of it there
        merged = {"state": {**base_state, **beside["state"]}} if "state" in beside else {}
        return wrapper_saved, {**beside, **merged}
    if not any("base" in entry for entry in state.values()):
        return saved, None

    # entries of a group that are not the wrapper's are the base's or the user's
    not_of_base = known | NOT_OPTIONS - {"params", "param_names"}
    base_groups = []
    for group, current in zip(saved_groups, groups, strict=True):
        hidden = {n.removeprefix(PREFIX): n for n in group if n.startswith(PREFIX)}
        names = {n: n for n in group if n not in not_of_base and not n.startswith(PREFIX)}
        # flattened: only the base's names are left. Of those that both have, the value is the
        # wrapper's; the two count the same steps
        flat = {n: n for n in current if n in group}
        shared = {n: current[n] for n in (current.keys() & known) - hidden.keys() - {"step"}}
        saved_options = {n: group[key] for n, key in {**flat, **names, **hidden}.items()}
        base_groups.append({**saved_options, **shared})
    return wrapper_saved, {"state": base_state, "param_groups": base_groups}


def refuse_flattened_base(state_dict: dict[str, Any], name: str) -> None:
    """Raise ValueError if a state dict was flattened, and not saved by a wrapper: of the base's
    state torch then passes only the names that the wrapper's entries have.
    """
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    entries = (
        state.values() if isinstance(state, dict) else ()
    )  # else damaged: who reads it says so
    if any(isinstance(entry, dict) and entry.get("base") == {} for entry in entries):
        raise ValueError(
            f"loaded state dict is flattened, and not of {name}: load it into the optimizer "
            "inside, by set_optimizer_state_dict(model, optimizer.base, ...)."
        )


def check_base_checkpoint(state_dict: dict[str, Any], groups: list[Group], base: str) -> None:
    """Raise ValueError if a checkpoint without the wrapper's part is not the base's."""
    if any("residual" in entry for entry in state_dict["state"].values()):
        raise ValueError(
            "loaded state dict has residuals but not the base optimizer's state: it is damaged. "
            "Load what optimizer.state_dict() returned."
        )
    if groups and groups[0].get("class", "torch") not in ("torch", base):
        raise ValueError(
            f"loaded state dict is of {groups[0]['class']}, and {base} cannot continue from "
            "it: load one of Separate or of the base optimizer."
        )
