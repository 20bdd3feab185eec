"""An optimizer around another one, the base: groups, steps and checkpoints of the two.

``param_groups`` are the base's. The options of the wrapper's class are in groups of their own,
``_wrapper_groups``, one for each of the base's.

An entry of ``state`` shows the base's state of a tensor beside the wrapper's own, and under "base".
What a user changes there, the base takes over before it steps. A state dict merges the two, see
``base_state.py``.

``Separate``, ``Average`` and ``LocalSteps`` derive from ``Wrapper``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from .._engine.checkpoint import check_saved_groups, describe_group
from .._engine.engine import Role
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import ComparedGroups, Group, Setting, check_base_group
from .._state.bucket import Bucket
from .._state.layouts import Layout
from .._state.leaves import copy_state
from .._wire.groups import ForeignCollective, ProcessGroup, Ranks, RefuseCollectives
from . import base_state, bases
from .bases import OneOrSeveral

Entry = dict[str, Any]  # of ``state``


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
    # the steps of the base that are watched for collectives of its own
    _steps_to_watch = 3
    _own_names: Set[str] = frozenset()  # those in an entry of ``state`` that are not the base's
    # of every parameter: its entry, and what that has shown of the base's
    _shown: Mapping[Tensor, tuple[Entry, Entry]] = {}

    def __init__(
        self,
        base: OneOrSeveral,
        options: Group,
        process_group: ProcessGroup | Ranks | None,
        simulate: bool = False,
    ):
        base = bases.combine_optimizers(base)
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
    def option_groups(self) -> list[Group]:
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
                    owner = bases.find_owner(self.base, group)
                    owner.param_groups.pop()
                    if isinstance(owner, CompressedOptimizer):
                        owner.forget_group(group)
            raise

    def _options_for(self, group: Group) -> Group:
        """Return the checked options of the wrapper for a group of the base."""
        check_base_group(group)
        if not self._has_unread_options:
            owner = bases.find_owner(self.base, group)
            self._has_unread_options = bases.warn_of_unread_options(
                group, owner, self.options_in_base, type(self).__name__
            )
        given = self._select_options(group)
        options = {**self._wrapper_defaults, **given, "params": group["params"]}
        self._check_new_group(options)
        return options

    def _select_options(self, group: Group) -> Group:
        """Return the wrapper's options that a group of the base has, as ``compopt_NAME``."""
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        named = ((name, bases.OPTION_PREFIX + name) for name in self.options_in_base)
        return {**names, **{name: group[key] for name, key in named if key in group}}

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
            self._take_changes()
            bases.check_disjoint(bases.list_members(self.base))
            added = [self._options_for(group) for group in groups]
            self._wrapper_groups += added
            try:
                for options in added:
                    self._lay_out_group(options)
            except (TypeError, ValueError):
                del self._wrapper_groups[-len(added) :]
                self._engine.rebuild_buckets()
                raise

    def _replace_parameters(self) -> None:
        self._take_changes()
        params = {p for group in self.param_groups for p in group["params"]}
        for p in self._engine.parameters - params:
            for member in bases.list_members(self.base):
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
    def compared_groups(self) -> list[ComparedGroups]:
        of_base = (
            "base's group",
            self.base.param_groups,
            self._base_options | self._prefixed_options,
        )
        return [("group", self._wrapper_groups, self._wrapper_defaults), of_base]

    def list_fixed_settings(self) -> list[Setting]:
        (subject, name), *others = super().list_fixed_settings()
        members = [
            (type(member).__name__, member.settings)
            for member in bases.list_members(self.base)
            if hasattr(member, "settings") and self.steps_alike
        ]
        name = f"{name} around {bases.describe_members(self.base)}"
        return [(subject, name), *others, *members]

    # State

    @property
    def _compressed_members(self) -> list[CompressedOptimizer]:
        """The optimizers of this package that the base is, or consists of."""
        return [m for m in bases.list_members(self.base) if isinstance(m, CompressedOptimizer)]

    def before_layout(self) -> None:
        super().before_layout()
        for inner in self._compressed_members:
            inner._engine.role, inner._engine.connection = Role.WRAPPED, None
        self._update = bases.WrappedUpdate(self.base)
        members = bases.list_members(self.base)
        self._base_options = {name for member in members for name in member.defaults}
        self._prefixed_options = {bases.OPTION_PREFIX + name for name in self.options_in_base}
        self.given_options = bases.list_constructor_options(self.base)
        self._may_draw = bases.may_draw(self.base)

    def bucket_layouts(self, bucket: Bucket) -> dict[str, Layout]:
        layouts = super().bucket_layouts(bucket)
        layouts.pop("master", None)  # the base handles parameters of low precision
        return layouts

    def on_fallback(self) -> None:
        for inner in self._compressed_members:
            inner._engine.use_pytorch()

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
        engine = self._engine
        are_drawn = bases.draw_alike(engine.steps, engine.device)
        with are_drawn if self._may_draw else contextlib.nullcontext(), self._watch_base():
            self._update.step_base()
        self._show_base_in_state()

    @contextlib.contextmanager
    def _watch_base(self) -> Iterator[None]:
        """Raise TypeError if the base communicates in this context, one of its first steps."""
        if not self._steps_to_watch:
            yield
            return
        try:
            with self._refuse_collectives():
                yield
        except ForeignCollective as error:
            name = bases.describe_members(self.base)
            raise TypeError(
                f"base {name} cannot be wrapped: it {bases.COMMUNICATES} ({error}). Use an "
                "optimizer that steps the tensors of each rank alone (MuonAdamW in place of a "
                "Muon that is distributed), on parameters that are loaded anew."
            ) from error
        self._steps_to_watch -= 1

    def _refuse_collectives(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a base cannot communicate with the ranks that this optimizer
        averages over. With those that hold other shards of its parameters it may.
        """
        comm = self._engine.comm
        if comm.size == 1 or self.replaces_reduce_scatter:
            return contextlib.nullcontext()
        return RefuseCollectives(comm.ranks)

    # The base's state, shown

    def lay_out_changed_state(self) -> None:
        self._take_changes()
        super().lay_out_changed_state()

    def after_layout(self) -> None:
        super().after_layout()
        buckets = [*self._engine.buckets, *self._engine.frozen_buckets]
        names = {name for bucket in buckets for name in self.bucket_layouts(bucket)}
        self._own_names = {"step", "base", "outer", *names}
        self._show_base_in_state()

    def _show_base_in_state(self) -> None:
        """Add the base's to every entry: under "base", where torch.distributed.checkpoint looks for
        names, and by its own names, where users look for moments.
        """
        base_state, own, shown = self.base.state, self._own_names, {}
        for p, entry in self.state.items():
            of_base = base_state.get(p, {})
            values = {name: value for name, value in of_base.items() if name not in own}
            if is_step_count(of_base.get("step")):
                values["step"] = of_base["step"]
            for name in entry.keys() - own - values.keys():
                del entry[name]
            entry["base"] = of_base
            entry.update(values)
            shown[p] = entry, values
        self._shown = shown

    def _take_changes(self) -> None:
        """Change the base's state as a user has changed ``state`` since it was shown: entries that
        were removed or replaced, and values that were assigned.
        """
        shown, state, has_changed = self._shown, self.state, False
        for p in {**shown, **state} if shown else ():
            entry: Entry | None = state.get(p)
            before, values = shown.get(p, (None, {}))
            if entry is None or entry is not before:
                self._replace_base_entry(p, entry or {})
                has_changed = True
                continue
            for name in [n for n, value in values.items() if entry.get(n) is not value]:
                entry["base"].pop(name, None)
                if name in entry:
                    entry["base"][name] = entry[name]
                has_changed = True
        if has_changed:
            self._show_base_in_state()

    def _replace_base_entry(self, p: Tensor, entry: Entry) -> None:
        """Give the base the entry that a user has put into ``state``, or has moved there from a
        parameter that ``p`` replaces; none if it is empty.
        """
        own = self._own_names - ({"step"} if "step" in entry.get("base", entry) else set())
        of_base = {**entry.get("base", {}), **{n: x for n, x in entry.items() if n not in own}}
        for member in bases.list_members(self.base):
            member.state.pop(p, None)
            if of_base and any(p is q for group in member.param_groups for q in group["params"]):
                member.state[p] = of_base

    # Checkpoints

    def save_without_hooks(self) -> dict[str, Any]:
        """Return the merged state dict, and under "base" what else the base's own holds."""
        self._take_changes()
        self._show_base_in_state()
        saved, base_saved = super().save_without_hooks(), self.base.state_dict()
        for merged, group, wrapper_group in zip(
            saved["param_groups"], base_saved["param_groups"], self._wrapper_groups, strict=True
        ):
            options = {n: wrapper_group[n] for n in self._wrapper_defaults if n in wrapper_group}
            options |= describe_group(self._engine, wrapper_group)
            shared = group.keys() & options.keys() - {"params"}
            hidden = {base_state.PREFIX + name: group[name] for name in shared}
            numbers = merged["params"]
            merged.clear()
            merged.update({**group, **hidden, **options, "params": numbers})
        params = [(p, group) for group in self.base.param_groups for p in group["params"]]
        own, state = self._own_names, dict(base_saved["state"])
        # a base may step another optimizer, which its copies have in common with it
        with bases.replace_gradients({p: None for p, _ in params}), self._refuse_collectives():
            for number, (p, group) in enumerate(params):
                if (entry := saved["state"].get(number)) is not None:
                    kept = {name: value for name, value in entry.items() if name in own}
                    # a base's has torch's default dtype; safetensors refuses one tensor twice
                    if is_step_count(kept.get("step")):
                        kept["step"] = kept["step"].to(torch.float32, copy=True)
                    base_entry = base_state.save_entry(self.base, p, group, state.pop(number, None))
                    saved["state"][number] = {**kept, "base": base_entry}
        return {**saved, "base": {**base_saved, "state": state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or one of the base's: compression then starts anew.

        Raises ValueError, with nothing loaded, if it does not fit. All ranks must load.
        """
        self.add_groups_of_base()
        base_state.refuse_flattened_base(state_dict, type(self).__name__)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def load_without_hooks(self, state_dict: dict[str, Any]) -> None:
        groups = check_saved_groups(self._engine, state_dict)
        wrapper_saved, base_saved = base_state.split_state_dict(
            state_dict, set(self._wrapper_defaults), self.param_groups
        )
        if base_saved is None:
            base_state.check_base_checkpoint(state_dict, groups, bases.describe_members(self.base))
        check_saved_groups(self._engine, base_saved or state_dict)
        before = self.base.state_dict()
        try:
            try:
                # a copy: torch's would share its tensors
                self.base.load_state_dict(copy_state(base_saved or state_dict))
            except (TypeError, ValueError) as error:
                name = bases.describe_members(self.base)
                raise ValueError(
                    f"loaded state dict does not fit the base optimizer {name} ({error}): it is "
                    "damaged, or of another class."
                ) from error
            if base_saved is not None:
                super().load_without_hooks(wrapper_saved)
        except Exception:
            self.base.load_state_dict(before)
            raise
        if base_saved is None:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Clear the wrapper's state and step counts."""
        engine = self._engine
        for p in engine.bucket_of:  # it is laid out anew, as zeros
            self.state.pop(p, None)
        for group in self._wrapper_groups:
            group["step"] = 0
        engine.consolidated_at, engine.damage = None, ""
        engine.rebuild_buckets()

    def _copyable_attributes(self) -> dict[str, Any]:
        contents = super()._copyable_attributes()
        del contents["param_groups"]
        return {
            **contents,
            "base": self.base,
            "_wrapper_groups": self._wrapper_groups,
            "_wrapper_defaults": self._wrapper_defaults,
        }


def is_step_count(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0
