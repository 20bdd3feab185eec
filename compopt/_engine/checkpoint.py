"""State dicts of an optimizer whose state lives in buckets: saved, consolidated, and loaded.

In memory masks are bits, and a momentum that is zero off its mask has only the values on it. In a
state dict every state has its parameter's shape, and is a DTensor if the parameter is one: so
torch.distributed.checkpoint can shard and gather it like the parameter, and a checkpoint loads
under another wrapper or another number of ranks. Loading checks that everything fits before it
changes anything.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._state.bucket import Bucket
from .._state.layouts import Layout, TensorInfo
from .._state.tensors import to_local
from .._wire.codec import dtype_name
from .._wire.warning import warn
from .engine import Engine
from .method import Method
from .options import Group, absolute_rates, is_count, refuse_unsupported, require
from .resharding import average_residuals, average_state, gather_shards

FORMAT = 2  # the format of state dicts, in every group; torch's groups have none

# entries of a saved group that are no options
NOT_OPTIONS = {"params", "param_names", "without_state", "residuals", "class", "format"}
ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}  # the state of torch.optim.AdamW
MOST_STEPS = 2**53  # a float64 counts no further

Layouts = Mapping[str, Layout]


# Saving


def settle_for_saving(engine: Engine) -> None:
    """Wait for everything in flight, and raise if a step was applied in part."""
    engine.check_sound()
    engine.settle_state()


@contextmanager
def without_hooks(optimizer: Method) -> Iterator[None]:
    """Call no state dict hooks of ``optimizer`` in this context."""
    names = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
    hooks = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)


def complete_state_dict(engine: Engine, saved: dict[str, Any]) -> None:
    """Give every state of torch's state dict its parameter's shape, and complete its groups."""
    groups = engine.method.param_groups
    params = [p for group in groups for p in group["params"]]
    number = {p: n for n, p in enumerate(params)}
    for bucket in [*engine.buckets, *engine.frozen_buckets]:
        layouts = {**engine.method.bucket_layouts(bucket), **bucket.layouts}  # as it is stored
        for i, p in enumerate(bucket.params):
            if entry := saved["state"].get(number[p]):
                saved["state"][number[p]] = expand_entry(bucket, i, layouts, entry)
    engine.refresh_ranks()  # groups say whose residuals these are
    for saved_group, group in zip(saved["param_groups"], groups, strict=True):
        saved_group.update(describe_group(engine, group))


def expand_entry(bucket: Bucket, i: int, layouts: Layouts, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the state of tensor i in the tensor's shape; gathered shards if there are any."""
    info, expanded = bucket.get_tensor_info(i), dict(entry)
    for name in layouts.keys() & entry.keys():
        gathered = bucket.gathered_state[name][i] if name in bucket.gathered_state else None
        if gathered is None:
            expanded[name] = layouts[name].expand(entry[name], info, entry)
        else:
            expanded[name] = info.to_param_shape(gathered.to(bucket.device))
    return expanded


def describe_group(engine: Engine, group: Group) -> dict[str, Any]:
    """Return the entries that every group of a state dict has beside its options: whose residuals
    it holds, the class and format, and which parameters have no state.
    """
    entries = {
        "residuals": describe_residual_source(engine),
        "class": engine.name,
        "format": FORMAT,
    }
    if "payload_dtype" in group:  # users may set it
        entries["payload_dtype"] = dtype_name(group["payload_dtype"])
    # never trained: a checkpoint without their state is not damaged
    state = engine.method.state
    without = [index for index, p in enumerate(group["params"]) if not state.get(p)]
    # also if empty: torch.distributed.checkpoint refuses to load what a checkpoint lacks
    return {**entries, "without_state": without}


def describe_residual_source(engine: Engine) -> str:
    """Return the rank whose residuals a state dict would hold now, or "mean" for their mean over
    ranks.
    """
    if not (engine.method.sharded or engine.method.rank_local_state):
        return "mean"
    is_gathered = all(b.gathered_state or not b.sharded_names for b in engine.buckets)
    comm = engine.comm
    if comm.size == 1 or (is_gathered and engine.consolidated_at == engine.steps):
        return "mean"
    return f"rank {comm.rank} of {comm.size}"


