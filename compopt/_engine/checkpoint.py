"""State into flat storage and back: the layout of ``optimizer.state``, and loading that never
half-applies.

In memory masks are bits and a momentum that is zero off its mask keeps only what is on it. In a
state dict every state has its parameter's shape, and is a DTensor where the parameter is one: so
torch.distributed.checkpoint can cut and join it like the parameter, and a checkpoint loads under
another wrapper or another number of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._state.buckets import Bucket, local
from .._state.layouts import Layout, Member
from .._state.shards import unshard
from .._wire.requests import AllGather, AllReduceMean
from .when import as_now

if TYPE_CHECKING:
    from .._wire.comm import Comm, Pending
    from .engine import Engine

FORMAT = 1  # of state dicts; written into every group, beside the class. 0: none was written yet
NOT_OPTIONS = {
    "params",
    "param_names",
    "without_state",
    "residuals",
    "class",
    "format",
}  # of a saved group: what it is, and who wrote it
OF_TORCH = {"step", "exp_avg", "exp_avg_sq"}  # what torch.optim.AdamW keeps


def fill(
    bucket: Bucket, layouts: Mapping[str, Layout], state: MutableMapping[Tensor, dict[str, Any]]
) -> None:
    """Allocate the bucket's state, and make ``state`` show views of it.

    What ``state`` holds so far is copied in.
    """
    held = [{name: local(value) for name, value in state.get(p, {}).items()} for p in bucket.params]
    for name, layout in layouts.items():
        bucket.allocate(name, layout, held)
    bucket.state["step"] = [_count(bucket, old) for old in held]
    for i, (p, old) in enumerate(zip(bucket.params, held, strict=True)):
        member, entry = bucket.member(i), {"step": bucket.state["step"][i]}
        if "master" in layouts:
            old.setdefault("master", local(p.detach()))
        for name, layout in layouts.items():
            view = bucket.state[name][i]
            if view is None:
                continue
            if name in old:
                view.copy_(layout.part(old[name], member).view(view.shape))
            entry[name] = layout.shown(view, member)
        state[p] = entry
    bucket.entries = [state[p] for p in bucket.params]


def _count(bucket: Bucket, held: Mapping[str, Tensor]) -> Tensor:
    """How many steps a tensor has taken; as torch's own optimizers keep it, on the device."""
    on = bucket.device if bucket.device.type == "cuda" else "cpu"
    count = torch.zeros((), dtype=torch.float32, device=on)
    return count.copy_(held["step"]) if "step" in held else count


def spread(
    bucket: Bucket, i: int, layouts: Mapping[str, Layout], entry: dict[str, Any]
) -> dict[str, Any]:
    """The state of tensor i as a state dict has it: all in the tensor's shape."""
    member, spread_out = bucket.member(i), dict(entry)
    for name, layout in layouts.items():
        gathered = bucket.gathered.get(name)
        if name in entry and gathered is not None:
            spread_out[name] = member.laid_out(gathered[i].to(bucket.device))
        elif name in entry:
            spread_out[name] = layout.whole(entry[name], member, entry)
    return spread_out


def compact(entry: dict[str, Any], layouts: Mapping[str, Layout], member: Member) -> dict[str, Any]:
    """What ``spread`` made, or another optimizer's state, as small as it is kept in memory."""
    held = {
        name: local(value) if isinstance(value, Tensor) else value
        for name, value in entry.items()
        if name in layouts or name == "step"
    }
    return {
        name: layouts[name].compact(value, member, held) if name in layouts else value
        for name, value in held.items()
    }


