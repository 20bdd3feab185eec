"""An optimizer around another one, the base: groups, steps and checkpoints of the two.

``param_groups`` are the base's. The options of the wrapper's own class are in groups beside them,
``_own_groups``, one for each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from .._state.buckets import Bucket
from .._state.layouts import Layout
from .._wire.comm import ProcessGroup
from .averages import Averages
from .base import CompressedOptimizer
from .face import Group
from .joined import join, part
from .settings import Setting, name_groups


class Wrapping(CompressedOptimizer):
    """Steps ``base`` on averaged gradients: a generator hands them to ``_averages``.

    A class that shares its algorithm with others takes this beside them: ``class Separate(Wrapping,
    Projecting)``.
    """

    # what a group of the base may say for its tensors
    said: tuple[str, ...] = ("param_names", "compress")

    def __init__(
        self,
        base: Optimizer,
        options: Group,
        process_group: ProcessGroup | None,
        simulate: bool = False,
    ):
        check_base(base)
        self.base = base
        self._own_groups: list[Group] = []
        self._own_defaults = {**options, "compress": None, "step": 0}
        super().__init__(base.param_groups, base.defaults, process_group, simulate)

    def _check_defaults(self, defaults: Group) -> None:
        """These are the base's; ours are checked with each group."""

    # Groups

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        """torch's constructor sets an empty list; the groups are the base's all the same."""

    @property
    def _option_groups(self) -> list[Group]:
        return self._own_groups

    @property
    def _known_options(self) -> set[str]:
        return set(self._own_defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base, and our options for it.

        All ranks must do so at the same step.
        """
        new = all(param_group is not group for group in self.param_groups)
        if new:
            self.base.add_param_group(param_group)
        try:
            self._own_groups.append(
                self._options_for(self.param_groups[-1] if new else param_group)
            )
        except (TypeError, ValueError):
            if new:
                self.param_groups.pop()
            raise
        self._lay_out(self._own_groups[-1])

    def _options_for(self, group: Group) -> Group:
        """Our options for a group of the base, checked."""
        said = {name: group[name] for name in self.said if name in group}
        own = {**self._own_defaults, **said, "params": group["params"]}
        self._admit(own)
        return own

    def before_exchange(self) -> None:
        for group in self.param_groups[len(self._own_groups) :]:
            self.add_param_group(group)  # somebody gave it to the base
        super().before_exchange()

    def _settings(self) -> list[Setting]:
        groups = name_groups("base's group", self.base.param_groups, self.base.defaults)
        return [*super()._settings(), ("base", type(self.base).__name__), *groups]

    # State

    def before_layout(self) -> None:
        super().before_layout()
        if isinstance(self.base, CompressedOptimizer):
            self.base._engine.stand_alone()
        self._averages = Averages()

    def _specs(self, bucket: Bucket) -> dict[str, Layout]:
        specs = super()._specs(bucket)
        specs.pop("master", None)  # parameters of low precision are the base's business
        return specs

    def gave_way(self) -> None:
        if isinstance(self.base, CompressedOptimizer):
            self.base._engine.give_way()

    # Stepping

    def committed(self) -> None:
        """Step the base, once, on the averaged gradients."""
        super().committed()
        params = [p for group in self.param_groups for p in group["params"]]
        with self._averages.as_gradients(params):
            self.base.step()
        self._show_base()

    # Checkpoints

    def _saved(self) -> dict[str, Any]:
        """Our own state and options, with the base's among them and whole under "base"."""
        self._show_base()
        saved = super()._saved()
        known = self._known_options
        options = [
            {**{name: own[name] for name in known if name in own}, **self._signature(own)}
            for own in self._own_groups
        ]
        return join(saved, self.base, options)

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
        own, theirs = part(state_dict, self._known_options, self.param_groups)
        if theirs is None:
            check_of_base(state_dict, groups, type(self.base).__name__)
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
        engine = self._engine
        engine.settle()
        for bucket in engine.buckets:
            for tensors in bucket.state.values():
                for tensor in tensors:
                    if tensor is not None:
                        tensor.zero_()
        for group in self._own_groups:
            group["step"] = 0
        engine.half_step, engine.consolidated = "", None
        engine.rebuild()

    def _contents(self) -> dict[str, Any]:
        contents = super()._contents()
        del contents["param_groups"]
        return {
            **contents,
            "base": self.base,
            "_own_groups": self._own_groups,
            "_own_defaults": self._own_defaults,
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


def check_of_base(state_dict: dict[str, Any], groups: list[Group], base: str) -> None:
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
