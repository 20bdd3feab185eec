"""State of a wrapped optimizer, of whatever kind: copied, and made equal over ranks.

An entry of its ``state`` may hold tensors, tensors that consist of others (torchao's 8-bit
moments), numbers, lists and dicts (SOAP's bases), and objects that hold these (GaLore's
projections).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._state.bucket import Bucket
from .._state.tensors import to_local
from .._wire.collectives import Communicator
from .._wire.requests import AllGather, AllReduceMean, Broadcast
from .exchange import CollectiveGenerator, exchange_one
from .options import Group, make_comparable
from .session import Session

# In the entries of Muons that normalize rows or columns: a mean of squares for each.
MEAN_SQUARES = ".second_momentum_buffer"
CONSTANTS = (str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Leaves:
    """The tensors and numbers that an entry consists of.

    ``tensors``: plain ones, of a tensor that consists of others its parts; ``paths``: their names.
    ``scalars``: a container and a key of each number. ``kinds``: descriptions, which are equal on
    ranks whose entries have the same form. ``unknown``: the types of objects that cannot be sent.
    """

    tensors: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    scalars: list[tuple[Any, Any]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)

    def add_value(self, value: Any, path: str, container: Any = None, key: Any = None) -> None:
        """Add ``value``, which is under ``key`` in ``container``, and all that it holds."""
        if isinstance(value, torch.nn.Parameter):
            self.kinds.append(f"{path} parameter")
        elif isinstance(value, Tensor):
            self._add_tensor(to_local(value), path)
        elif is_plain_number(value):
            self.scalars.append((container, key))
            self.kinds.append(f"{path} {type(value).__name__}")
        elif isinstance(value, CONSTANTS):
            self.kinds.append(f"{path} {value!r}")
        elif isinstance(value, tuple):  # its numbers cannot be replaced: they count as constants
            self.kinds.append(
                f"{path} {make_comparable([x for x in value if is_plain_number(x)])!r}"
            )
            self._add_items([(n, x) for n, x in enumerate(value) if not is_plain_number(x)], path)
        elif isinstance(value, dict):
            self._add_items(sorted(value.items(), key=lambda item: repr(item[0])), path, value)
        elif isinstance(value, list):
            self._add_items([*enumerate(value)], path, value)
        elif vars_of(value):
            self.kinds.append(f"{path} {type(value).__qualname__}")
            self._add_items(sorted(vars_of(value).items()), path, vars_of(value))
        else:
            self.unknown.add(type(value).__qualname__)

    def add_learned(self, groups: Sequence[Group], given: Collection[str]) -> None:
        """Add the numbers and tensors of groups, but for the options that are ``given`` to a
        constructor.
        """
        for number, group in enumerate(groups):
            for name in sorted(group.keys() - set(given)):
                if is_plain_number(group[name]) or isinstance(group[name], Tensor):
                    self.add_value(group[name], f"{number}.{name}", group, name)

    def read_scalars(self) -> list[float]:
        return [float(container[key]) for container, key in self.scalars]

    def write_scalars(self, values: Sequence[float]) -> None:
        """Replace numbers, which keep their types."""
        for (container, key), number in zip(self.scalars, values, strict=True):
            container[key] = type(container[key])(number)

    def _add_items(
        self, items: Sequence[tuple[Any, Any]], path: str, container: Any = None
    ) -> None:
        if container is not None:  # objects may refer to each other
            if id(container) in self._seen:
                return
            self._seen.add(id(container))
        self.kinds.append(f"{path} {len(items)}")
        for key, value in items:
            self.add_value(value, f"{path}.{key}", container, key)

    def _add_tensor(self, value: Tensor, path: str) -> None:
        if names := list_parts(value):
            self.kinds.append(f"{path} {type(value).__qualname__} {tuple(value.shape)}")
            for name in names:
                self._add_tensor(getattr(value, name), f"{path}.{name}")
        else:
            self.tensors.append(value)
            self.paths.append(path)
            self.kinds.append(f"{path} {tuple(value.shape)} {value.dtype}")


def is_plain_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def vars_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object that holds state; none of a function, class or module."""
    if callable(value) or isinstance(value, torch.nn.Module):
        return {}
    return getattr(value, "__dict__", {})


