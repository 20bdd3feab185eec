"""An optimizer around another one, the base: groups, steps and checkpoints of the two.

``param_groups`` are the base's. The options of the wrapper's class are in groups of their own,
``_wrapper_groups``, one for each of the base's.

A state dict merges the two, because torch.distributed.checkpoint keeps "state" and "param_groups"
and drops everything else. The base's state of a tensor is in the wrapper's entry, under "base". The
base's options are in the wrapper's groups, as "base.NAME" if both have an option of that name.
torch.distributed.checkpoint loads into existing entries only: so before the base's first step an
entry holds the state that a step on zeros would leave, and "begun" is 0.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._state.bucket import Bucket
from .._state.layouts import Layout
from .._state.tensors import is_accelerator
from .._wire.collectives import ProcessGroup
from . import bases, combined
from .base_state import copy_state
from .checkpoint import NOT_OPTIONS, check_groups, describe_group
from .combined import OneOrSeveral
from .optimizer import CompressedOptimizer
from .options import ComparedGroups, Group, Setting, check_base_group
from .session import Role


class Wrapper(CompressedOptimizer):
    """Steps ``base`` on averaged gradients, which generators pass to ``_update``.

    A class that shares its algorithm with others inherits from both: ``class Separate(Wrapper,
    ProjectingOptimizer)``.
    """

    # options of the wrapper that a group of the base may have, as "compopt_NAME", for its tensors
    options_in_base: tuple[str, ...] = ("compress",)
    _has_unread_options = False
    # all ranks step ``base`` on the same averages, at first or always
    steps_alike = True

    def __init__(
        self,
        base: OneOrSeveral,
        options: Group,
        process_group: ProcessGroup | None,
        simulate: bool = False,
    ):
        base = combined.combine_optimizers(base)
        bases.check_base(base)
        self.base = base
        self._wrapper_groups: list[Group] = []
        self._wrapper_defaults = {**options, "compress": None, "step": 0}
        super().__init__(base.param_groups, base.defaults, process_group, simulate)

    def _check_defaults(self, defaults: Group) -> None:
        """Do nothing: the base checks its options, and each group is checked when it is added."""

    # Groups

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        """Ignore the empty list that torch's constructor sets."""

    @property
    def _option_groups(self) -> list[Group]:
        return self._wrapper_groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base, and the wrapper's options for it.

        All ranks must do so at the same step.
        """
        is_new = all(param_group is not group for group in self.param_groups)
        if is_new:
            self.base.add_param_group(param_group)
        try:
            self.add_groups_of_base()
        except (TypeError, ValueError):
            if is_new:
                for group in self.param_groups[len(self._wrapper_groups) :]:
                    owner = combined.find_owner(self.base, group)
                    owner.param_groups.pop()
                    if isinstance(owner, CompressedOptimizer):
                        owner.forget_group(group)
            raise

    def _options_for(self, group: Group) -> Group:
        """Return the checked options of the wrapper for a group of the base."""
        check_base_group(group)
        if not self._has_unread_options:
            owner = combined.find_owner(self.base, group)
            self._has_unread_options = bases.warn_of_unread_options(
                group, owner, self.options_in_base, type(self).__name__
            )
        given = self._select_options(group)
        options = {**self._wrapper_defaults, **given, "params": group["params"]}
        self._check_new_group(options)
        return options

    def _select_options(self, group: Group) -> Group:
        """Return the wrapper's options that a group of the base has."""
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        return {**names, **bases.select_options(group, self.options_in_base)}

    def read_options(self) -> None:
        for options, group in zip(self._wrapper_groups, self.param_groups, strict=False):
            options.update(self._select_options(group))

    def apply_changed_options(self) -> None:
        super().apply_changed_options()
        self.add_groups_of_base()

    def check_groups(self, numbers: Container[int]) -> None:
        super().check_groups(numbers)
        for number, group in enumerate(self.param_groups, start=len(self._wrapper_groups)):
            if number in numbers:
                check_base_group(group)

    def add_groups_of_base(self) -> None:
        """Add the wrapper's options for groups that were added to the base."""
        if groups := self.base.param_groups[len(self._wrapper_groups) :]:
            combined.check_disjoint(combined.list_members(self.base))
            added = [self._options_for(group) for group in groups]
            self._wrapper_groups += added
            try:
                for options in added:
                    self._lay_out_group(options)
            except (TypeError, ValueError):
                del self._wrapper_groups[-len(added) :]
                self._session.rebuild_buckets(self)
                raise

    def _replace_parameters(self) -> None:
        params = {p for group in self.param_groups for p in group["params"]}
        for p in self._session.parameters - params:
            for member in combined.list_members(self.base):
                member.state.pop(p, None)
        if len(self._wrapper_groups) > len(self.param_groups):  # the base's have been removed
            kept = {id(group["params"]) for group in self.param_groups}
            self._wrapper_groups = [g for g in self._wrapper_groups if id(g["params"]) in kept]
        for options, group in zip(self._wrapper_groups, self.param_groups, strict=False):
            options["params"] = group["params"]
        for inner in self._compressed_members:
            inner._replace_parameters()
        super()._replace_parameters()

    def before_exchange(self) -> None:
        bases.check_mode(self.base)
        self.add_groups_of_base()
        super().before_exchange()

    @property
    def _compared_groups(self) -> list[ComparedGroups]:
        of_base = (
            "base's group",
            self.base.param_groups,
            self._base_options | self._prefixed_options,
        )
        return [("group", self._wrapper_groups, self._wrapper_defaults), of_base]

    def _settings(self) -> list[Setting]:
        (subject, name), *others = super()._settings()
        members = [
            (type(member).__name__, member.settings)
            for member in combined.list_members(self.base)
            if hasattr(member, "settings") and self.steps_alike
        ]
        name = f"{name} around {combined.describe_members(self.base)}"
        return [(subject, name), *others, *members]

    # State

    @property
    def _compressed_members(self) -> list[CompressedOptimizer]:
        """The optimizers of this package that the base is, or consists of."""
        return [m for m in combined.list_members(self.base) if isinstance(m, CompressedOptimizer)]

    def before_layout(self) -> None:
        super().before_layout()
        for inner in self._compressed_members:
            inner._session.role, inner._session.connection = Role.WRAPPED, None
        self._update = bases.WrappedUpdate(self.base)
        members = combined.list_members(self.base)
        self._base_options = {name for member in members for name in member.defaults}
        self._prefixed_options = {bases.OPTION_PREFIX + name for name in self.options_in_base}
        self.given_options = bases.list_constructor_options(self.base)
        self._may_draw = bases.may_draw(self.base)

    def _bucket_layouts(self, bucket: Bucket) -> dict[str, Layout]:
        layouts = super()._bucket_layouts(bucket)
        layouts.pop("master", None)  # the base handles parameters of low precision
        return layouts

    def on_fallback(self) -> None:
        for inner in self._compressed_members:
            inner._session.use_pytorch(inner)

    # Modes of the base

    @property
    def train(self) -> Callable[[], None]:
        """Put the base into train mode, where it has one; others have no such attribute."""
        return bases.find_switch(self.base, "train")

    @property
    def eval(self) -> Callable[[], None]:
        """Put the base into eval mode, where it has one: the model gets the parameters to evaluate
        and to save.
        """
        return bases.find_switch(self.base, "eval")

    @contextlib.contextmanager
    def _in_train_mode(self) -> Iterator[None]:
        """Put the base into train mode within the block."""
        if not bases.is_in_eval_mode(self.base):
            yield
            return
        self.train()
        try:
            yield
        finally:
            self.eval()

    # Stepping

    def after_commit(self) -> None:
        """Step the base on the averaged gradients."""
        super().after_commit()
        session = self._session
        are_drawn = bases.draw_alike(session.steps, session.device)
        with are_drawn if self._may_draw else contextlib.nullcontext():
            self._update.step_base()
        self._show_base_in_state()

    # Checkpoints

    def _saved(self) -> dict[str, Any]:
        """Return the merged state dict, with the base's own under "base"."""
        self._show_base_in_state()
        saved, base_saved = super()._saved(), self.base.state_dict()
        for merged, group, wrapper_group in zip(
            saved["param_groups"], base_saved["param_groups"], self._wrapper_groups, strict=True
        ):
            options = {n: wrapper_group[n] for n in self._wrapper_defaults if n in wrapper_group}
            options |= describe_group(self, wrapper_group)
            shared = group.keys() & options.keys() - {"params"}
            hidden = {PREFIX + name: group[name] for name in shared}
            numbers = merged["params"]
            merged.clear()
            merged.update({**group, **hidden, **options, "params": numbers})
        params = [(p, group) for group in self.base.param_groups for p in group["params"]]
        # a base may step another optimizer, which its copies have in common with it
        with bases.replace_gradients({p: None for p, _ in params}):
            for number, (p, group) in enumerate(params):
                if number in saved["state"]:
                    base_entry = save_entry(self.base, p, group, base_saved["state"].get(number))
                    saved["state"][number] = {**saved["state"][number], "base": base_entry}
        return {**saved, "base": base_saved}

    def _show_base_in_state(self) -> None:
        """Add the base's to ``state``, where torch.distributed.checkpoint looks for names."""
        base_state = self.base.state
        for p, entry in self.state.items():
            entry["base"] = base_state.get(p, {})

    def after_layout(self) -> None:
        super().after_layout()
        self._show_base_in_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or one of the base's: compression then starts anew.

        Raises ValueError, with nothing loaded, if it does not fit. All ranks must load.
        """
        self.add_groups_of_base()
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def _load_without_hooks(self, state_dict: dict[str, Any]) -> None:
        groups = check_groups(self._session, state_dict)
        wrapper_saved, base_saved = split_state_dict(
            state_dict, set(self._wrapper_defaults), self.param_groups
        )
        if base_saved is None:
            check_base_checkpoint(state_dict, groups, combined.describe_members(self.base))
        check_groups(self._session, base_saved or state_dict)
        before = self.base.state_dict()
        try:
            try:
                # a copy: torch's would share its tensors
                self.base.load_state_dict(copy_state(base_saved or state_dict))
            except (TypeError, ValueError) as error:
                name = combined.describe_members(self.base)
                raise ValueError(
                    f"loaded state dict does not fit the base optimizer {name} ({error}): it is "
                    "damaged, or of another class."
                ) from error
            if base_saved is not None:
                super()._load_without_hooks(wrapper_saved)
        except Exception:
            self.base.load_state_dict(before)
            raise
        if base_saved is None:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Clear the wrapper's state and step counts."""
        session = self._session
        session.settle_state()
        for bucket in session.buckets:
            for tensors in bucket.state.values():
                for tensor in tensors:
                    if tensor is not None:
                        tensor.zero_()
        for group in self._wrapper_groups:
            group["step"] = 0
        session.consolidated_at, session.damage = None, ""
        session.rebuild_buckets(self)

    def _copyable_attributes(self) -> dict[str, Any]:
        contents = super()._copyable_attributes()
        del contents["param_groups"]
        return {
            **contents,
            "base": self.base,
            "_wrapper_groups": self._wrapper_groups,
            "_wrapper_defaults": self._wrapper_defaults,
        }


