"""An optimizer around another one, the base: groups, steps and checkpoints of the two.

``param_groups`` are the base's. The options of the wrapper's own class are in groups beside them,
``_wrapper_groups``, one for each.

In a state dict, too, the two are one, because torch.distributed.checkpoint keeps "state" and
"param_groups" and drops what stands beside them. What the base keeps of a tensor is in the
wrapper's entry for it, under "base"; the base's options are in the wrapper's groups, as "base.NAME"
where both have an option of that name. And it loads into what is there already: so there is an
entry before the base's first step, too, what a step on zeros would leave, and "begun" says whether
it means anything.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._state.buckets import Bucket
from .._state.layouts import Layout
from .._state.tensors import is_accelerator
from .._wire.collectives import ProcessGroup
from .base import CompressedOptimizer
from .loading import NOT_OPTIONS
from .options import Group, Setting, name_groups
from .session import Sync
from .update import WrappedUpdate


class Wrapper(CompressedOptimizer):
    """Steps ``base`` on averaged gradients: a generator hands them to ``_update``.

    A class that shares its algorithm with others inherits from both: ``class Separate(Wrapper,
    ProjectingOptimizer)``.
    """

    # options of ours that a group of the base may have for its tensors
    options_in_base: tuple[str, ...] = ("param_names", "compress")

    def __init__(
        self,
        base: Optimizer,
        options: Group,
        process_group: ProcessGroup | None,
        simulate: bool = False,
    ):
        check_base(base)
        self.base = base
        self._wrapper_groups: list[Group] = []
        self._wrapper_defaults = {**options, "compress": None, "step": 0}
        super().__init__(base.param_groups, base.defaults, process_group, simulate)

    def _check_defaults(self, defaults: Group) -> None:
        """Leave the base's to the base; ours are checked with each group."""

    # Groups

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        """Ignore the empty list that torch's constructor sets: the groups are the base's."""

    @property
    def _option_groups(self) -> list[Group]:
        return self._wrapper_groups

    @property
    def _known_options(self) -> set[str]:
        return set(self._wrapper_defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base, and our options for it.

        All ranks must do so at the same step.
        """
        is_new = all(param_group is not group for group in self.param_groups)
        if is_new:
            self.base.add_param_group(param_group)
            param_group = self.param_groups[-1]
        try:
            self._wrapper_groups.append(self._options_for(param_group))
        except (TypeError, ValueError):
            if is_new:
                self.param_groups.pop()
            raise
        self._lay_out(self._wrapper_groups[-1])

    def _options_for(self, group: Group) -> Group:
        """Return our options for a group of the base, checked."""
        given = {name: group[name] for name in self.options_in_base if name in group}
        own = {**self._wrapper_defaults, **given, "params": group["params"]}
        self._admit(own)
        return own

    def add_groups_of_base(self) -> None:
        """Add our options for groups that somebody has given to the base."""
        for group in self.param_groups[len(self._wrapper_groups) :]:
            self.add_param_group(group)

    def before_exchange(self) -> None:
        self.add_groups_of_base()
        super().before_exchange()

    def _settings(self) -> list[Setting]:
        groups = name_groups("base's group", self.base.param_groups, self.base.defaults)
        return [*super()._settings(), ("base", type(self.base).__name__), *groups]

    # State

    def before_layout(self) -> None:
        super().before_layout()
        if isinstance(self.base, CompressedOptimizer):
            self.base._session.wrap()
        self._update = WrappedUpdate(self.base)

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        specs = super()._specs(bucket)
        specs.pop("master", None)  # parameters of low precision are the base's business
        return specs

    def on_fallback(self) -> None:
        if isinstance(self.base, CompressedOptimizer):
            self.base._session.use_pytorch()

    # Stepping

    def committed(self) -> None:
        """Step the base, once, on the averaged gradients."""
        super().committed()
        self._update.step_base()
        self._show_base()

    # Checkpoints

    def _saved(self) -> dict[str, Any]:
        """Return our own state and options, with the base's among them and whole under "base"."""
        self._show_base()
        saved = super()._saved()
        known = self._known_options
        options = [
            {**{name: group[name] for name in known if name in group}, **self._signature(group)}
            for group in self._wrapper_groups
        ]
        return merge_state_dicts(saved, self.base, options)

    def _show_base(self) -> None:
        """Let ``state`` show the base's; torch.distributed.checkpoint looks there for names."""
        for p, entry in self.state.items():
            entry["base"] = self.base.state.get(p, {})

    def after_layout(self) -> None:
        super().after_layout()
        self._show_base()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both. A checkpoint that holds nothing of ours is taken for the base's own:
        compression then starts anew.

        Raises ValueError, with nothing loaded, when it does not fit. All ranks must load.
        """
        groups = self._groups_of(state_dict)
        own, theirs = split_state_dict(state_dict, self._known_options, self.param_groups)
        if theirs is None:
            check_saved_by(state_dict, groups, type(self.base).__name__)
        self._groups_of(theirs or state_dict)
        before = self.base.state_dict()
        try:
            self._load_base(theirs or state_dict)
            if theirs is not None:
                super().load_state_dict(own)
        except Exception:
            self.base.load_state_dict(before)
            raise
        if theirs is None:
            self._begin_anew()

    def _load_base(self, state_dict: dict[str, Any]) -> None:
        try:
            # torch's would share its tensors
            self.base.load_state_dict(copy.deepcopy(state_dict))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"loaded state dict has what {type(self.base).__name__} cannot take, the base "
                f"optimizer ({error}): it is damaged, or of another class."
            ) from error

    def _begin_anew(self) -> None:
        """Hold nothing back, and count steps from 0, as a new optimizer does."""
        session = self._session
        session.settle_state()
        for bucket in session.buckets:
            for tensors in bucket.state.values():
                for tensor in tensors:
                    if tensor is not None:
                        tensor.zero_()
        for group in self._wrapper_groups:
            group["step"] = 0
        session.sync, session.consolidated_at = Sync.UNVERIFIED, None
        session.rebuild_buckets()

    def _contents(self) -> dict[str, Any]:
        contents = super()._contents()
        del contents["param_groups"]
        return {
            **contents,
            "base": self.base,
            "_wrapper_groups": self._wrapper_groups,
            "_wrapper_defaults": self._wrapper_defaults,
        }


def check_base(base: object) -> None:
    """Raise where an optimizer cannot be wrapped."""
    name = type(base).__name__
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch optimizer, got {name}: pass e.g. torch.optim.AdamW(...)."
        )
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError(
            "base must take one gradient a step: LBFGS evaluates the model again within its step."
        )
    if getattr(base, "averaged_state", ()):
        raise ValueError(
            f"base {name} compresses by itself: wrap one that does not, or use it alone."
        )


# State dicts of both

PREFIX = "base."  # of an option of the base that has the name of one of ours


def merge_state_dicts(
    saved: dict[str, Any], base: Optimizer, options: list[Group]
) -> dict[str, Any]:
    """Return ``saved``, of the wrapper, with the base's state. ``options``: the wrapper's, by
    group.
    """
    theirs = base.state_dict()
    for merged, group, own in zip(
        saved["param_groups"], theirs["param_groups"], options, strict=True
    ):
        hidden = {PREFIX + name: group[name] for name in group.keys() & own.keys() - {"params"}}
        places = merged["params"]
        merged.clear()
        merged.update({**group, **hidden, **own, "params": places})
    params = [(p, group) for group in base.param_groups for p in group["params"]]
    for place, (p, group) in enumerate(params):
        if place in saved["state"]:
            entry = theirs["state"].get(place)
            begun = torch.tensor(float(bool(entry)), dtype=torch.float32)
            held = {**(entry or _make_first_state(base, p, group)), "begun": begun}
            saved["state"][place] = {**saved["state"][place], "base": held}
    return {**saved, "base": theirs}


def _make_first_state(base: Optimizer, p: Tensor, group: Group) -> dict[str, Any]:
    """Return state as ``base`` makes it at its first step, of zeros; nothing where that cannot be
    found.

    By a copy of it that knows a stand-in for this tensor only.
    """
    if not p.requires_grad:
        return {}
    stand_in = torch.nn.Parameter(torch.zeros_like(p))
    stand_in.grad = torch.zeros_like(p)
    copied = object.__new__(type(base))
    copied.__dict__.update(base.__dict__)
    copied.__dict__.pop("step", None)  # a scheduler's, which counts
    copied.__dict__.update(_optimizer_step_pre_hooks=OrderedDict())
    copied.__dict__.update(_optimizer_step_post_hooks=OrderedDict())
    copied.state = defaultdict(dict)
    copied.param_groups = [{**group, "params": [stand_in]}]
    devices = [p.device] if is_accelerator(p.device) else []
    kind = p.device.type if devices else "cpu"  # whose random numbers are kept in any case
    with contextlib.suppress(Exception), torch.random.fork_rng(devices, device_type=kind):
        copied.step()
    return dict(copied.state[stand_in])


def split_state_dict(
    saved: dict[str, Any], known: set[str], groups: list[Group]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return what is the wrapper's, and what is the base's, or None where there is none of it.

    ``known``: the wrapper's options. ``groups``: the base's.
    """
    state, saved_groups = saved["state"], saved["param_groups"]
    own = {
        "state": {key: _without_base(entry) for key, entry in state.items()},
        "param_groups": [
            {name: group[name] for name in group if name in known or name in NOT_OPTIONS}
            for group in saved_groups
        ],
    }
    if "base" in saved:
        return own, saved["base"]
    if not any(isinstance(entry, dict) and "base" in entry for entry in state.values()):
        return saved, None
    held = {key: entry["base"] for key, entry in state.items() if "base" in entry}
    theirs = [
        _options_of_base(group, known, current)
        for group, current in zip(saved_groups, groups, strict=True)
    ]
    return own, {"state": _begun_entries(held), "param_groups": theirs}


def _without_base(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {name: value for name, value in entry.items() if name != "base"}


def _begun_entries(held: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        key: {name: value for name, value in entry.items() if name != "begun"}
        for key, entry in held.items()
        if float(entry.get("begun", len(entry))) > 0
    }


def _options_of_base(group: Group, known: set[str], current: Group) -> Group:
    """Return the base's part of a saved group: all that is not ours, which is the user's too."""
    ours = known | NOT_OPTIONS - {"params", "param_names"}
    theirs = {
        name: value
        for name, value in group.items()
        if name not in ours and not name.startswith(PREFIX)
    }
    for name in current:
        if PREFIX + name in group:
            theirs[name] = group[PREFIX + name]
        elif name not in theirs and name in group:  # flattened: only names of the base's are left
            theirs[name] = group[name]
    return theirs


def check_saved_by(state_dict: dict[str, Any], groups: list[Group], base: str) -> None:
    """Raise where a checkpoint without our own part is not one of the base's class."""
    if any("residual" in entry for entry in state_dict["state"].values()):
        raise ValueError(
            "loaded state dict has residuals but not the base optimizer's state: "
            "torch.distributed.checkpoint's get_optimizer_state_dict left that out until 0.1.1. "
            "Load what optimizer.state_dict() returned."
        )
    if groups and groups[0].get("class", "torch") not in ("torch", base):
        raise ValueError(
            f"loaded state dict is of {groups[0]['class']}, from which {base} cannot go on: load "
            "one of Separate or of the base optimizer."
        )
