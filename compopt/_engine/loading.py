"""A state dict into an optimizer: after checking that all of it fits, so that nothing is loaded in
part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._state.buckets import Bucket
from .._state.layouts import Layout, Member
from .._state.tensors import to_local
from .._wire.warning import warn
from .options import Group, refuse
from .saving import FORMAT
from .session import Session
from .when import as_now

# of a saved group: what it is, and who wrote it
NOT_OPTIONS = {"params", "param_names", "without_state", "residuals", "class", "format"}
OF_TORCH = {"step", "exp_avg", "exp_avg_sq"}  # what torch.optim.AdamW keeps

Layouts = Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class Arriving:
    """What a state dict holds of one tensor, and where it goes."""

    called: str  # its number among all, and its name where it has one
    member: Member
    layouts: Layouts
    entry: dict[str, Any]


def load(session: Session, state_dict: dict[str, Any]) -> None:
    """Put ``state_dict``'s groups and tensors into the optimizer; all of them, or none.

    Raises:
        ValueError: it does not fit, or is damaged.
    """
    groups, saved = session.option_groups, groups_of(session, state_dict)
    written_by = _writer(session.name, state_dict)
    options = [_options(session, group, other) for group, other in zip(groups, saved, strict=True)]
    tensors = list(_arriving(session, state_dict, written_by))
    for tensor in tensors:
        _check(tensor)
    if _lacks_something(session, saved, tensors):
        _warn_of_other_ranks(session, saved[0].get("residuals", "mean"))

    counted = max([float(tensor.entry.get("step", 0)) for tensor in tensors], default=0.0)
    for group, other, kept in zip(groups, saved, options, strict=True):
        group.update(kept)
        if "step" not in other:  # from torch.optim: count on from its parameters
            group["step"] = int(counted)
    state = session.optimizer.state
    for tensor in tensors:
        state[tensor.member.param] = {k: as_tensor(v) for k, v in tensor.entry.items()}
    layouts = {tensor.member.param: tensor.layouts for tensor in tensors}
    for bucket in session.shelf:
        _keep(bucket, layouts, state)


def as_tensor(value: Tensor | float | bool) -> Tensor:
    """A state as a tensor: other optimizers save some as numbers."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _keep(
    bucket: Bucket,
    layouts: Mapping[Tensor, Layouts],
    state: MutableMapping[Tensor, dict[str, Any]],
) -> None:
    """What was loaded of parameters that are not laid out is copied, where there is any."""
    for p in bucket.params:
        kept = state.pop(p)
        dtypes = {name: layout.dtype for name, layout in layouts[p].items()}
        dtypes["step"] = torch.float32
        if kept:
            state[p] = {k: v.to(bucket.device, dtypes[k], copy=True) for k, v in kept.items()}


def _arriving(session: Session, state_dict: dict[str, Any], written_by: str) -> Iterator[Arriving]:
    """What the state dict holds of every tensor, as small as it is kept.

    Raises ValueError where names are missing.
    """
    known: dict[Tensor, tuple[Member, Layouts]] = {}
    for bucket in [*session.buckets, *session.shelf]:
        for p, compressed in zip(bucket.params, bucket.compressed, strict=True):
            known[p] = Member(p, compressed), session.layouts_of(bucket)
    ours, number = written_by == session.name, 0
    for group, other in zip(session.option_groups, state_dict["param_groups"], strict=True):
        names = group.get("param_names") or other.get("param_names")
        options = {**group, **other}
        for place, (p, key) in enumerate(zip(group["params"], other["params"], strict=True)):
            member, layouts = known[p]
            name = names[place] if names else ""
            called = f"parameter {number}" + (f" ({name})" if name else "")
            entry = state_dict["state"].get(key, {})
            # torch.optim keeps nothing for what never had a gradient, and no residuals
            if entry or (ours and place not in other.get("without_state", ())):
                compressed = ours and session.optimizer.is_compressed(p, options, name)
                wanted = _wanted(layouts, compressed)
                _check_names(called, entry, layouts, wanted, session.name)
            yield Arriving(called, member, layouts, compact(entry, layouts, member))
            number += 1


def compact(entry: dict[str, Any], layouts: Mapping[str, Layout], member: Member) -> dict[str, Any]:
    """What ``spread`` made, or another optimizer's state, as small as it is kept in memory."""
    held = {
        name: to_local(value) if isinstance(value, Tensor) else value
        for name, value in entry.items()
        if name in layouts or name == "step"
    }
    return {
        name: layouts[name].compact(value, member, held) if name in layouts else value
        for name, value in held.items()
    }


# Checks


def groups_of(session: Session, state_dict: dict[str, Any]) -> list[Group]:
    """The saved groups.

    Raises ValueError unless they are as many and as long as the optimizer's, and of a format known
    here.
    """
    for key, kind in ("state", dict), ("param_groups", list):
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get(key), kind):
            raise ValueError(
                f"loaded state dict has no {key!r}: it is no optimizer's state_dict(), or damaged."
            )
    groups: list[Group] = session.option_groups
    saved: list[Group] = state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"loaded state dict has {len(saved)} parameter groups, the optimizer has {len(groups)}."
        )
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        _check_group(number, group, other)
    return saved