def load(engine: Engine, state_dict: dict[str, Any]) -> None:
    """Put ``state_dict``'s groups and tensors into the optimizer, after checking that all of it
    fits.
    """
    groups, saved, state = engine.option_groups, groups_of(engine, state_dict), engine.face.state
    written_by = _writer(engine, state_dict)
    options = [_options(engine, group, other) for group, other in zip(groups, saved, strict=True)]
    pairs: list[tuple[Tensor, dict[str, Any]]] = []
    buckets = [*engine.buckets, *engine.shelf]
    specs = {p: engine.specs(bucket) for bucket in buckets for p in bucket.params}
    members = {
        p: Member(p, c)
        for bucket in buckets
        for p, c in zip(bucket.params, bucket.compressed, strict=True)
    }
    for group, other in zip(groups, saved, strict=True):
        names = group.get("param_names") or other.get("param_names")
        for place, (p, key) in enumerate(zip(group["params"], other["params"], strict=True)):
            name = names[place] if names else ""
            entry = state_dict["state"].get(key, {})
            if entry or place not in other.get("without_state", ()):
                _check_names(
                    len(pairs),
                    entry,
                    specs[p],
                    engine.face.is_compressed(p, {**group, **other}, name),
                    written_by,
                    engine.name,
                )
            pairs.append((p, compact(entry, specs[p], members[p])))
    for number, (p, entry) in enumerate(pairs):
        _check(number, entry, specs[p], members[p])
    for other in saved:
        _warn_of_other_ranks(engine, other.get("residuals", "mean"))

    counted = max([float(entry.get("step", 0)) for _, entry in pairs], default=0.0)
    for group, other, kept in zip(groups, saved, options, strict=True):
        group.update(kept)
        if "step" not in other:  # from torch.optim: count on from its parameters
            group["step"] = int(counted)
    for p, entry in pairs:
        state[p] = {k: as_tensor(v) for k, v in entry.items()}
    for bucket in engine.shelf:
        _keep(bucket, specs, state)


def as_tensor(value: Tensor | float | bool) -> Tensor:
    """A state as a tensor: other optimizers save some as numbers."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _keep(
    bucket: Bucket,
    specs: dict[Tensor, dict[str, Layout]],
    state: MutableMapping[Tensor, dict[str, Any]],
) -> None:
    """What was loaded of parameters that are not laid out is copied, where there is any."""
    for p in bucket.params:
        kept = state.pop(p)
        dtypes = {"step": torch.float32, **{name: spec.dtype for name, spec in specs[p].items()}}
        if kept:
            state[p] = {k: v.to(bucket.device, dtypes[k], copy=True) for k, v in kept.items()}


def groups_of(engine: Engine, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """The saved groups, when they are as many and as long as the optimizer's, and of a format known
    here.
    """
    for key, kind in ("state", dict), ("param_groups", list):
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get(key), kind):
            raise ValueError(
                f"loaded state dict has no {key!r}: it is no optimizer's state_dict(), or damaged."
            )
    groups, saved = engine.option_groups, state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"loaded state dict has {len(saved)} parameter groups, the optimizer has {len(groups)}."
        )
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
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
    return saved


def _writer(engine: Engine, state_dict: dict[str, Any]) -> str:
    """The class that wrote a state dict, "torch" where it does not say, when the optimizer can go
    on from it.
    """
    saved, ours = state_dict["param_groups"], engine.name
    written_by = saved[0].get("class", "torch") if saved else "torch"
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


def _options(engine: Engine, group: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What one saved group says, also what only the user knows of; when the optimizer takes the
    options it knows.

    The names of parameters stay the optimizer's own: they say what is compressed.
    """
    kept = copy.deepcopy(as_now({k: v for k, v in other.items() if k not in NOT_OPTIONS}))
    step = kept.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise ValueError(
            f"loaded state dict has step {step!r}: a count of steps is needed; it is damaged."
        )
    try:
        engine.face.check_group({**group, **kept})
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"loaded state dict has an option of a wrong type ({error}): it is damaged."
        ) from error
    return kept


def _check_names(
    number: int,
    entry: dict,
    specs: dict[str, Layout],
    compressed: bool,
    written_by: str,
    loaded_by: str,
) -> None:
    """Raise ValueError when states are missing."""
    ours = (
        written_by == loaded_by
    )  # torch.optim keeps no residuals, and nothing for what never had a gradient
    wanted = {
        name for name, spec in specs.items() if name != "master" and not spec.compressed_only
    } | {"step"}
    if ours and compressed:
        wanted |= {
            name for name, spec in specs.items() if spec.compressed_only and not spec.optional
        }
    if (ours or entry) and wanted - entry.keys():
        raise ValueError(
            f"loaded state of parameter {number} lacks {', '.join(sorted(wanted - entry.keys()))}: "
            f"it is damaged, or of an optimizer that {loaded_by} cannot go on from."
        )
    for name in specs.keys() & entry.keys():
        if not isinstance(entry[name], Tensor):
            raise ValueError(
                f"loaded state {name!r} of parameter {number} is no tensor: it is damaged."
            )