def list_parts(tensor: Tensor) -> list[str]:
    """Return the attributes of a tensor that consists of others; none of a plain one, or of a
    DTensor, which can be cloned.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None and to_local(tensor) is tensor else []


# Copies


def copy_state(value: Any) -> Any:
    """Return a deep copy, also of tensors that cannot be cloned, but consist of some that can."""
    compound = find_compound(value)
    return copy.deepcopy(value, {id(tensor): copy_compound(tensor) for tensor in compound})


def find_compound(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, lists and tuples that consist of others."""
    if isinstance(value, Tensor):
        if list_parts(value):
            yield value
    elif isinstance(value, MutableMapping):
        for one in value.values():
            yield from find_compound(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from find_compound(one)


def copy_compound(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, part by part if it consists of others."""
    if not (names := list_parts(tensor)):
        return tensor.detach().clone()
    cls: Any = type(tensor)
    context = cls.__tensor_flatten__(tensor)[1]
    parts = {name: copy_compound(getattr(tensor, name)) for name in names}
    copied: Tensor = cls.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return copied


# Over ranks


def average_base(
    base: Optimizer, buckets: Sequence[Bucket], comm: Communicator, session: Session
) -> CollectiveGenerator[None]:
    """Replace the state of a wrapped optimizer by its mean over ranks.

    State of a parameter that is more than floats of the parameter's shape, mean squares of its rows
    and single values, such as 8-bit moments, factors or projections, becomes rank 0's as a whole;
    and so do step counts. State stays the rank's own if its form differs between ranks, or if it
    holds objects that are no tensors or numbers; that is said once.
    """
    state = base.state
    entries = {p: read_leaves(state.get(p, {})) for bucket in buckets for p in bucket.params}
    alike = yield from _find_alike(entries, buckets, comm)
    for p in entries.keys() - alike:
        _say_kept(session, entries[p])
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
            flat = yield from exchange_one(comm, AllReduceMean(flat))
            for value, part in zip(values, flat.split([v.numel() for v in values]), strict=True):
                value.copy_(part.view(value.shape))
        yield from copy_from_rank_0(of_rank_0, bucket.device, comm)


def _find_alike(
    entries: dict[Tensor, Leaves], buckets: Sequence[Bucket], comm: Communicator
) -> CollectiveGenerator[set[Tensor]]:
    """Return the parameters whose entries have one form on all ranks, and hold nothing unknown."""
    alike: set[Tensor] = set()
    for bucket in buckets:
        forms = [repr([*entries[p].kinds, *sorted(entries[p].unknown)]) for p in bucket.params]
        checksums = torch.tensor(
            [zlib.crc32(form.encode()) for form in forms], dtype=torch.int64, device=bucket.device
        )
        rows = yield from exchange_one(comm, AllGather(checksums))
        are_equal = rows.eq(rows[0]).all(0).tolist()
        pairs = zip(bucket.params, are_equal, strict=True)
        alike.update(p for p, is_equal in pairs if is_equal and not entries[p].unknown)
    return alike


def copy_learned_options(
    groups: Sequence[Group], given: Collection[str], comm: Communicator, session: Session
) -> CollectiveGenerator[None]:
    """Replace numbers and tensors in a base's groups by rank 0's, but for the options that are
    ``given`` to its constructor; all stay if they have another form on any rank.
    """
    leaves = Leaves()
    leaves.add_learned(groups, given)
    form = zlib.crc32(repr(leaves.kinds).encode())
    checksum = torch.tensor([form], dtype=torch.int64, device=session.device)
    rows = yield from exchange_one(comm, AllGather(checksum))
    if bool((rows == rows[0]).all()):
        yield from copy_from_rank_0(leaves, session.device, comm)


def has_mean(value: Tensor, path: str, p: Tensor) -> bool:
    """True for what may be averaged over ranks: floats like p, and mean squares of rows."""
    return is_like(value, p) or (path.endswith(MEAN_SQUARES) and value.is_floating_point())


def is_like(value: Tensor, p: Tensor) -> bool:
    """True for floats of the shape of ``p``, or of that shape flattened."""
    shape = to_local(p).shape
    has_shape = value.shape == shape or value.shape == (shape.numel(),)
    return has_shape and shape != () and value.is_floating_point() and value.element_size() > 1


def _say_kept(session: Session, entry: Leaves) -> None:
    if entry.kinds or entry.unknown:
        held = f"holds {min(entry.unknown)}" if entry.unknown else "has another form on other ranks"
        session.warn_once(
            "base state kept",
            f"state of the base {held}, and stays rank {session.comm.rank}'s own: nothing averages "
            "it, and a checkpoint has that of the rank which writes it.",
            session.comm.rank,
        )


def read_leaves(value: Any) -> Leaves:
    """Return what an entry of a state, or another value, consists of."""
    leaves = Leaves()
    leaves.add_value(value, "")
    return leaves


def read_base(saved: dict[str, Any], given: Collection[str]) -> Leaves:
    """Return what ranks share of the base's in the state dict of a wrapper: its state, and what it
    learns in groups.
    """
    beside = saved.get("base", {})
    entries = {key: entry["base"] for key, entry in saved["state"].items() if "base" in entry}
    leaves = read_leaves({**beside.get("state", {}), **entries})
    leaves.add_learned(beside.get("param_groups", ()), given)
    return leaves


def copy_from_rank_0(
    leaves: Leaves, device: torch.device, comm: Communicator
) -> CollectiveGenerator[None]:
    """Replace tensors and numbers by rank 0's, which are sent as bytes."""
    if not leaves.tensors and not leaves.scalars:
        return
    scalars = torch.tensor(leaves.read_scalars(), dtype=torch.float64, device="cpu")
    values = [*leaves.tensors, scalars]
    raw = [value.detach().reshape(-1).view(torch.uint8).to(device) for value in values]
    flat = yield from exchange_one(comm, Broadcast(torch.cat(raw)))
    parts = flat.split([part.numel() for part in raw])
    # clones begin where a tensor of any dtype may
    answers = [p.clone().view(v.dtype).view(v.shape) for p, v in zip(parts, values, strict=True)]
    for value, answer in zip(leaves.tensors, answers, strict=False):
        value.copy_(answer)
    leaves.write_scalars(answers[-1].tolist())