# Merged state dicts

PREFIX = "base."  # before the name of a base's option that the wrapper has too


def save_entry(
    base: Optimizer, p: Tensor, group: Group, entry: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the state of ``p`` as it is saved: that of a first step on zeros before there is one,
    and "begun".
    """
    begun = torch.tensor(float(bool(entry)), dtype=torch.float32, device="cpu")
    return {**(entry or _make_first_state(base, p, group)), "begun": begun}


def read_entry(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state that ``save_entry`` has saved; nothing before the first step."""
    if not float(saved.get("begun", len(saved))) > 0:
        return {}
    return {name: value for name, value in saved.items() if name != "begun"}


def _make_first_state(base: Optimizer, p: Tensor, group: Group) -> dict[str, Any]:
    """Return the state that a first step of ``base`` on zeros makes; empty if that raises.

    A copy of ``base``, or of its member, steps a stand-in for this tensor only. One of this package
    would step its own buckets instead, and has state before its first step.
    """
    base = combined.find_owner(base, group)
    if not p.requires_grad or isinstance(base, CompressedOptimizer):
        return {}
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
    with contextlib.suppress(Exception), torch.random.fork_rng(devices, device_type=kind):
        copied.step()
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
    if "base" in saved:
        return wrapper_saved, saved["base"]
    if not any("base" in entry for entry in state.values()):
        return saved, None

    base_state = {key: read_entry(entry.get("base", {})) for key, entry in state.items()}
    base_state = {key: entry for key, entry in base_state.items() if entry}
    # entries of a group that are not the wrapper's are the base's or the user's
    not_of_base = known | NOT_OPTIONS - {"params", "param_names"}
    base_groups = []
    for group, current in zip(saved_groups, groups, strict=True):
        hidden = {n.removeprefix(PREFIX): n for n in group if n.startswith(PREFIX)}
        names = {n: n for n in group if n not in not_of_base and not n.startswith(PREFIX)}
        # flattened: only the base's are left
        flat = {n: n for n in current if n in group and n not in hidden}
        base_groups.append({n: group[key] for n, key in {**flat, **names, **hidden}.items()})
    return wrapper_saved, {"state": base_state, "param_groups": base_groups}


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
