"""Several optimizers over disjoint parameters, as one: Muon on the matrices, AdamW on the rest.

Groups and state stay with the members; the combination shows them. So a scheduler, a hook or a
checkpoint of a member goes on working, and nothing has to be kept equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.options import Group

OneOrSeveral = Optimizer | Sequence[Optimizer]


class CombinedOptimizer(Optimizer):
    """Steps its ``members`` one after the other.

    ``param_groups`` are the members' own, in the order in which they were added, and ``defaults``
    the options that all members have. A state dict numbers parameters in this order.
    """

    members: tuple[Optimizer, ...]
    _positions: list[tuple[int, int]]  # of every group: the number of its member, and its own there

    def __init__(self, members: Sequence[Optimizer]):
        check_disjoint(members)
        names = set[str].intersection(*(set(member.defaults) for member in members))
        defaults = {name: members[0].defaults[name] for name in sorted(names)}
        # torch's own constructor would make groups and state of its own
        self.__setstate__({"members": tuple(members), "_positions": [], "defaults": defaults})
        self._note_new_groups()

    # Groups

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        self._note_new_groups()
        return [self.members[m].param_groups[n] for m, n in self._positions]

    def _note_new_groups(self) -> None:
        """Append the groups that members have been given, and forget those that were taken back."""
        groups = [member.param_groups for member in self.members]
        positions = [(m, n) for m, n in self._positions if n < len(groups[m])]
        for m, member_groups in enumerate(groups):
            known = sum(member == m for member, _ in positions)
            positions += [(m, n) for n in range(known, len(member_groups))]
        self._positions = positions

    def add_param_group(self, param_group: Group) -> None:
        """Raise: only a member can be given a group."""
        names = describe_members(self)
        raise TypeError(
            f"add_param_group cannot tell which of {names} is to step the new group: call "
            "add_param_group of that one. The group takes part from the next step on."
        )

    # State

    @property
    def state(self) -> MappingProxyType[Any, Any]:  # type: ignore[override]
        """The members' entries. An entry is replaced in its member: here that raises TypeError."""
        pairs = (pair for member in self.members for pair in member.state.items())
        return MappingProxyType(dict(pairs))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member, on the gradients of one evaluation."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._note_new_groups()
        parts = [member.state_dict() for member in self.members]
        groups: list[Group] = []
        number_of: list[dict[Any, int]] = [{} for _ in parts]  # by member: its number to ours
        count = 0
        for m, n in self._positions:
            group = parts[m]["param_groups"][n]
            new = list(range(count, count + len(group["params"])))
            number_of[m].update(zip(group["params"], new, strict=True))
            groups.append({**group, "params": new})
            count += len(new)
        state = {
            number.get(key, key): entry
            for number, part in zip(number_of, parts, strict=True)
            for key, entry in part["state"].items()
        }
        saved: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load every member's part.

        Raises ValueError, with nothing loaded, if groups differ in number or length.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, saved = self.param_groups, state_dict["param_groups"]
        lengths, loaded = ([len(group["params"]) for group in of] for of in (groups, saved))
        if lengths != loaded:
            raise ValueError(
                f"loaded state dict has groups of {loaded} parameters, the optimizer has groups of "
                f"{lengths}."
            )
        for m, member in enumerate(self.members):
            pairs = zip(self._positions, saved, strict=True)
            member_groups = [group for (of, _), group in pairs if of == m]
            keys = {key for group in member_groups for key in group["params"]}
            others = {key for group in saved for key in group["params"]} - keys
            state = {k: entry for k, entry in state_dict["state"].items() if k not in others}
            member.load_state_dict({"state": state, "param_groups": member_groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members, "_positions": self._positions, "defaults": self.defaults}


def combine_optimizers(base: OneOrSeveral) -> Optimizer:
    """Return an optimizer that steps all of several; one as it is.

    Raises TypeError or ValueError if they cannot be combined.
    """
    if not isinstance(base, list | tuple):
        return base  # type: ignore[return-value]  # whatever it is: the caller checks it
    if not base:
        raise ValueError("base is an empty list: pass one optimizer, or several.")
    for member in base:
        if not isinstance(member, Optimizer):
            raise TypeError(
                f"base must be a torch optimizer or a list of them, got a list with a "
                f"{type(member).__name__}: pass e.g. [torch.optim.Muon(...), "
                "torch.optim.AdamW(...)]."
            )
    return base[0] if len(base) == 1 else CombinedOptimizer(base)


def list_members(base: Optimizer) -> list[Optimizer]:
    """Return the optimizers that a combination consists of; another optimizer alone."""
    if not isinstance(base, CombinedOptimizer):
        return [base]
    return [one for member in base.members for one in list_members(member)]


def find_owner(base: Optimizer, group: Group) -> Optimizer:
    """Return the member of ``base`` that has a group."""
    return next(
        member for member in list_members(base) if any(group is one for one in member.param_groups)
    )


def describe_members(base: Optimizer) -> str:
    """Return the class of an optimizer; of a combination those of its members."""
    return " + ".join(type(member).__name__ for member in list_members(base))


def check_disjoint(members: Sequence[Optimizer]) -> None:
    """Raise ValueError if a parameter is in more than one optimizer; it names them."""
    locations: dict[Tensor, str] = {}
    shared = []
    for m, member in enumerate(members):
        in_member: dict[Tensor, str] = {}
        for n, group in enumerate(member.param_groups):
            names = group.get("param_names") or [""] * len(group["params"])
            for i, (p, name) in enumerate(zip(group["params"], names, strict=True)):
                label = f"{name} " if name else ""
                where = f"{type(member).__name__} (optimizer {m}, group {n}, parameter {i})"
                if p in locations:
                    shared.append(f"{label}of shape {tuple(p.shape)} in {locations[p]} and {where}")
                in_member[p] = where
        locations = {**in_member, **locations}
    if shared:
        more = f", and {len(shared) - 5} more" if len(shared) > 5 else ""
        raise ValueError(
            f"base has optimizers that share {len(shared)} parameters: {'; '.join(shared[:5])}"
            f"{more}. Give every parameter to one of them."
        )
