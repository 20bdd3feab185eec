"""Optimizer state across ranks: averaged, gathered, and resharded for the ranks that are left.

State follows ``requires_grad``, too: parameters that require no gradient are in no bucket, have no
state, and are never sent. State of a parameter that is frozen later stays in ``optimizer.state``,
in tensors of its own, is saved like all state, and is used again when the parameter is unfrozen.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._state.buckets import Bucket
from .._state.shards import unshard
from .._state.tensors import to_local
from .._wire.collectives import Communicator
from .._wire.requests import AllGather, AllReduceMean, Broadcast
from .session import Session
from .turns import Turns, ask


def average_state(tensor: Tensor, device: torch.device, comm: Communicator) -> Turns[None]:
    """Replace a state by its mean over ranks."""
    request = AllReduceMean(to_local(tensor).to(device, copy=True))
    to_local(tensor).copy_((yield from ask(comm, request)))


def average_base(base: Optimizer, buckets: Sequence[Bucket], comm: Communicator) -> Turns[None]:
    """Replace what another optimizer keeps of parameters by its mean over ranks; what is no float
    of the parameter's shape, as counts of steps, by that of rank 0.

    Of a parameter for which it does not keep the same on all ranks nothing changes.
    """
    for bucket in buckets:
        held = [base.state.get(p, {}) for p in bucket.params]
        tensors = [
            sorted((n, to_local(v)) for n, v in e.items() if torch.is_tensor(v)) for e in held
        ]
        kinds = [repr([(n, v.shape, v.dtype) for n, v in pairs]) for pairs in tensors]
        codes = torch.tensor(
            [zlib.crc32(kind.encode()) for kind in kinds], dtype=torch.int64, device=bucket.device
        )
        rows = yield from ask(comm, AllGather(codes))
        messages: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
        for p, pairs, same in zip(bucket.params, tensors, rows.eq(rows[0]).all(0), strict=True):
            for _, value in pairs if same else ():
                is_mean = value.is_floating_point() and value.shape == to_local(p).shape != ()
                messages.setdefault((is_mean, value.dtype), []).append(value)
        for (is_mean, _), values in messages.items():
            flat = torch.cat([value.to(bucket.device).reshape(-1) for value in values])
            flat = yield from ask(comm, AllReduceMean(flat) if is_mean else Broadcast(flat))
            parts = flat.split([value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.copy_(part.view(value.shape))


def gather_shards(
    bucket: Bucket, name: str, comm: Communicator, owners: list[int] | None = None
) -> Turns[list[Tensor | None]]:
    """One sharded state of a bucket, whole and in host memory, a vector a tensor that has it.

    All ranks must ask. What nobody has, because its owner is gone, is as in the parameters for
    masters, 0 otherwise.
    """
    shards, flat = bucket.shards, bucket.flat[name].to(bucket.device)
    padded = torch.nn.functional.pad(flat, (0, shards.max_numel - flat.numel()))
    rows = yield from ask(comm, AllGather(padded))
    whole: list[Tensor | None] = []
    for p, n, part in zip(bucket.params, shards.lengths, bucket.state[name], strict=True):
        if name == "master":
            whole.append(to_local(p.detach()).reshape(-1).to("cpu", flat.dtype, copy=True))
        else:
            whole.append(None if part is None else torch.zeros(n, dtype=flat.dtype))
    unshard(shards, rows.cpu(), whole, owners)
    return whole


def reshard_state(old: list[Bucket], new: list[Bucket], comm: Communicator) -> Turns[None]:
    """Cut the shards of ``old`` buckets as the ``new`` ones are cut, over the ranks that are left.

    Each says which rank it was before.
    """
    was = torch.tensor([old[0].shards.rank], dtype=torch.int64, device=old[0].device)
    owners = (yield from ask(comm, AllGather(was))).view(-1).tolist()
    for before, after in zip(old, new, strict=True):
        for name in before.sharded_names:
            whole = yield from gather_shards(before, name, comm, owners)
            for vector, own, (start, stop) in zip(
                whole, after.state[name], after.shards.own_ranges, strict=True
            ):
                if vector is not None:
                    own.copy_(vector[start:stop])


def follow_requires_grad(session: Session, comm: Communicator) -> Turns[None]:
    """Lay out the parameters that require a gradient now, which are the same on all ranks.

    Sharded state of a parameter that is frozen is gathered, and kept whole.
    """
    session.settle_state()
    state = session.optimizer.state
    for bucket in session.buckets:
        for name in bucket.sharded_names:
            whole = yield from gather_shards(bucket, name, comm)
            for entry, vector in zip(bucket.entries, whole, strict=True):
                if vector is not None:
                    entry[name] = vector.to(bucket.device)
        for p, entry in zip(bucket.params, bucket.entries, strict=True):
            if not p.requires_grad:
                held = {name: t.clone() for name, t in entry.items() if isinstance(t, Tensor)}
                state[p] = held
    session.trainable = frozenset(p for p in session.parameters if p.requires_grad)
    session.rebuild_buckets()
    for bucket in session.buckets:
        bucket.update_masters()