def _check(
    number: int, entry: dict[str, Any], layouts: Mapping[str, Layout], member: Member
) -> None:
    """Raise ValueError where a state is not what it should be."""
    for name, value in entry.items():
        if name == "step" and not (isinstance(value, (Tensor, int, float)) and float(value) >= 0):
            raise ValueError(
                f"loaded state 'step' of parameter {number} is {value!r}, no count: it is damaged."
            )
        if name not in layouts:
            continue
        want = layouts[name].wanted(value, member, entry)
        if value.numel() != want:
            raise ValueError(
                f"loaded state {name!r} of parameter {number} has {value.numel()} elements, "
                f"{want} are needed for shape {tuple(member.param.shape)}."
            )
        if not _fits(value, layouts[name].dtype):
            raise ValueError(
                f"loaded state {name!r} of parameter {number} is of {value.dtype} or not finite, "
                f"and {layouts[name].dtype} is needed: it is damaged."
            )


def _fits(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether values are finite, and of whole numbers where these are kept."""
    if value.is_floating_point() != dtype.is_floating_point:
        return False
    return not value.is_floating_point() or bool(value.isfinite().all())


def _warn_of_other_ranks(engine: Engine, residuals: str) -> None:
    comm = engine.comm
    if residuals not in ("mean", f"rank {comm.rank} of {comm.size}"):
        warnings.warn(
            f"this checkpoint holds the residuals of {residuals} and is loaded on rank "
            f"{comm.rank} of {comm.size}: what the other ranks held back is lost. Call "
            "consolidate_state() on all ranks before saving.",
            stacklevel=4,
        )


# Across ranks

Gathering = Generator["Pending", None, Any]


def average(tensor: Tensor, device: torch.device, comm: Comm) -> Gathering:
    """Replace a state by its mean over ranks."""
    pending = comm.start(AllReduceMean(local(tensor).to(device, copy=True)))
    yield pending
    local(tensor).copy_(pending.wait())


def gather(bucket: Bucket, name: str, comm: Comm, owners: list[int] | None = None) -> Gathering:
    """One sharded state of a bucket, whole and in host memory, a vector a tensor that has it. All
    ranks must ask.

    What nobody has, because its owner is gone, is as in the parameters for masters, 0 otherwise.
    """
    shards, flat = bucket.shards, bucket.flat[name].to(bucket.device)
    pending = comm.start(AllGather(torch.nn.functional.pad(flat, (0, shards.most - flat.numel()))))
    yield pending
    has = [part is not None for part in bucket.state[name]]
    whole = [
        torch.zeros(n, dtype=flat.dtype) if h else None
        for n, h in zip(shards.lengths, has, strict=True)
    ]
    if name == "master":
        for w, p in zip(whole, bucket.params, strict=True):
            w.copy_(local(p.detach()).reshape(-1))
    unshard(shards, pending.wait().cpu(), whole, owners)
    return whole


def move(old: list[Bucket], new: list[Bucket], comm: Comm) -> Gathering:
    """Cut the shards of ``old`` buckets again as the ``new`` ones are cut, over the ranks that are
    left.
    """
    pending = comm.start(
        AllGather(torch.tensor([old[0].shards.rank], dtype=torch.int64, device=old[0].device))
    )
    yield pending
    owners = pending.wait().view(-1).tolist()
    for before, after in zip(old, new, strict=True):
        for name in before.sharded:
            whole = yield from gather(before, name, comm, owners)
            for w, own, (start, stop) in zip(
                whole, after.state[name], after.shards.own, strict=True
            ):
                if own is not None:
                    own.copy_(w[start:stop])
