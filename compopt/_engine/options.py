"""Options of parameter groups: their checks, and the form in which ranks compare them.

Every error names the argument and its value. A group may hold anything beside the options of its
class: a scheduler's values, a name, a function. Ranks compare the options that the class knows, as
text that is the same in every process, whatever the address of an object or the order of a set.

Classes call the checks in ``check_group``; ``settings`` and ``handshake`` read the snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from numbers import Integral, Real
from operator import is_, itemgetter
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from .._state.bucket import Bucket
from .._wire.codec import CODEC_NAMES, dtype_name, find_codec
from .._wire.groups import get_rank
from .._wire.warning import warn_on_rank_0

Group = dict[str, Any]  # one of torch's parameter groups: "params", and options by name
# the name of a group, a class or a base in a message, and its options or its name
Setting = tuple[str, Any]

# groups whose options ranks compare: a name, the groups, and the options that their class knows
ComparedGroups = tuple[str, list[Group], Collection[str]]

# What residuals are stored in between steps; None: as they are computed.
ResidualDtype: TypeAlias = torch.dtype | Literal["int8"] | None

# options that may change between steps without a handshake: they change no message's length
RATES = {"lr", "betas", "eps", "weight_decay", "maximize", "momentum", "max_grad_norm"}

# The types of most options, which cannot change in place.
PLAIN = {type(None), bool, int, float, str}

# options of a wrapped optimizer that its class need not check, and that are checked at every step
RATES_OF_BASE = {"lr", "betas", "eps", "momentum", "weight_decay"}

FOREVER = 2**62  # steps
# of when="auto", see ``trial``
TRIAL_OPTIONS = {
    "pays": None,  # the result of a trial: whether compressed steps are clearly faster
    "dense_until": 0,  # the step until which a trial keeps the group dense, to time enough steps
}

# options of torch.optim.AdamW that are not supported, and why
UNSUPPORTED_OPTIONS = {
    "amsgrad": "largest second moments are not kept",
    "differentiable": "a step that goes over the network has no gradient",
}


def require(good: bool, argument: str, value: object, wanted: str) -> None:
    """Raise a ValueError that names the argument and its value."""
    if not good:
        raise ValueError(f"{argument} must be {wanted}, got {value!r}.")


def require_option(is_valid: bool, group: Group, name: str, wanted: str) -> None:
    """Raise a ValueError that names the option of ``group`` and its value."""
    require(is_valid, name, group[name], wanted)


def require_choice(group: Group, name: str, *choices: str) -> None:
    """Raise a ValueError unless an option of ``group`` is one of these names."""
    require_option(group[name] in choices, group, name, " or ".join(map(repr, choices)))


def require_share(group: Group, name: str) -> None:
    """Raise a ValueError unless an option of ``group`` is a number in (0, 1]."""
    share = group[name]
    require_option(is_numeric(share) and 0 < share <= 1, group, name, "in (0, 1]")


def is_numeric(value: object) -> bool:
    """True for a number, also of NumPy or in a tensor; not for text, as which YAML reads 1e-3."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, Real) or hasattr(value, "item")


def is_number(value: object) -> bool:
    """True for a number of Python or NumPy, except True and False; False for a tensor."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: object, least: int = 1) -> bool:
    """True for a whole number that is at least ``least``; not for True."""
    number: Any = value
    is_whole = is_numeric(value) and not isinstance(value, bool)
    return is_whole and least <= number < math.inf and int(number) == number


def absolute_rates(group: Group) -> Group:
    """Return the learning rate and weight decay without their signs, for checks: schedulers may
    round them to less than 0, which torch's optimizers take.
    """
    rates = {name: group[name] for name in ("lr", "weight_decay") if name in group}
    return {name: abs(rate) if is_numeric(rate) else rate for name, rate in rates.items()}


def check_adam(group: dict[str, Any]) -> None:
    """Check the options that every AdamW-like class has; the errors begin as torch's own."""
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got {tuple(group['lr'].shape)}.")
    for option, name in (
        ("lr", "learning rate"),
        ("eps", "epsilon value"),
        ("weight_decay", "weight_decay value"),
    ):
        value = group[option]
        if not (is_numeric(value) and 0 <= float(value) < math.inf):
            raise ValueError(f"Invalid {name}: {value!r}: {option} must be finite and >= 0.")
    betas = group["betas"]
    is_row = isinstance(betas, Collection) and getattr(betas, "ndim", 1) == 1
    is_pair = is_row and len(betas) == 2 and all(map(is_numeric, betas))
    require_option(is_pair, group, "betas", "two numbers in [0, 1)")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(
                f"Invalid beta parameter at index {i}: {beta}: betas must be two numbers in [0, "
                f"1), got {betas!r}."
            )


