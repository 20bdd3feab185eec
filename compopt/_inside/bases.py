"""The optimizers that are wrapped: several as one, which are refused and why, their options and
modes, the random numbers that they draw, and their step on averaged gradients.

``Wrapper``, ``Average``, ``Separate`` and ``LocalSteps`` call these for the optimizer that they
wrap.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Group
from .._state.bucket import Bucket
from .._state.tensors import distribute_like, get_grad_dtype, is_accelerator, to_local
from .._wire.groups import get_rank
from .._wire.warning import warn_on_rank_0

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


OPTION_PREFIX = "compopt_"  # before the name of a wrapper's option in a group of the base

CLOSURE = (
    "evaluates the model again within its step, where gradients are one rank's own and cannot be "
    "averaged"
)
WITHIN_BACKWARD = "steps within backward, before gradients are averaged"
DIFFERENTIATES = "differentiates gradients, which averages have lost", "Separate(AdamW)"
COMMUNICATES = "communicates within its step, on its own"
# optimizers that no wrapper can step, by the names of their classes: why, and what to use
REFUSED = {
    "LBFGS": (CLOSURE, "an optimizer with one gradient per step"),
    "GSAM": (CLOSURE, "its base optimizer without it"),
    "AliG": ("needs the loss of a closure in its step", "another optimizer"),
    "PCGrad": ("needs several losses in backward", "its optimizer without it"),
    "LOMO": (WITHIN_BACKWARD, "Average(torch.optim.SGD)"),
    "AdaLOMO": (WITHIN_BACKWARD, "Average(torch.optim.Adafactor)"),
    **dict.fromkeys(("Adahessian", "AdaHessian", "SophiaH"), DIFFERENTIATES),
    "SparseAdam": ("takes sparse gradients, and averages are dense", "torch.optim.Adam"),
    "ZeroRedundancyOptimizer": (
        "shards its state, sends parameters from within its step, and has a state dict on one rank "
        "only",
        "TagcAdamW, whose state is sharded, or the optimizer itself over parameters that "
        "fully_shard shards",
    ),
    "DistributedMuon": (COMMUNICATES, "MuonAdamW"),
    "DeMo": (COMMUNICATES, "Separate or LocalSteps around an optimizer that does not"),
}


# Refusals


def check_base(base: object) -> None:
    """Raise TypeError or ValueError if an optimizer cannot be wrapped."""
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch optimizer, got {type(base).__name__}: pass e.g. "
            "torch.optim.AdamW(...)."
        )
    for member in list_members(base):
        name = type(member).__name__
        if (found := find_refusal(member)) is not None:
            why, instead = found
            raise TypeError(f"base {name} cannot be wrapped: it {why}. Use {instead}.")
        if getattr(member, "rank_local_state", ()):
            raise ValueError(
                f"base {name} compresses by itself: wrap one that does not, or use {name} directly."
            )
        if not isinstance(member, CompressedOptimizer):
            check_state_dict(member)


def find_refusal(base: Optimizer) -> tuple[str, str] | None:
    """Return why an optimizer cannot be wrapped, and what to use; None if nothing speaks against
    it.
    """
    for parent in type(base).__mro__:
        if parent.__name__ in REFUSED:
            return REFUSED[parent.__name__]
    if hasattr(base, "first_step") and hasattr(base, "second_step"):  # SAM and its relatives
        return CLOSURE, "its base optimizer without it"
    closure = inspect.signature(type(base).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return CLOSURE, "its variant without a closure, or an optimizer with one gradient per step"
    return None


def check_state_dict(base: Optimizer) -> None:
    """Raise ValueError if the state dict of ``base`` is none of torch's form."""
    name, why = type(base).__name__, ""
    try:
        saved = base.state_dict()
        if missing := [key for key in ("state", "param_groups") if key not in saved]:
            why = f"has no {' and no '.join(map(repr, missing))}"
    except Exception as error:
        why = f"raises {type(error).__name__} ({error})"
    if why:
        raise ValueError(
            f"base {name} has a state_dict() that {why}, so it could not be saved: use an "
            "optimizer whose state dict has 'state' and 'param_groups', as torch's have."
        )


# Options in groups


def warn_of_unread_options(
    group: Group, base: Optimizer, names: tuple[str, ...], wrapper: str
) -> bool:
    """Warn if a group of ``base`` has an option by the name that it has in the wrapper: there it is
    the base's. Returns whether it has.
    """
    unread = [
        name
        for name in names
        if name in group and name not in base.defaults and OPTION_PREFIX + name not in group
    ]
    if unread:
        shown = ", ".join(f"{name}={group[name]!r}" for name in unread)
        own = ", ".join(OPTION_PREFIX + name for name in unread)
        warn_on_rank_0(
            f"a group of {type(base).__name__} has {shown}, which {wrapper} leaves to "
            f"{type(base).__name__}: for an option of {wrapper} write {own} there.",
            get_rank(),
        )
    return bool(unread)


def list_constructor_options(base: Optimizer) -> set[str]:
    """Return the names that constructors of an optimizer's class take. What else is in its groups
    it counts or learns by itself (Prodigy's d, Schedule-Free's k), or it is the user's.
    """
    names = {"params", "param_names"}
    for member in list_members(base):
        constructors = (vars(c).get("__init__") for c in type(member).__mro__)
        names.update(n for c in constructors if c for n in inspect.signature(c).parameters)
        if isinstance(member, CompressedOptimizer):  # its groups have no other numbers
            names.update(member.defaults)
    return names


