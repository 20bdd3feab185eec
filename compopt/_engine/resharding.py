"""Optimizer state across ranks: averaged, gathered, resharded, recovered after ranks were lost.

State follows ``requires_grad``: parameters that require no gradient are in no bucket, have no
state, and are never sent. State of a parameter that is frozen later stays in ``optimizer.state``,
in tensors of its own; it is saved like all state, and used again when the parameter is unfrozen.

A rank that dies while a step's payloads are on the wire may leave some ranks with all of them and
others without. The first have then applied the step and the others have not: the exception to "on
all ranks or on none", which no further message could prevent. In ``rebind`` the ranks that are a
step behind take it over from one that is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._state.bucket import Bucket
from .._state.leaves import read_base
from .._state.residuals import Residuals
from .._state.shards import unshard
from .._state.tensors import HOST, to_local
from .._wire.collectives import Communicator, connect
from .._wire.groups import ProcessGroup, Ranks
from .._wire.requests import AllGather, AllReduceMean, Broadcast
from .._wire.warning import warn_on_rank_0
from .engine import Engine
from .exchange import exchange_one
from .handshake import gather_json
from .options import Group
from .signals import defer_signals

# options that a commit sets, alike on all ranks
LEARNED_OPTIONS = ("adapted", "pays", "dense_until")


def average_state(
    tensor: Tensor, device: torch.device, comm: Communicator, weight: float = 1.0
) -> None:
    """Replace a tensor by its mean over ranks, in which this rank has a ``weight``; the mean weight
    is 1.
    """
    copied = to_local(tensor).to(device, copy=True).contiguous()  # strides are a rank's own
    to_local(tensor).copy_(exchange_one(comm, AllReduceMean(copied.mul_(weight))))


def average_residuals(bucket: Bucket, name: str, device: torch.device, comm: Communicator) -> None:
    """Replace the residuals of a bucket by their mean over ranks."""
    with Residuals(bucket, name).open() as opened:
        if opened.flat.numel():
            average_state(opened.flat, device, comm)
    bucket.cache.pop("has_residual", None)


def gather_shards(
    bucket: Bucket, name: str, comm: Communicator, owners: list[int] | None = None
) -> list[Tensor | None]:
    """Gather one sharded state of a bucket in host memory; None for tensors without that state.

    All ranks must call it. Shards whose owner is gone become the parameter for masters, else 0.
    """
    shards, flat = bucket.shards, bucket.flat[name].to(bucket.device)
    padded = torch.nn.functional.pad(flat, (0, shards.max_numel - flat.numel()))
    rows = exchange_one(comm, AllGather(padded))
    gathered: list[Tensor | None] = []
    for p, n, part in zip(bucket.params, shards.lengths, bucket.state[name], strict=True):
        if name == "master":
            gathered.append(to_local(p.detach()).reshape(-1).to("cpu", flat.dtype, copy=True))
        else:
            gathered.append(
                None if part is None else torch.zeros(n, dtype=flat.dtype, device="cpu")
            )
    unshard(shards, rows.cpu(), gathered, owners)
    return gathered


def reshard_state(old: list[Bucket], new: list[Bucket], comm: Communicator) -> None:
    """Copy the sharded state of ``old`` buckets to ``new`` ones, over the remaining ranks."""
    rank_before = torch.tensor([old[0].shards.rank], dtype=torch.int64, device=old[0].device)
    owners = exchange_one(comm, AllGather(rank_before)).view(-1).tolist()
    for before, after in zip(old, new, strict=True):
        for name in before.sharded_names:
            gathered = gather_shards(before, name, comm, owners)
            for vector, shard, (start, stop) in zip(
                gathered, after.state[name], after.shards.own_ranges, strict=True
            ):
                if vector is not None:
                    shard.copy_(vector[start:stop])


def lay_out_trainable_parameters(engine: Engine, comm: Communicator) -> None:
    """Lay out the parameters that require a gradient now, which are the same on all ranks.

    Sharded state of a frozen parameter is gathered on every rank.
    """
    state = engine.method.state
    engine.settle_state()
    for bucket in engine.buckets:
        for name in bucket.sharded_names:
            gathered = gather_shards(bucket, name, comm)
            for entry, vector in zip(bucket.entries, gathered, strict=True):
                if vector is not None:
                    entry[name] = vector.to(bucket.device)
        for p, entry in zip(bucket.params, bucket.entries, strict=True):
            if not p.requires_grad:
                state[p] = {name: t.clone() for name, t in entry.items() if isinstance(t, Tensor)}
    engine.trainable = frozenset(p for p in engine.parameters if p.requires_grad)
    engine.rebuild_buckets()
    for bucket in engine.buckets:
        bucket.update_masters()


# Recovery after ranks were lost


def rebind_optimizer(
    engine: Engine,
    group: ProcessGroup | Ranks | Communicator | None,
    recover: Callable[[Engine], None] | None = None,
) -> None:
    """Continue over another group (see ``CompressedOptimizer.rebind``).

    ``recover``: makes ranks equal again, by default as ``catch_up``.
    """
    sharded = engine.method.sharded
    size_before = engine.begin_rebind()
    if sharded and (size := connect(group).size) > size_before:
        raise ValueError(
            f"rebind of {engine.name} cannot go from {size_before} to {size} ranks, because its "
            "state is sharded: load a consolidated checkpoint on all ranks instead."
        )
    engine.forget_in_flight()
    engine.forget_masks(engine.method.mask_state)
    engine.offload.finish()
    for bucket in engine.buckets:
        for entry in bucket.entries:
            for name in bucket.sharded_names:
                entry.pop(name, None)
    if sharded:
        engine.buckets_to_reshard = engine.buckets_to_reshard or engine.buckets
    engine.switch_group(group)
    (recover or catch_up)(engine)
    if sharded:
        before = engine.buckets_to_reshard or engine.buckets
        reshard_state(before, engine.buckets, engine.comm)
    engine.end_rebind()
    warn_of_lost_ranks(engine, size_before, engine.comm.size)


def catch_up(engine: Engine) -> None:
    """Copy state from a rank that is ahead to ranks that are one step behind.

    These lose their residuals, which may have been sent with the step that the others applied and
    must not be sent again. Shards of the moments stay, one step behind.

    Raises:
        ValueError: ranks are further apart than one failed step can explain.
    """
    groups, saved, comm = engine.option_groups, engine.method.save_without_hooks(), engine.comm
    # all tensors that ranks share, in the same order on all of them
    unshared = {name for bucket in engine.buckets for name in bucket.sharded_names}
    unshared.update(engine.method.rank_local_state)
    shared = [
        to_local(value)
        for key in sorted(saved["state"])
        for name, value in sorted(saved["state"][key].items())
        if name not in unshared and torch.is_tensor(value)
    ]
    of_base = read_base(saved, engine.method.given_options)
    counts = torch.tensor(of_base.read_scalars(), dtype=torch.float64, device="cpu")
    params = [to_local(p.detach()) for group in engine.method.param_groups for p in group["params"]]
    step = torch.tensor(engine.steps, dtype=torch.int64, device="cpu")
    tensors = [step, *params, *shared, *of_base.tensors, counts]
    copied = copy_from_rank_ahead(comm, engine.device, tensors, engine.steps)
    if copied is None:
        return
    source, messages = copied
    results = [{name: group[name] for name in LEARNED_OPTIONS if name in group} for group in groups]
    learned = gather_json(results, engine.device, comm)[source]
    if messages:
        with defer_signals():
            engine.damage = "rebind() was interrupted while it wrote a step of another rank"
            write_tensors(tensors, messages)
            of_base.write_scalars(counts.tolist())
            _load_without_residuals(engine, saved, int(step), learned)


def copy_from_rank_ahead(
    comm: Communicator,
    device: torch.device,
    tensors: Sequence[Tensor],
    count: int,
    limit: int = 1,
    unit: str = "step",
) -> tuple[int, list[Tensor]] | None:
    """Send ``tensors`` from the rank that has applied most steps to all others.

    ``count``: how many this rank has applied; -1 if it is new. Returns None if no rank is behind,
    else the rank that sends and what this rank received, which is nothing unless it is behind. The
    caller writes it, after all has arrived: the sender may die, and the others go on as they were.
    Raises ValueError if a rank is more than ``limit`` behind.
    """
    numbers = torch.tensor([count, len(tensors)], dtype=torch.int64, device=device)
    rows = exchange_one(comm, AllGather(numbers)).tolist()
    counts = [count for count, _ in rows]
    latest = max(counts)
    if min(counts) == latest:
        return None
    oldest = min(count for count in counts if count >= 0)
    if oldest < latest - limit or len({number for _, number in rows}) > 1:
        raise ValueError(
            f"ranks have taken {counts} {unit}s, but rebind() can make up for one missed step, and "
            "only after the first step was applied on all ranks: load the same checkpoint on all "
            "of them."
        )
    source, received = counts.index(latest), []
    for tensor in tensors:
        message = _without_bools(tensor).to(device, copy=True).contiguous()
        message = exchange_one(comm, Broadcast(message, source))
        received += [message.to(HOST)] if count < latest else []
    if late := ", ".join(f"rank {rank}" for rank, n in enumerate(counts) if 0 <= n < latest):
        warn_on_rank_0(
            f"{late} had not applied {unit} {latest}, and took it over from rank {source}: the "
            f"residuals of {late} are lost.",
            comm.rank,
        )
    return source, received


def write_tensors(tensors: Sequence[Tensor], messages: Sequence[Tensor]) -> None:
    """Write what ``copy_from_rank_ahead`` has received."""
    for tensor, message in zip(tensors, messages, strict=True):
        _without_bools(tensor).copy_(message)


def _without_bools(tensor: Tensor) -> Tensor:
    """Return a view that can be sent."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _load_without_residuals(
    engine: Engine, saved: dict[str, Any], step: int, learned: list[Group]
) -> None:
    """Load ``saved``, which has the tensors of the rank that is ahead, with that rank's ``step``
    and ``learned`` options, and zeros for residuals.
    """
    for entry in saved["state"].values():
        for name in set(engine.method.rank_local_state) & entry.keys():
            entry[name] = torch.zeros_like(entry[name])
    for group, options in zip(saved["param_groups"], learned, strict=True):
        group.update(_to_tuples(options), step=step, residuals="mean")
    engine.method.load_without_hooks(saved)
    for bucket in engine.buckets_to_reshard or engine.buckets:
        for name in set(engine.method.owner_only_state) & bucket.flat.keys():
            Residuals(bucket, name).clear()


def _to_tuples(value: Any) -> Any:
    """Return a value from JSON with tuples for its lists, as options have them."""
    if isinstance(value, dict):
        return {name: _to_tuples(entry) for name, entry in value.items()}
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def warn_of_lost_ranks(engine: Engine, size_before: int, size: int) -> None:
    """Warn if ranks are gone, and their residuals with them."""
    if engine.method.rank_local_state and size < size_before:
        shards = (
            " The moments of their shards begin again at zero." if engine.method.sharded else ""
        )
        warn_on_rank_0(
            f"{size_before - size} of {size_before} ranks are gone, and their residuals are lost. "
            f"The remaining {size} keep theirs (on this rank of norm {engine.residual_norm():.3g})."
            f"{shards}",
            engine.comm.rank,
        )