def check_base_group(group: Group, optimizer: str = "base optimizer") -> None:
    """Raise ValueError where a rate in a group of another ``optimizer`` is text, or is not finite:
    one step with it makes all parameters NaN.
    """
    for name in group.keys() & RATES_OF_BASE:
        value = group[name]
        for rate in value if isinstance(value, list | tuple) else (value,):
            if isinstance(rate, str) or (is_numeric(rate) and not math.isfinite(rate)):
                require(False, name, value, f"finite in the groups of the {optimizer}")


class TorchOptions(TypedDict, total=False):
    """Options of torch.optim.AdamW that say how it computes."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


def check_torch_options(cls: type, amsgrad: bool, options: TorchOptions) -> None:
    """Check torch's options of how to compute, for a class with AdamW's signature.

    Raises ValueError for an unsupported one, TypeError for one that torch does not have; warns, on
    rank 0, about one that changes nothing.
    """
    unknown = sorted(options.keys() - TorchOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"{cls.__name__} got unexpected keyword arguments: {', '.join(unknown)}.")
    refuse_unsupported({**options, "amsgrad": amsgrad})
    names = [f"{name}=True" for name, value in options.items() if value]
    if names:
        verb = "changes" if len(names) == 1 else "change"
        warn_on_rank_0(
            f"{', '.join(names)} {verb} nothing here: a step runs on compopt's own kernels, "
            f"optimizer.backend says which. Leave {'it' if len(names) == 1 else 'them'} out.",
            get_rank(),
        )


def refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Raise ValueError if a group has an option of AdamW that is not supported."""
    for name, why in UNSUPPORTED_OPTIONS.items():
        if options.get(name):
            raise ValueError(f"{name}=True is not supported: {why}. Pass {name}=False.")


def check_tensors(group: Mapping[str, Any]) -> None:
    """Raise if a group holds a complex tensor, or one without memory."""
    names = group.get("param_names") or [""] * len(group["params"])
    for p, name in zip(group["params"], names, strict=True):
        tensor = f"tensor {name} of" if name else "tensor of"
        if p.is_complex():
            raise TypeError(
                f"params holds a complex {tensor} shape {tuple(p.shape)} ({p.dtype}): use "
                "torch.view_as_real."
            )
        if p.is_meta:
            raise ValueError(
                f"params holds a {tensor} shape {tuple(p.shape)} on the meta device: call "
                "model.to_empty() and initialise it before the optimizer is made."
            )


def check_compression(group: dict[str, Any]) -> None:
    """Check the options that all compressing classes share, and normalize them in ``group``."""
    group.setdefault("when", "always")  # a class need not have it
    require_choice(group, "when", "always", "auto")
    for name, value in TRIAL_OPTIONS.items():
        group.setdefault(name, value)
    check_steps(group, "dense_steps")
    check_payload_and_clip(group)
    check_compress(group)


def check_steps(group: dict[str, Any], name: str) -> None:
    """Check a number of steps at the start."""
    require_option(is_count(group[name], 0), group, name, "a number of steps >= 0")


def check_payload_and_clip(group: dict[str, Any], keeps_all_errors: bool = False) -> None:
    """Check clip and payload dtype; ``keeps_all_errors``: every tensor keeps its rounding error."""
    norm, dtype = group["max_grad_norm"], group["payload_dtype"]
    is_limit = norm is None or (is_numeric(norm) and norm > 0)
    require_option(is_limit, group, "max_grad_norm", "None or > 0")
    wanted = f"None, {CODEC_NAMES} or the torch.dtype of that name"
    codec = find_codec(dtype)
    require_option(codec is not None, group, "payload_dtype", wanted)
    group["payload_dtype"] = dtype_name(dtype)
    if not keeps_all_errors and codec is not None and codec.bits == 2:
        raise ValueError(
            f"payload_dtype={dtype!r} is for Average, AdamS and LocalSteps, which keep the "
            "rounding error of every tensor; other classes keep only that of compressed ones. "
            "Use 'int4'."
        )


def read_int8(argument: str, dtype: object) -> str | None:
    """Return the name of a dtype; raise ValueError if it is neither None nor int8."""
    name = dtype_name(dtype)
    require(name in (None, "int8"), argument, dtype, "None or 'int8'")
    return None if name is None else "int8"


