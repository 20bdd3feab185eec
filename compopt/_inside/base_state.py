"""State of a wrapped optimizer, of whatever kind: in the state dict of the wrapper, and made equal
over ranks.

torch.distributed.checkpoint keeps "state" and "param_groups" and drops everything else. So the
base's state of a tensor is in the wrapper's entry, under "base", and the base's options are in the
wrapper's groups, as "base.NAME" if both have an option of that name. The rest of the base's state
dict is beside them, under "base".

torch.distributed.checkpoint loads into existing entries only: so before the base's first step an
entry holds the state that a step on zeros would leave, and "begun" is 0.

``Wrapper`` saves and loads by it, and ``LocalSteps`` averages.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.checkpoint import NOT_OPTIONS
from .._engine.engine import Engine
from .._engine.exchange import exchange_one
from .._engine.optimizer import CompressedOptimizer
from .._engine.options import Group
from .._state.bucket import Bucket
from .._state.leaves import Leaves, read_leaves
from .._state.tensors import to_local, view_bytes
from .._wire.collectives import Communicator
from .._wire.requests import AllGather, AllReduceMean, Broadcast
from .bases import find_owner, keep_torch_random

Key = TypeVar("Key", bound=Hashable)

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
    base = find_owner(base, group)
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
    try:
        with keep_torch_random(p.device):
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


# In the entries of Muons that normalize rows or columns: a mean of squares for each.
MEAN_SQUARES = ".second_momentum_buffer"


def average_base(base: Optimizer, buckets: Sequence[Bucket], engine: Engine) -> None:
    """Replace the state of a wrapped optimizer by its mean over ranks.

    State of a parameter that is more than floats of the parameter's shape, mean squares of its rows
    and single values, such as 8-bit moments, factors or projections, becomes rank 0's as a whole;
    and so do step counts. State stays the rank's own if its form differs between ranks, or if it
    holds objects that are no tensors or numbers; a warning says so once.
    """
    state, comm = base.state, engine.comm
    entries = {p: read_leaves(state.get(p, {})) for bucket in buckets for p in bucket.params}
    alike = _find_alike(entries, buckets, comm)
    for p in entries.keys() - alike:
        _say_kept(engine, entries[p])
    shapes = {p: to_local(p).shape for p in alike}
    averaged = find_averaged({p: (entries[p], shapes[p]) for p in alike})
    for bucket in buckets:
        means: dict[torch.dtype, list[Tensor]] = {}
        of_rank_0 = Leaves()
        for p in (p for p in bucket.params if p in alike):
            entry = entries[p]
            for value, path in zip(entry.tensors, entry.paths, strict=True):
                if p in averaged and has_mean(value, path, shapes[p]):
                    means.setdefault(value.dtype, []).append(value)
                else:
                    of_rank_0.tensors.append(value)
            of_rank_0.scalars += entry.scalars
        for values in means.values():
            flat = torch.cat([value.to(bucket.device).reshape(-1) for value in values])
            flat = exchange_one(comm, AllReduceMean(flat))
            for value, part in zip(values, flat.split([v.numel() for v in values]), strict=True):
                value.copy_(part.view(value.shape))
        copy_from_rank_0(of_rank_0, bucket.device, comm)


def _find_alike(
    entries: dict[Tensor, Leaves], buckets: Sequence[Bucket], comm: Communicator
) -> set[Tensor]:
    """Return the parameters whose entries have one form on all ranks, and hold nothing unknown."""
    alike: set[Tensor] = set()
    for bucket in buckets:
        forms = [repr([*entries[p].kinds, *sorted(entries[p].unknown)]) for p in bucket.params]
        pairs = zip(bucket.params, _are_equal(forms, bucket.device, comm), strict=True)
        alike.update(p for p, is_equal in pairs if is_equal and not entries[p].unknown)
    return alike


def _are_equal(forms: Sequence[str], device: torch.device, comm: Communicator) -> list[bool]:
    """Return which of these are equal on all ranks."""
    checksums = [zlib.crc32(form.encode()) for form in forms]
    message = torch.tensor(checksums, dtype=torch.int64, device=device)
    rows = exchange_one(comm, AllGather(message))
    are_equal: list[bool] = rows.eq(rows[0]).all(0).tolist()
    return are_equal


def copy_learned_options(groups: Sequence[Group], given: Collection[str], engine: Engine) -> None:
    """Replace numbers and tensors in a base's groups by rank 0's, but for the options that are
    ``given`` to its constructor; all stay if they have another form on any rank.
    """
    leaves = Leaves()
    leaves.add_learned(groups, given)
    if all(_are_equal([repr(leaves.kinds)], engine.device, engine.comm)):
        copy_from_rank_0(leaves, engine.device, engine.comm)


def find_averaged(entries: Mapping[Key, tuple[Leaves, torch.Size]]) -> set[Key]:
    """Return the parameters whose state may be averaged over ranks: what it consists of has means.
    That of the others is one rank's, as a whole.

    ``entries``: the state of each, and its shape, or that of this rank's part.
    """
    large = {
        key: [pair for pair in zip(entry.paths, entry.tensors, strict=True) if pair[1].numel() > 1]
        for key, (entry, _) in entries.items()
    }
    # a factor of a square matrix has the shape of the matrix: what is a factor, others tell
    factors = {
        path
        for key, (_, shape) in entries.items()
        for path, value in large[key]
        if value.is_floating_point() and not has_mean(value, path, shape)
    }
    return {
        key
        for key, (entry, shape) in entries.items()
        if factors.isdisjoint(entry.paths)
        and all(has_mean(value, path, shape) for path, value in large[key])
    }


def has_mean(value: Tensor, path: str, shape: torch.Size) -> bool:
    """True for what may be averaged over ranks: floats of the shape of the parameter, or of that
    shape flattened, and mean squares of rows. Lists hold bases, one for each dimension: those of a
    square matrix have its shape.
    """
    has_shape = shape != () and value.shape in (shape, (shape.numel(),)) and "[" not in path
    is_like = has_shape and value.element_size() > 1
    return value.is_floating_point() and (is_like or path.endswith(MEAN_SQUARES))


def _say_kept(engine: Engine, entry: Leaves) -> None:
    if entry.kinds or entry.unknown:
        held = f"holds {min(entry.unknown)}" if entry.unknown else "has another form on other ranks"
        engine.warn_once_on_rank_0(
            "base state kept",
            f"state of the base {held}, and stays rank {engine.comm.rank}'s own: nothing averages "
            "it, and a checkpoint has that of the rank which writes it.",
        )


def copy_from_rank_0(leaves: Leaves, device: torch.device, comm: Communicator) -> None:
    """Replace tensors and numbers by rank 0's, which are sent as bytes."""
    if not leaves.tensors and not leaves.scalars:
        return
    scalars = torch.tensor(leaves.read_scalars(), dtype=torch.float64, device="cpu")
    values = [*leaves.tensors, scalars]
    raw = [view_bytes(value).to(device) for value in values]
    flat = exchange_one(comm, Broadcast(torch.cat(raw)))
    parts = flat.split([part.numel() for part in raw])
    # clones begin where a tensor of any dtype may
    answers = [p.clone().view(v.dtype).view(v.shape) for p, v in zip(parts, values, strict=True)]
    for value, answer in zip(leaves.tensors, answers, strict=False):
        value.copy_(answer)
    leaves.write_scalars(answers[-1].tolist())