def consolidate(engine: Engine) -> None:
    """Replace residuals by their mean over ranks, and gather sharded state for the next state
    dict.
    """
    settle_for_saving(engine)
    engine.refresh_ranks()
    engine.overlap.discard()  # payloads of a backward hold the residuals of before
    for bucket in engine.buckets:
        for name in engine.method.rank_local_state:
            average_residuals(bucket, name, bucket.device, engine.comm)
        bucket.gathered_state = {}
        for name in bucket.sharded_names:
            bucket.gathered_state[name] = gather_shards(bucket, name, engine.comm)
    for bucket in engine.frozen_buckets:
        for p in bucket.params:
            entry = engine.method.state.get(p, {})
            for name in engine.method.rank_local_state:
                layout, info = engine.method.bucket_layouts(bucket)[name], TensorInfo(p, True)
                if name in entry and layout.numel(
                    info
                ):  # LocalSteps has none in its averaged start
                    values = layout.expand(entry[name], info, entry)
                    average_state(values, bucket.device, engine.comm)
                    compact = layout.compact(to_local(values), info, entry)
                    to_local(entry[name]).copy_(compact)
    engine.consolidated_at = engine.steps
    engine.count_save()


@torch.no_grad()
def make_state_for_joiner(engine: Engine) -> dict[str, Any]:
    """Return the state for a rank that joins (see ``CompressedOptimizer.state_for_joiner``)."""
    if engine.method.sharded:
        raise ValueError(
            f"{engine.name} has cut its state into shards, of which this rank holds one: call "
            "consolidate_state() on all ranks, and let the new one load the state dict."
        )
    warned = engine.warned
    engine.warned = {*warned, "saving"}  # nothing that the joiner needs is missing
    try:
        saved = engine.method.state_dict()
    finally:
        engine.warned = warned
    unsent = {*engine.method.rank_local_state, "residual"}
    copied: dict[str, Any] = _copy_without(unsent, saved)
    for group in copied["param_groups"]:
        group["residuals"] = "mean"
    return copied


