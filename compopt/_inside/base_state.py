"""State of a wrapped optimizer, of whatever kind, made equal over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._engine.engine import Engine
from .._engine.exchange import exchange_one
from .._engine.options import Group
from .._state.bucket import Bucket
from .._state.leaves import Leaves, read_leaves
from .._state.tensors import to_local
from .._wire.collectives import Communicator
from .._wire.requests import AllGather, AllReduceMean, Broadcast

# In the entries of Muons that normalize rows or columns: a mean of squares for each.
MEAN_SQUARES = ".second_momentum_buffer"


def average_base(
    base: Optimizer, buckets: Sequence[Bucket], comm: Communicator, engine: Engine
) -> None:
    """Replace the state of a wrapped optimizer by its mean over ranks.

    State of a parameter that is more than floats of the parameter's shape, mean squares of its rows
    and single values, such as 8-bit moments, factors or projections, becomes rank 0's as a whole;
    and so do step counts. State stays the rank's own if its form differs between ranks, or if it
    holds objects that are no tensors or numbers; a warning says so once.
    """
    state = base.state
    entries = {p: read_leaves(state.get(p, {})) for bucket in buckets for p in bucket.params}
    alike = _find_alike(entries, buckets, comm)
    for p in entries.keys() - alike:
        _say_kept(engine, entries[p])
    # a factor of a square matrix has the shape of the matrix: what is a factor, others tell
    factors = {
        path
        for p in alike
        for path, value in zip(entries[p].paths, entries[p].tensors, strict=True)
        if value.numel() > 1 and value.is_floating_point() and not has_mean(value, path, p)
    }
    for bucket in buckets:
        means: dict[torch.dtype, list[Tensor]] = {}
        of_rank_0 = Leaves()
        for p in (p for p in bucket.params if p in alike):
            entry = entries[p]
            pairs = list(zip(entry.tensors, entry.paths, strict=True))
            large = [(value, path) for value, path in pairs if value.numel() > 1]
            is_mean = factors.isdisjoint(entry.paths) and all(has_mean(*one, p) for one in large)
            for value, path in pairs:
                if is_mean and has_mean(value, path, p):
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
        checksums = torch.tensor(
            [zlib.crc32(form.encode()) for form in forms], dtype=torch.int64, device=bucket.device
        )
        rows = exchange_one(comm, AllGather(checksums))
        are_equal = rows.eq(rows[0]).all(0).tolist()
        pairs = zip(bucket.params, are_equal, strict=True)
        alike.update(p for p, is_equal in pairs if is_equal and not entries[p].unknown)
    return alike


def copy_learned_options(
    groups: Sequence[Group], given: Collection[str], comm: Communicator, engine: Engine
) -> None:
    """Replace numbers and tensors in a base's groups by rank 0's, but for the options that are
    ``given`` to its constructor; all stay if they have another form on any rank.
    """
    leaves = Leaves()
    leaves.add_learned(groups, given)
    form = zlib.crc32(repr(leaves.kinds).encode())
    checksum = torch.tensor([form], dtype=torch.int64, device=engine.device)
    rows = exchange_one(comm, AllGather(checksum))
    if bool((rows == rows[0]).all()):
        copy_from_rank_0(leaves, engine.device, comm)


def has_mean(value: Tensor, path: str, p: Tensor) -> bool:
    """True for what may be averaged over ranks: floats like p, and mean squares of rows."""
    return is_like(value, p) or (path.endswith(MEAN_SQUARES) and value.is_floating_point())


def is_like(value: Tensor, p: Tensor) -> bool:
    """True for floats of the shape of ``p``, or of that shape flattened."""
    shape = to_local(p).shape
    has_shape = value.shape == shape or value.shape == (shape.numel(),)
    return has_shape and shape != () and value.is_floating_point() and value.element_size() > 1


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
    raw = [value.detach().reshape(-1).view(torch.uint8).to(device) for value in values]
    flat = exchange_one(comm, Broadcast(torch.cat(raw)))
    parts = flat.split([part.numel() for part in raw])
    # clones begin where a tensor of any dtype may
    answers = [p.clone().view(v.dtype).view(v.shape) for p, v in zip(parts, values, strict=True)]
    for value, answer in zip(leaves.tensors, answers, strict=False):
        value.copy_(answer)
    leaves.write_scalars(answers[-1].tolist())
