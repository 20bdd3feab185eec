"""The files of a snapshot, and states as JSON and tensors: in files, and in messages to ranks that
have no snapshot.

Every rank writes a folder of its own. Replica 1 of 3 writes::

    folder/step-00000120-1759312345678901234-9f3c52d07be1a684/replica-1-of-3/
        state.distcp    the state, packed
        .metadata       the manifest: what the snapshot is, and the size and SHA-256 of its state

If a replica is sharded over four ranks, the first of them writes ``replica-1-of-3-shard-0-of-4``.

A file is written under another name, flushed to the disk, and renamed. The manifest comes last, so
a snapshot that has one is complete. The second line of a manifest is the SHA-256 of its first. So
any change of a file shows, and a snapshot is *intact* only if it is as it was written, where it was
written.

Nothing here is a pickle, so reading runs no code, whoever wrote the bytes. A state may hold dicts,
lists, tuples, sets, deques, Counters, numbers, strings, bytes, tensors, and NumPy's arrays and
numbers; ``pack`` refuses everything else by its name. Packed bytes are::

    8 bytes     the length of the header
    header      JSON: [the state, with a number in the place of each tensor, [dtype, shape] of each]
    tensors     the memory of each

``Snapshots`` writes by it, and ``_snapshot_loading`` reads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._state.tensors import to_local, view_bytes

State = dict[str, Any]
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}
STATE, MANIFEST, TEMPORARY = "state.distcp", ".metadata", ".part"
FORMAT = 1  # of files
PATTERN = re.compile(
    r"step-(\d+)-(\d+)-([0-9a-f]{16})/replica-(\d+)-of-(\d+)(?:-shard-(\d+)-of-(\d+))?$"
)


# States


class Packed(NamedTuple):
    """A state as JSON, and its tensors, in host memory of their own."""

    plain: Any
    tensors: list[Tensor]

    def describe(self) -> list[Any]:
        """Return what ``make_empty`` needs: JSON, the dtype and shape of each tensor."""
        specs = [[str(t.dtype).removeprefix("torch."), [*t.shape]] for t in self.tensors]
        return [self.plain, specs]

    def encode(self) -> list[Any]:
        """Return the packed bytes, in parts."""
        header = json.dumps(self.describe()).encode()
        return [len(header).to_bytes(8, "little"), header, *map(memory_of, self.tensors)]


def make_empty(plain: Any, specs: list[Any], limit: int) -> Packed:
    """Return a state with memory for its tensors, whose values have yet to come.

    Raises some Exception if the description is damaged, or the tensors do not take ``limit`` bytes.
    """
    shapes = [(DTYPES[name], tuple(map(int, shape))) for name, shape in specs]
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes)
    if size != limit or any(n < 0 for _, shape in shapes for n in shape):
        raise ValueError(f"tensors of {size} bytes where {limit} are")
    return Packed(plain, [torch.empty(n, dtype=dtype, device="cpu") for dtype, n in shapes])


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host."""
    memory: Any = view_bytes(tensor).numpy()
    return memoryview(memory)


# Packing: a value becomes {the name of its kind: its content}, a number, a string, None or a list


def pack(state: Any, name: str = "state") -> Packed:
    """Return a copy of a state as JSON and tensors; of a DTensor this rank's part.

    Raises TypeError if it holds something else; the message begins with ``name``.
    """
    tensors: list[Tensor] = []
    return Packed(_pack(state, name, tensors), tensors)


def _pack(value: Any, where: str, tensors: list[Tensor]) -> Any:
    kind: Any = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {"tensor": _pack_tensor(value, where, tensors)}
    if kind in (list, tuple, torch.Size, set, frozenset):
        entries = [_pack(entry, f"{where}[{i}]", tensors) for i, entry in enumerate(value)]
        name = "tuple" if kind is torch.Size else kind.__name__
        return entries if kind is list else {name: entries}
    if kind in (dict, OrderedDict, Counter):
        pairs = [
            [_pack(key, where, tensors), _pack(entry, f"{where}[{key!r}]", tensors)]
            for key, entry in value.items()
        ]
        return {kind.__name__: pairs}
    if kind is deque:
        return {"deque": [_pack([*value], where, tensors), value.maxlen]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        with suppress(TypeError):  # a dtype that torch lacks, as that of objects
            array = value.astype(value.dtype.newbyteorder("="))
            packed = _pack(torch.as_tensor(array), where, tensors)
            return {"numpy": [packed, hasattr(value, "__len__")]}  # a scalar has none
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a snapshot does not hold: it "
        "holds numbers, strings, bytes, tensors, arrays, and dicts, lists, tuples and sets of them."
    )