# Modes: Schedule-Free has parameters to train on, and others to evaluate and save


def find_switch(base: Optimizer, name: str) -> Callable[[], None]:
    """Return a function that calls ``name``, train or eval, of all members that have it.

    Raises AttributeError if none has.
    """
    methods = [getattr(member, name) for member in _list_with(base, name)]
    if not methods:
        raise AttributeError(f"{describe_members(base)} has no {name}().")

    def switch() -> None:
        for method in methods:
            method()

    return switch


def _list_with(base: Optimizer, name: str) -> list[Optimizer]:
    """Return the members that have a method of this name."""
    return [m for m in list_members(base) if callable(getattr(m, name, None))]


def has_modes(base: Optimizer) -> bool:
    return bool(_list_with(base, "eval"))


def is_in_eval_mode(base: Optimizer) -> bool:
    """True if the model has the parameters to evaluate."""
    switched = _list_with(base, "eval")
    modes = [getattr(member, "train_mode", True) for member in switched]
    modes += [group.get("train_mode", True) for m in switched for group in m.param_groups]
    return not all(modes)


def check_mode(base: Optimizer) -> None:
    """Raise RuntimeError in eval mode, before anything is sent."""
    if is_in_eval_mode(base):
        raise RuntimeError(
            f"{describe_members(base)} is in eval mode, and a step needs train mode: call "
            "optimizer.train() on all ranks before the first step and after every evaluation."
        )


# Random numbers


def may_draw(base: Optimizer) -> bool:
    """True if the step of an optimizer may draw random numbers; those of torch do not. A wrapper
    then lets it draw the same on all ranks (``draw_alike``).
    """
    modules = [type(member).__module__ for member in list_members(base)]
    return not all(module.startswith(("torch.", "compopt.")) for module in modules)


def keep_torch_random(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context after which random numbers of torch go on as before."""
    devices = [device] if is_accelerator(device) else []
    # fork_rng always keeps the CPU's
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cpu")


@contextmanager
def draw_alike(seed: int, device: torch.device) -> Iterator[None]:
    """Let all ranks draw the same random numbers in this context: those of torch, NumPy and Python
    begin at ``seed``. Afterwards they go on as before.
    """
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    with keep_torch_random(device):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy:
                numpy.random.set_state(before[1])


# The step on averaged gradients


class WrappedUpdate:
    """The step of a torch optimizer, ``base``, on all averages of a step."""

    def __init__(self, base: Optimizer):
        self.base = base
        self._averages: dict[Tensor, Tensor] = {}  # this rank's part of each, of this step
        self._memory: dict[Tensor, Tensor] = {}  # for neighbours, by the first parameter

    def memory_for(
        self, bucket: Bucket, indices: Sequence[int], averages: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return the memory of averages that the base can read as they are, else memory that lives
        until the base has stepped; on a CPU, where new pages cost more than copies, as long as this
        object.
        """
        for i, given in zip(indices, averages, strict=True):
            p = bucket.params[i]
            if given is not None and given.dtype == get_grad_dtype(p) and not bucket.is_dtensor:
                self._averages[p] = given.view(p.shape)
            else:
                self.memory_for_stack(bucket, range(i, i + 1))
        return [self._averages[bucket.params[i]] for i in indices]

    def memory_for_stack(self, bucket: Bucket, indices: range) -> Tensor:
        params = [bucket.params[i] for i in indices]
        first = params[0]
        shape = (len(params), *to_local(first).shape)
        stack = self._memory.get(first)
        if stack is None or stack.shape != shape:
            dtype = get_grad_dtype(first)
            stack = self._memory[first] = torch.empty(shape, dtype=dtype, device=bucket.device)
        self._averages.update(zip(params, stack.unbind(), strict=True))
        return stack

    def apply(self, bucket: Bucket, indices: list[int], averages: list[Tensor]) -> None:
        """Do nothing: the base steps on all averages, when all buckets have committed."""

    def step_base(self) -> None:
        """Step ``base`` once, on all averages.

        Meanwhile ``p.grad`` is the average, or None if no rank had a gradient.
        """
        params = [p for group in self.base.param_groups for p in group["params"]]
        averages, self._averages = self._averages, {}
        gradients = {p: as_gradient(averages[p], p) if p in averages else None for p in params}
        with replace_gradients(gradients):
            self.base.step()
        self._memory = {p: x for p, x in self._memory.items() if p.device.type == "cpu"}


def as_gradient(average: Tensor, p: Tensor) -> Tensor:
    """Return the average of this rank's part of ``p`` as backward would leave it: in the placements
    of ``p``, and in its strides, because torch's fused steps on CPUs read both in memory order.
    """
    param = p.detach()
    local = to_local(param)
    if not local.is_contiguous():
        average = torch.empty_like(local, dtype=average.dtype).copy_(average)
    return distribute_like(param, average)


@contextmanager
def replace_gradients(gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Set ``p.grad`` to these gradients in this context; restore the previous ones after it."""
    previous = {p: p.grad for p in gradients}
    try:
        for p, gradient in gradients.items():
            p.grad = gradient
        yield
    finally:
        for p, gradient in previous.items():
            p.grad = gradient