def check_compress(group: dict[str, Any]) -> None:
    """Check a group's ``compress``."""
    is_valid = group["compress"] in (None, True, False)
    require_option(is_valid, group, "compress", "None, True or False")


# The dense start


def dense_start_of(bucket: Bucket) -> int:
    """Return the number of steps before compression starts; endless in a single process."""
    return FOREVER if bucket.sends_nothing else count_dense_steps(bucket.group)


def count_dense_steps(group: dict[str, Any]) -> int:
    """Return the number of steps before compression starts: the user's, more if a trial needs them,
    endless if compression does not pay.
    """
    steps = int(group["dense_steps"])
    if group["when"] != "auto":
        return steps
    return FOREVER if group["pays"] is False else max(steps, group["dense_until"])


def ramp_of(group: dict[str, Any]) -> int:
    """Return the number of steps after the dense start over which density falls; 0 for classes
    without that option.
    """
    return int(group.get("density_steps", 0))


# The form in which ranks compare options


class GroupSnapshot:
    """The options of one group that ranks compare, as plain values.

    ``rates`` may change from step to step; ``fixed`` are all others.
    """

    def __init__(self, name: str, group: Group, known: Collection[str]):
        self.name = name
        self.names = [n for n in sorted(known) if n in group and n != "step"]
        self.values: list[object] = [self] * len(self.names)  # when they were last read
        self.rates: dict[str, object] = {}
        self.fixed: dict[str, object] = {}

    def update(self, values: list[object]) -> bool:
        """Note new values. Returns True if a fixed option has changed."""
        is_changed = False
        for i, (name, value) in enumerate(zip(self.names, values, strict=True)):
            if value is self.values[i]:
                continue
            # no value is this object: what may change in place is compared anew every time
            is_tuple_of_plain = type(value) is tuple and PLAIN.issuperset(map(type, value))
            self.values[i] = value if type(value) in PLAIN or is_tuple_of_plain else self
            plain = make_comparable(value)
            if name in RATES:
                self.rates[name] = plain
            elif repr(self.fixed.get(name, self)) != repr(plain):
                self.fixed[name], is_changed = plain, True
        return is_changed


class OptionSnapshot:
    """The options of all groups when they were last read; they are rendered only when one has
    changed.
    """

    def __init__(self) -> None:
        self.groups: list[GroupSnapshot] = []
        self.unchecked: set[int] = set()  # numbers of groups that have changed since their check
        # the options that decide what is sent, and so the lengths of messages
        self.message_options = ""
        self.checksum: int | None = None  # of all settings but rates; None: not known
        self.rates: list[dict[str, object]] = []  # of each group
        self._entries: list[tuple[str, ...]] = []

    def refresh(self, compared: Sequence[ComparedGroups]) -> None:
        """Read the options again. ``compared`` begins with the groups that the class checks."""
        groups = [*chain.from_iterable(map(itemgetter(1), compared))]
        if (entries := [*map(tuple, groups)]) != self._entries:
            self._entries, self.unchecked = entries, set()
            self.groups = [
                GroupSnapshot(f"{name} {number}", group, known)
                for name, groups, known in compared
                for number, group in enumerate(groups)
            ]
            self.rates = [seen.rates for seen in self.groups]
        is_changed = False
        for number, (seen, group) in enumerate(zip(self.groups, groups, strict=True)):
            values = [*map(group.__getitem__, seen.names)]
            if not all(map(is_, values, seen.values)):
                self.unchecked.add(number)
                is_changed |= seen.update(values)
        if is_changed:
            own = self.groups[: len(compared[0][1])]
            self.message_options = repr([seen.fixed for seen in own])
            self.checksum = None


def make_comparable(value: object) -> object:
    """Return numbers, text or tuples of them, whose ``repr`` is equal for equal values in all
    processes.
    """
    if type(value) in PLAIN or isinstance(value, str):
        return value
    if hasattr(value, "tolist"):  # tensors, and what is NumPy's
        return make_comparable(value.tolist())
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")  # as payload_dtype is kept
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, dict):
        return tuple(
            sorted(((make_comparable(k), make_comparable(v)) for k, v in value.items()), key=repr)
        )
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(make_comparable, value), key=repr))
    if isinstance(value, list | tuple):
        return tuple(map(make_comparable, value))
    # a function or a class by its name, any other object by its class
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