def _pack_tensor(value: Tensor, where: str, tensors: list[Tensor]) -> int:
    local = to_local(value).detach().to("cpu", copy=True)
    if type(local) is not Tensor or local.layout is not torch.strided or local.is_quantized:
        raise TypeError(
            f"{where} is a {type(local).__qualname__} of layout {local.layout}, which a snapshot "
            "does not hold: it holds plain dense tensors."
        )
    tensors.append(local.resolve_conj().resolve_neg().contiguous())
    return len(tensors)


MAKE: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (tuple, set, frozenset, dict, OrderedDict)},
    "Counter": lambda pairs: Counter(dict(pairs)),
    "deque": lambda content: deque(*content),
    "bytes": partial(base64.b64decode, validate=True),
    "complex": lambda content: complex(*content),
    "numpy": lambda content: content[0].numpy() if content[1] else content[0].numpy()[()],
}


def unpack(packed: Packed) -> Any:
    """Return the state, which holds the packed tensors.

    Raises some Exception if ``pack`` has not made this.
    """
    plain, tensors = packed
    if isinstance(plain, list):
        return [unpack(Packed(entry, tensors)) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        if content < 1:
            raise ValueError(f"tensor {content} of {len(tensors)}")
        return tensors[content - 1]
    if kind not in MAKE:
        raise ValueError(f"unknown kind {kind!r}")
    return MAKE[kind](unpack(Packed(content, tensors)))


# The structure of a state: {"model": ..., "optimizer": ..., "stateful": ...}


class Damaged(Exception):
    """A snapshot is not as it was written; the message says in which way."""


def check_structure(state: Any) -> None:
    """Raise Damaged if a state is not built as that of a snapshot, of whatever model."""
    model, optimizer, stateful = (_get_dict(state, n) for n in ("model", "optimizer", "stateful"))
    entries = _get_dict(optimizer, "state")
    groups: Any = optimizer.get("param_groups")
    if not is_list_of(dict, groups) or not all(is_list_of(str, g.get("params")) for g in groups):
        raise Damaged("its param_groups are not groups of names")
    if not all(is_list_of(str, [*names]) for names in (model, entries, stateful)):
        raise Damaged("not everything in it has a name")
    if not is_list_of(dict, [*entries.values()]):
        raise Damaged("not every parameter's state in it is a dict")
    try:
        for _, outer in iterate_anchored(state):
            float(outer["weight"])
    except Exception as error:
        raise Damaged(f"its round cannot be read ({type(error).__name__}: {error})") from error


def _get_dict(parent: Any, name: str) -> State:
    value = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(value, dict):
        raise Damaged(f"its {name} is of type {type(value).__name__}, not a dict")
    return value


def iterate_anchored(state: State) -> Iterator[tuple[str, State]]:
    """Yield the name of every parameter that has an anchor, and its entry of the round."""
    for name, entry in state["optimizer"]["state"].items():
        outer = entry.get("outer") or {}
        if int(outer.get("fragment", -1)) >= 0:
            yield name, outer


# Snapshots, and which of them are loaded


class Snapshot(NamedTuple):
    """One rank's part of what one ``save()`` of all ranks wrote.

    ``step``: after which it was taken. ``stamp``: of the ``save()``, greater for later ones.
    ``run``: the run, which has a new one after each restart. ``replica``: of the model, and
    ``replicas``, how many there were; ``shard`` and ``shards``: of the replica.
    """

    step: int
    stamp: int
    run: str
    replica: int
    replicas: int
    shard: int = 0
    shards: int = 1

    @property
    def name(self) -> str:
        step = f"step-{self.step:08}-{self.stamp}-{self.run}"
        shard = f"-shard-{self.shard}-of-{self.shards}" if self.shards > 1 else ""
        return f"{step}/replica-{self.replica}-of-{self.replicas}{shard}"


class Manifest(NamedTuple):
    """A complete snapshot, without its state.

    ``lineage``: its run, and those that it continued.
    """

    snapshot: Snapshot
    lineage: list[str]
    size: int = 0
    sha256: str = ""


def parse_name(name: str) -> Snapshot | None:
    """Return the snapshot of this name; None if it is none."""
    if (match := PATTERN.search(name)) is None:
        return None
    step, stamp, run, *numbers = filter(None, match.groups())
    snapshot = Snapshot(int(step), int(stamp), run, *map(int, numbers))
    return snapshot if snapshot.name == match.group() else None


def list_snapshots(folder: Path) -> list[Snapshot]:
    """Return all snapshots in the folder, also incomplete ones, in the order of their stamps."""
    snapshots = []
    for step in folder.glob("step-*"):
        with suppress(FileNotFoundError, NotADirectoryError):  # another rank removed it
            snapshots += [parse_name(f"{step.name}/{path.name}") for path in step.iterdir()]
    return sorted(filter(None, snapshots), key=lambda s: (s.stamp, s))


def is_complete(folder: Path, snapshot: Snapshot) -> bool:
    return (folder / snapshot.name / MANIFEST).exists()


class Choice(NamedTuple):
    """The snapshots of one ``save()``, of replicas that are there with all their shards.

    ``passed_over``: the steps of later ones, of which not every replica is there.
    """

    snapshots: list[Snapshot]
    passed_over: list[int]

    def __str__(self) -> str:
        return f"the snapshots of step {self.snapshots[0].step}"

    @property
    def shards(self) -> int:
        """The number of ranks that wrote one replica."""
        return self.snapshots[0].shards

    @property
    def missing_replicas(self) -> list[int]:
        return sorted({*range(self.snapshots[0].replicas)} - {s.replica for s in self.snapshots})


def choose_snapshots(visible: Iterable[Snapshot]) -> Choice | None:
    """Return the newest snapshots of which every replica is there, else the newest; None if there
    are none.
    """
    saves: dict[tuple[Any, ...], set[Snapshot]] = {}
    for s in visible:
        # not by step: where rounds end by time, ranks differ in theirs
        saves.setdefault((s.stamp, s.run, s.replicas, s.shards), set()).add(s)
    known = []
    for (stamp, run, replicas, shards), members in saves.items():
        counts = [s.replica for s in members]
        whole = sorted(s for s in members if counts.count(s.replica) == shards)
        if whole:
            is_whole = len(whole) == replicas * shards
            known.append(((is_whole, stamp, run), whole))
    if not known:
        return None
    (_, stamp, _), chosen = max(known)
    passed_over = [whole[0].step for (_, other, _), whole in known if other > stamp]
    return Choice(chosen, sorted(passed_over))


def assign_snapshots(
    chosen: Sequence[Snapshot], visible: Sequence[Iterable[Snapshot]]
) -> list[list[Snapshot]]:
    """Return which of the chosen snapshots each rank loads, of those that it sees.

    Each is loaded once, by the rank that has the fewest; among equals by the rank of its number.
    """
    seen = [{*snapshots} for snapshots in visible]
    assignment: list[list[Snapshot]] = [[] for _ in seen]
    for snapshot in sorted(chosen):
        visible_to = [rank for rank, snapshots in enumerate(seen) if snapshot in snapshots]
        rank = min(visible_to, key=lambda r: (len(assignment[r]), r != snapshot.replica, r))
        assignment[rank].append(snapshot)
    return assignment


# Folders and files that nobody but this user can have written


class Untrusted(Exception):
    """Another user may write a file or folder, or replace it; the message says which and why."""


def make_own_folder(folder: Path) -> Path:
    """Return the folder without symbolic links in its path; create what is missing of it, for this
    user alone.

    Raises:
        Untrusted: another user may write it, or rename it by writing one of its parents.
    """
    folder = folder.resolve()
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raise Untrusted if another user may write a folder, or rename it by writing a parent."""
    check_own(folder)
    user, system = os.geteuid(), {0, os.stat("/").st_uid}
    for path in folder.parents:
        status = path.stat()
        if status.st_uid not in {user, *system}:
            raise Untrusted(f"{path} belongs to the user {status.st_uid}")
        # Only its owner renames an entry of a sticky folder.
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise Untrusted(f"{path} is writable for others ({stat.filemode(status.st_mode)})")


def check_own(path: Path) -> None:
    """Raise Untrusted unless a file or folder belongs to this user, and nobody else may write it.

    A symbolic link is refused too: who writes its target is not known.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(f"{path} is a symbolic link")
    if status.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to the user {status.st_uid}")
    if status.st_mode & 0o022:
        raise Untrusted(f"{path} is writable for others ({stat.filemode(status.st_mode)})")


# Writing files


def write_snapshot(folder: Path, packed: Packed, manifest: Manifest) -> None:
    """Write a snapshot; it is complete when this returns.

    ``manifest``: without the size and the checksum, which are known when the state is written.
    """
    path = make_own_folder(folder) / manifest.snapshot.name
    make_own_folder(path)
    size, sha256 = _write_file(path / STATE, packed.encode())
    manifest = manifest._replace(size=size, sha256=sha256)
    line = json.dumps({"format": FORMAT, **manifest._asdict()})
    _write_file(path / MANIFEST, [f"{line}\n{_hash(line)}\n".encode()])
    for parent in (path.parent, folder):
        _flush_folder(parent)


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _write_file(path: Path, parts: Iterable[Any]) -> tuple[int, str]:
    """Write a file, all of it or nothing. Return its size and its SHA-256."""
    temporary, checksum = path.with_name(path.name + TEMPORARY), hashlib.sha256()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        for part in parts:
            file.write(part)
            checksum.update(part)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _flush_folder(path.parent)
    return size, checksum.hexdigest()


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_snapshot(folder: Path, snapshot: Snapshot) -> None:
    path = folder / snapshot.name
    with suppress(OSError):  # first: what is removed in part is not complete
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # other ranks are in it
        path.parent.rmdir()


# Reading files


def is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def check_trust(folder: Path) -> None:
    """Raise Untrusted if another user may write the folder, or replace it."""
    if folder.exists():
        check_folder(folder.resolve())


@contextmanager
def _find_damage(path: Path) -> Iterator[None]:
    """Raise Damaged in place of whatever damaged bytes in a file lead to."""
    try:
        yield
    except Damaged:
        raise
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename or path).name} is missing") from error
    except Untrusted as error:
        raise Damaged(f"another user may have written it: {error}") from error
    except Exception as error:
        raise Damaged(f"{path.name} cannot be read ({type(error).__name__}: {error})") from error