def _check_group(number: int, group: Group, other: Group) -> None:
    if not isinstance(other, dict) or not isinstance(other.get("params"), list):
        raise ValueError(
            f"loaded state dict has no list of parameters in group {number}: it is damaged."
        )
    if len(group["params"]) != len(other["params"]):
        raise ValueError(
            f"loaded state dict has {len(other['params'])} parameters in group {number}, "
            f"the optimizer has {len(group['params'])}."
        )
    if other.get("format", 0) not in range(FORMAT + 1):
        raise ValueError(
            f"loaded state dict has format {other['format']!r}, this compopt reads formats up "
            f"to {FORMAT}: load it with the compopt that wrote it, or a newer one."
        )


def _writer(ours: str, state_dict: dict[str, Any]) -> str:
    """The class that wrote a state dict, "torch" where it does not say.

    Raises ValueError where ``ours`` cannot go on from it.
    """
    saved = state_dict["param_groups"]
    written_by: str = saved[0].get("class", "torch") if saved else "torch"
    for number, entry in state_dict["state"].items():
        if not isinstance(entry, dict):
            raise ValueError(
                f"loaded state of parameter {number} is no dict, but {entry!r}: it is damaged."
            )
        if written_by not in ("torch", ours) and (entry.keys() - OF_TORCH):
            raise ValueError(
                f"loaded state dict is of {written_by}, and its state "
                f"{min(entry.keys() - OF_TORCH)!r} is nothing that {ours} goes on from: build "
                f"{written_by}, or load a checkpoint of {ours} or torch.optim."
            )
    return written_by


def _options(session: Session, group: Group, other: Group) -> Group:
    """What one saved group says, also what only the user knows of.

    The names of parameters stay the optimizer's own: they say what is compressed. Raises
    ValueError where the optimizer does not take an option that it knows.
    """
    kept = copy.deepcopy(as_now({k: v for k, v in other.items() if k not in NOT_OPTIONS}))
    step = kept.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise ValueError(
            f"loaded state dict has step {step!r}: a count of steps is needed; it is damaged."
        )
    options = {**group, **kept}
    refuse({name: kept[name] for name in kept.keys() & {"amsgrad"}})
    try:
        session.optimizer.check_group(options)
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"loaded state dict has an option of a wrong type ({error}): it is damaged."
        ) from error
    return {name: options[name] for name in kept}  # an old word has become today's


def _wanted(layouts: Layouts, compressed: bool) -> set[str]:
    """The states that must be there of a tensor, and of one that is ``compressed``."""
    wanted = {"step"}
    for name, layout in layouts.items():
        if name == "master" or layout.optional:
            continue
        if compressed or not layout.compressed_only:
            wanted.add(name)
    return wanted


def _check_names(
    called: str, entry: dict[str, Any], layouts: Layouts, wanted: set[str], ours: str
) -> None:
    if wanted - entry.keys():
        raise ValueError(
            f"loaded state of {called} lacks {', '.join(sorted(wanted - entry.keys()))}: "
            f"it is damaged, or of an optimizer that {ours} cannot go on from."
        )
    for name in layouts.keys() & entry.keys():
        if not isinstance(entry[name], Tensor):
            raise ValueError(f"loaded state {name!r} of {called} is no tensor: it is damaged.")


def _check(tensor: Arriving) -> None:
    """Raise ValueError where a state is not what it should be."""
    member, called = tensor.member, tensor.called
    for name, value in tensor.entry.items():
        if name == "step" and not (isinstance(value, (Tensor, int, float)) and float(value) >= 0):
            raise ValueError(
                f"loaded state 'step' of {called} is {value!r}, no count: it is damaged."
            )
        if name not in tensor.layouts:
            continue
        layout = tensor.layouts[name]
        want = layout.expected_numel(value, member, tensor.entry)
        if value.numel() != want:
            raise ValueError(
                f"loaded state {name!r} of {called} has {value.numel()} elements, "
                f"{want} are needed for shape {tuple(member.param.shape)}."
            )
        if not _fits(value, layout.dtype):
            raise ValueError(
                f"loaded state {name!r} of {called} is of {value.dtype} or not finite, "
                f"and {layout.dtype} is needed: it is damaged."
            )


def _fits(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether values are finite, and of whole numbers where these are kept."""
    if value.is_floating_point() != dtype.is_floating_point:
        return False
    return not value.is_floating_point() or bool(value.isfinite().all())


def _lacks_something(session: Session, saved: list[Group], tensors: list[Arriving]) -> bool:
    """Whether the rank that saved this had part of something whole; nothing before the first step,
    no residuals in a dense start.
    """
    if not saved or saved[0].get("step", 0) == 0:
        return False
    names = session.optimizer.averaged_state
    held = (t.entry[name] for t in tensors for name in names if name in t.entry)
    return session.optimizer.sharded or any(bool(value.any()) for value in held)


def _warn_of_other_ranks(session: Session, residuals: str) -> None:
    """The first rank says so that did not write the checkpoint: rank 0 may have its own."""
    comm = session.comm
    first = int(residuals == f"rank 0 of {comm.size}")
    if residuals != "mean" and comm.rank == first:
        warn(
            f"this checkpoint holds the residuals of {residuals} and is loaded on rank "
            f"{comm.rank} of {comm.size}: what the other ranks held back is lost. Call "
            "consolidate_state() on all ranks before saving.",
            rank=0,
        )