def _copy_without(names: set[str], value: Any, name: str = "") -> Any:
    """Return a copy that shares no memory, with zeros for tensors of these names."""
    if isinstance(value, dict):
        return {key: _copy_without(names, each, key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_without(names, each) for each in value)
    if isinstance(value, Tensor):
        return torch.zeros_like(value) if name in names else value.detach().clone()
    return copy.deepcopy(value)


def warn_of_missing_state(engine: Engine) -> None:
    """Warn once, on the rank that saves, about state of other ranks that a state dict lacks."""
    if "saving" in engine.warned or describe_residual_source(engine) == "mean":
        return
    if missing := list(_describe_missing_state(engine, engine.method.residual_buckets)):
        engine.warned.add("saving")
        warn(
            f"this state dict of {engine.name} is incomplete: {', and '.join(missing)}. Call "
            "consolidate_state() on all ranks before rank 0 saves."
        )


def _describe_missing_state(engine: Engine, buckets: Sequence[Bucket]) -> Iterator[str]:
    comm = engine.comm
    others = "the other rank" if comm.size == 2 else f"the other {comm.size - 1} ranks"
    cut = [bucket for bucket in buckets if bucket.sharded_names]
    if cut and engine.steps:
        elements = sum(sum(bucket.shards.own_sizes) for bucket in cut)
        share = elements / max(1, sum(bucket.numel for bucket in cut))
        names = ", ".join(dict.fromkeys(n for bucket in cut for n in bucket.sharded_names))
        yield (
            f"it holds rank {comm.rank}'s {share:.0%} of the moments ({names}) and zeros for the "
            "rest"
        )
    # other ranks have residuals in the same steps as this one
    residuals = engine.method.rank_local_state
    if any(bucket.flat[name].any() for bucket in buckets for name in residuals):
        yield f"it lacks the residuals of {others} ({', '.join(residuals)})"
    # inner optimizers step by themselves on every rank; inside FSDP2 parameters differ as shards
    if not (engine.method.has_equal_replicas or engine.method.replaces_reduce_scatter):
        yield f"it lacks the inner optimizer's state of {others}"


# Loading


def drop_absent_values(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without empty dicts in its entries.

    torch puts one in the place of every name in ``state`` that a flattened state dict lacks.
    """
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    if not isinstance(state, dict):  # damaged: who reads it says so
        return state_dict
    entries = {
        key: {n: v for n, v in entry.items() if not (isinstance(v, dict) and not v)}
        if isinstance(entry, dict)
        else entry
        for key, entry in state.items()
    }
    return {**state_dict, "state": entries}


def load_state(engine: Engine, state_dict: dict[str, Any]) -> None:
    """Load all groups and tensors of ``state_dict`` into the engine, or none.

    Raises ValueError if it does not fit.
    """
    engine.refresh_ranks()
    groups, saved = engine.option_groups, check_saved_groups(engine, state_dict)
    class_name = _check_class(engine.name, state_dict)
    options = [
        _read_saved_options(engine, group, other)
        for group, other in zip(groups, saved, strict=True)
    ]
    with _apply_options(groups, options):  # they determine which state there is
        entries = dict(_read_entries(engine, state_dict, class_name))
        if saved and saved[0].get("step", 0):  # nothing is lost before the first step
            names = engine.method.rank_local_state
            states = (entry[n] for entry in entries.values() for n in names if n in entry)
            warn_of_lost_residuals(engine, saved[0].get("residuals", "mean"), states)

    counted = max([float(entry.get("step", 0)) for entry in entries.values()], default=0.0)
    for group, other in zip(groups, saved, strict=True):
        if "step" not in other:  # torch.optim counts steps by parameter only
            group["step"] = int(counted)
    state = engine.method.state
    state.update(entries)
    # copy the state of frozen parameters, which is in no bucket
    for bucket in engine.frozen_buckets:
        layouts = engine.method.bucket_layouts(bucket)
        for i, p in enumerate(bucket.params):
            info, entry = bucket.get_tensor_info(i), state.pop(p)
            for name, value in entry.items():
                layout = layouts.get(name)
                dtype = torch.float32 if layout is None else layout.dtype
                value = value.to(bucket.device, dtype, copy=True)
                entry[name] = value if layout is None else layout.view_for_user(value, info)
            if entry:
                state[p] = entry


@contextmanager
def _apply_options(groups: list[Group], options: list[Group]) -> Iterator[None]:
    """Update ``groups`` by ``options``; if an error is raised in this context, restore them."""
    previous = [dict(group) for group in groups]
    try:
        for group, loaded in zip(groups, options, strict=True):
            group.update(loaded)
        yield
    except BaseException:
        for group, old in zip(groups, previous, strict=True):
            group.clear()
            group.update(old)
        raise


def _read_entries(
    engine: Engine, state_dict: dict[str, Any], class_name: str
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield every parameter and its state, in the form in which memory keeps it.

    Raises ValueError if a state is missing, or has another size.
    """
    known: dict[Tensor, tuple[TensorInfo, Layouts]] = {}
    for bucket in [*engine.buckets, *engine.frozen_buckets]:
        for p, compressed in zip(bucket.params, bucket.compressed, strict=True):
            known[p] = TensorInfo(p, compressed), engine.method.bucket_layouts(bucket)
    is_same_class, number = class_name == engine.name, 0
    for group, other in zip(engine.option_groups, state_dict["param_groups"], strict=True):
        names = group.get("param_names") or other.get("param_names")
        options = {**group, **other}
        for index, (p, key) in enumerate(zip(group["params"], other["params"], strict=True)):
            info, layouts = known[p]
            name = names[index] if names else ""
            label = f"parameter {number}" + (f" ({name})" if name else "")
            entry = state_dict["state"].get(key, {})
            # torch.optim has no state of a parameter that never had a gradient, and no residuals;
            # torch.distributed.checkpoint leaves out that of a parameter which is frozen now
            is_needed = p.requires_grad and index not in other.get("without_state", ())
            if entry or (is_same_class and is_needed):
                compressed = is_same_class and engine.method.is_compressed(p, options, name)
                _check_is_complete(label, entry, layouts, compressed, engine.name)
            local = {n: _to_tensor(v) for n, v in entry.items() if n in layouts or n == "step"}
            compact = {
                name: layouts[name].compact(value, info, local) if name in layouts else value
                for name, value in local.items()
            }
            _check_sizes(label, info, layouts, compact)
            check_step(compact.get("step", 0), f" of {label}")
            yield p, compact
            number += 1


def _to_tensor(value: Any) -> Tensor:
    """Return this rank's part of a state; other optimizers save step counts as numbers."""
    if isinstance(value, Tensor):
        return to_local(value)
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")


def _read_saved_options(engine: Engine, group: Group, other: Group) -> Group:
    """Return the options of one saved group, also those that only the user knows.

    The optimizer keeps its own names of parameters: they select what is compressed. Raises
    ValueError if an option is invalid.
    """
    saved_options = {name: value for name, value in other.items() if name not in NOT_OPTIONS}
    saved_options = copy.deepcopy(saved_options)
    options = {**group, **saved_options}
    refuse_unsupported({name: saved_options[name] for name in saved_options.keys() & {"amsgrad"}})
    rates = absolute_rates(options)
    checked = {**options, **rates}
    engine.method.check_group(checked)
    checked["step"] = check_step(checked.get("step", 0))
    # check_group may have converted a value; rates keep their signs
    return {name: (options if name in rates else checked)[name] for name in saved_options}


def check_step(step: Any, of: str = "") -> int:
    """Return a saved count of steps.

    Raises ValueError if no run has taken so many.
    """
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    is_possible = is_count(number, 0) and number <= MOST_STEPS
    require(is_possible, f"loaded step{of}", number, "a whole number from 0 to 2^53")
    return int(number)


def check_saved_groups(engine: Engine, state_dict: dict[str, Any]) -> list[Group]:
    """Return the saved groups.

    Raises ValueError if their number, their lengths or their format do not fit.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"loaded state dict has no {key!r}: it is no optimizer's state_dict()."
            )
    groups: list[Group] = engine.option_groups
    saved: list[Group] = state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"loaded state dict has {len(saved)} parameter groups, the optimizer has {len(groups)}."
        )
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"loaded state dict has {len(other['params'])} parameters in group {number}, "
                f"the optimizer has {len(group['params'])}."
            )
        if other.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"loaded state dict has format {other['format']!r}, and this compopt reads format "
                f"{FORMAT}: load it with the compopt that wrote it."
            )
    return saved


def _check_class(expected: str, state_dict: dict[str, Any]) -> str:
    """Return the class that wrote a state dict, "torch" if that is not recorded.

    Raises ValueError if ``expected`` cannot continue from its state.
    """
    saved = state_dict["param_groups"]
    class_name: str = saved[0].get("class", "torch") if saved else "torch"
    for entry in state_dict["state"].values():
        foreign = entry.keys() - ADAMW_STATE
        if class_name not in ("torch", expected) and foreign:
            raise ValueError(
                f"loaded state dict is of {class_name}, and {expected} cannot continue from its "
                f"state {min(foreign)!r}: build {class_name}, or load a checkpoint of {expected} "
                "or torch.optim."
            )
    return class_name


def check_entry(
    label: str, info: TensorInfo, layouts: Layouts, entry: dict[str, Any], expected: str
) -> None:
    """Raise ValueError if the state of one tensor does not fit."""
    _check_is_complete(label, entry, layouts, info.compressed, expected)
    _check_sizes(label, info, layouts, {n: _to_tensor(v) for n, v in entry.items() if n in layouts})


def _check_is_complete(
    label: str, entry: dict[str, Any], layouts: Layouts, compressed: bool, expected: str
) -> None:
    """Raise ValueError if an entry lacks a state of its tensor."""
    needed = {
        name
        for name, layout in layouts.items()
        if name != "master" and not layout.optional and (compressed or not layout.compressed_only)
    }
    missing = (needed | {"step"}) - entry.keys()
    if missing:
        raise ValueError(
            f"loaded state of {label} lacks {', '.join(sorted(missing))}: "
            f"it is damaged, or of an optimizer that {expected} cannot continue from."
        )


def _check_sizes(label: str, info: TensorInfo, layouts: Layouts, entry: dict[str, Tensor]) -> None:
    """Raise ValueError if a state has a wrong number of elements."""
    for name in filter(entry.__contains__, layouts):  # in one order on all ranks
        needed, numel = layouts[name].expected_numel(entry[name], info, entry), entry[name].numel()
        if numel != needed:
            raise ValueError(
                f"loaded state {name!r} of {label} has {numel} elements, "
                f"{needed} are needed for shape {tuple(info.param.shape)}."
            )


def warn_of_lost_residuals(engine: Engine, source: str, states: Iterable[Tensor]) -> None:
    """Warn if a checkpoint holds only one rank's residuals or shards, on the first rank that did
    not write it.

    ``source``: whose residuals these ``states`` are. Nothing is lost in a dense start, which leaves
    no residuals.
    """
    comm = engine.comm
    first = int(source == f"rank 0 of {comm.size}")
    if source == "mean" or comm.rank != first:
        return
    if engine.method.sharded or any(bool(value.any()) for value in states):
        warn(
            f"this checkpoint holds the residuals of {source} and is loaded on rank "
            f"{comm.rank} of {comm.size}: those of the other ranks are lost. Call "
            "consolidate_state() on all ranks before saving."
        )