def read_manifest(folder: Path, snapshot: Snapshot) -> Manifest:
    """Return the manifest of a complete snapshot, whose state file has the right size.

    Raises Damaged.
    """
    path = folder / snapshot.name
    with _find_damage(path / MANIFEST):
        for part in (path.parent, path, path / MANIFEST, path / STATE):
            check_own(part)
        line, checksum, end = (path / MANIFEST).read_bytes().decode("ascii").split("\n")
        if checksum != _hash(line) or end:
            raise Damaged(f"the checksum of {MANIFEST} is wrong")
        content = json.loads(line)
        if (version := content.pop("format")) != FORMAT:
            raise Damaged(f"it has format {version}, and this compopt reads {FORMAT}")
        if Snapshot(*content.pop("snapshot")) != snapshot:
            raise Damaged("it lies where another one was written")
        manifest = Manifest(snapshot, **content)
        if not is_list_of(str, manifest.lineage):
            raise Damaged(f"its lineage is {manifest.lineage!r:.80}, and not a list of runs")
        size = (path / STATE).stat().st_size
        if size != manifest.size:
            raise Damaged(f"{STATE} has {size} bytes and had {manifest.size}")
    return manifest


def read_state(folder: Path, manifest: Manifest) -> Any:
    """Return the state of a snapshot, in memory of its own.

    Raises Damaged.
    """
    path, checksum = folder / manifest.snapshot.name / STATE, hashlib.sha256()
    with _find_damage(path), open(path, "rb") as file:

        def fill(memory: Any) -> Any:
            if file.readinto(memory) != len(memory):
                raise Damaged(f"{STATE} is cut short")
            checksum.update(memory)
            return memory

        count = int.from_bytes(fill(bytearray(8)), "little")
        if (limit := manifest.size - 8 - count) < 0:
            raise ValueError(f"a header of {count} bytes in a file of {manifest.size}")
        plain, specs = json.loads(fill(bytearray(count)))
        packed = make_empty(plain, specs, limit)
        for tensor in packed.tensors:
            fill(memory_of(tensor))
        if file.read(1) or checksum.hexdigest() != manifest.sha256:
            raise Damaged(f"the checksum of {STATE} is wrong")
        return unpack(packed)
