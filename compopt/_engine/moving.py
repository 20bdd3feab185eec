"""State between ranks: averaged, gathered, and cut again for the ranks that are left."""

from __future__ import annotations

import torch
from torch import Tensor

from .._state.buckets import Bucket, local
from .._state.shards import unshard
from .._wire.comm import Comm
from .._wire.requests import AllGather, AllReduceMean
from .turns import Turns, ask


def average(tensor: Tensor, device: torch.device, comm: Comm) -> Turns[None]:
    """Replace a state by its mean over ranks."""
    request = AllReduceMean(local(tensor).to(device, copy=True))
    local(tensor).copy_((yield from ask(comm, request)))


def gather(
    bucket: Bucket, name: str, comm: Comm, owners: list[int] | None = None
) -> Turns[list[Tensor | None]]:
    """One sharded state of a bucket, whole and in host memory, a vector a tensor that has it.

    All ranks must ask. What nobody has, because its owner is gone, is as in the parameters for
    masters, 0 otherwise.
    """
    shards, flat = bucket.shards, bucket.flat[name].to(bucket.device)
    padded = torch.nn.functional.pad(flat, (0, shards.most - flat.numel()))
    rows = yield from ask(comm, AllGather(padded))
    whole: list[Tensor | None] = []
    for p, n, part in zip(bucket.params, shards.lengths, bucket.state[name], strict=True):
        if name == "master":
            whole.append(local(p.detach()).reshape(-1).to("cpu", flat.dtype, copy=True))
        else:
            whole.append(None if part is None else torch.zeros(n, dtype=flat.dtype))
    unshard(shards, rows.cpu(), whole, owners)
    return whole


def move(old: list[Bucket], new: list[Bucket], comm: Comm) -> Turns[None]:
    """Cut the shards of ``old`` buckets as the ``new`` ones are cut, over the ranks that are left.

    Each says which rank it was before.
    """
    was = torch.tensor([old[0].shards.rank], dtype=torch.int64, device=old[0].device)
    owners = (yield from ask(comm, AllGather(was))).view(-1).tolist()
    for before, after in zip(old, new, strict=True):
        for name in before.sharded:
            whole = yield from gather(before, name, comm, owners)
            for vector, own, (start, stop) in zip(
                whole, after.state[name], after.shards.own, strict=True
            ):
                if vector is not None:
                    own.copy_(vector[start:stop])
