"""The files of a snapshot, and states as JSON and tensors: in files, and in messages to ranks that
have no snapshot.

Every rank writes a folder of its own, here that of replica 1 of 3::

    folder/step-00000120-1759312345678901234-9f3c52d07be1a684/replica-1-of-3/
        state.distcp    the state, packed
        .metadata       the manifest: what the snapshot is, and the size and SHA-256 of its state

Where a replica is sharded over four ranks, that of the first is ``replica-1-of-3-shard-0-of-4``.

A file is written under another name, flushed to the disk, and renamed, the manifest last: a
snapshot that has one is complete. The second line of a manifest is the SHA-256 of its first. So any
change of a file shows, and a snapshot is *intact* only if it is as it was written, where it was
written.

Nothing here is a pickle, so reading runs no code, whoever wrote the bytes. A state may hold dicts,
lists, tuples, sets, deques, Counters, numbers, strings, bytes, tensors, and NumPy's arrays and
numbers; ``pack`` refuses everything else by its name. Packed bytes are::

    8 bytes     the length of the header
    header      JSON: [the state, with a number in the place of each tensor, [dtype, shape] of each]
    tensors     the memory of each, which begins at a multiple of 64
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import re
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._state.tensors import to_local
from .._wire.trust import Untrusted, check_folder, check_own, make_own_folder

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}
ALIGNMENT = 64
# containers by their names in JSON
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
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

    def encode_header(self) -> bytes:
        specs = [[str(t.dtype).removeprefix("torch."), [*t.shape]] for t in self.tensors]
        return json.dumps([self.plain, specs]).encode()

    def write(self, write: Callable[[Any], object]) -> int:
        """Pass all bytes to ``write``, in parts; return how many they are."""
        header = self.encode_header()
        parts = [len(header).to_bytes(8, "little"), header, *map(memory_of, self.tensors)]
        position = 0
        for number, part in enumerate(parts):
            padding = bytes(-position % ALIGNMENT if number > 1 else 0)
            write(padding)
            write(part)
            position += len(padding) + len(part)
        return position


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host; the tensor has to outlive it."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


# Packing


def pack(state: Any, name: str = "state") -> Packed:
    """Return a copy of a state as JSON and tensors; of a DTensor this rank's part.

    Raises TypeError if it holds something else; the message begins with ``name``.
    """
    tensors: list[Tensor] = []
    return Packed(_pack(state, name, tensors), tensors)


def _pack(value: Any, where: str, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_pack(entry, f"{where}[{i}]", tensors) for i, entry in enumerate(value)]
    if kind in MAPPINGS.values():
        pairs = [
            [_pack(key, where, tensors), _pack(entry, f"{where}[{key!r}]", tensors)]
            for key, entry in value.items()
        ]
        return {kind.__name__: pairs}
    if kind in SEQUENCES.values() or kind is torch.Size:
        entries = [_pack(entry, f"{where}[{i}]", tensors) for i, entry in enumerate(value)]
        return {"tuple" if kind is torch.Size else kind.__name__: entries}
    if kind is deque:
        return {"deque": [_pack([*value], where, tensors), value.maxlen]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Tensor):
        return _pack_tensor(value, where, tensors)
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "?biufc":
        raw = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        tensors.append(raw)
        # is it an array?
        return {"numpy": [value.dtype.str, [*value.shape], hasattr(value, "__len__"), len(tensors)]}
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a snapshot does not hold: it "
        "holds numbers, strings, bytes, tensors, arrays, and dicts, lists, tuples and sets of them."
    )


def _pack_tensor(value: Tensor, where: str, tensors: list[Tensor]) -> Any:
    local = to_local(value).detach().to("cpu", copy=True)
    if type(local) is not Tensor or local.layout is not torch.strided or local.is_quantized:
        raise TypeError(
            f"{where} is a {type(local).__qualname__} of layout {local.layout}, which a snapshot "
            "does not hold: it holds plain dense tensors."
        )
    tensors.append(local.resolve_conj().resolve_neg().contiguous())
    return {"tensor": len(tensors)}


# Unpacking


def unpack(packed: Packed) -> Any:
    """Return the state, which holds the packed tensors.

    Raises some Exception where ``pack`` has not made this.
    """
    plain, tensors = packed
    if isinstance(plain, list):
        return [unpack(Packed(entry, tensors)) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind in MAPPINGS:
        pairs = [[unpack(Packed(part, tensors)) for part in pair] for pair in content]
        return MAPPINGS[kind](dict(pairs) if kind == "Counter" else pairs)
    if kind in SEQUENCES:
        return SEQUENCES[kind](unpack(Packed(content, tensors)))
    if kind == "deque":
        return deque(unpack(Packed(content[0], tensors)), content[1])
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "complex":
        return complex(*content)
    if kind == "tensor":
        return tensors[content - 1]
    if kind == "numpy":
        return _unpack_array(tensors[content[3] - 1], *content[:3])
    raise ValueError(f"unknown kind {kind!r}")


def _unpack_array(raw: Tensor, dtype: str, shape: list[int], is_array: bool) -> Any:
    import numpy as np

    kind = np.dtype(dtype)
    if kind.kind not in "?biufc":
        raise ValueError(f"an array of {kind}")
    array = np.frombuffer(bytearray(memory_of(raw)), kind, count=int(np.prod(shape)))
    array = array.reshape(shape)
    return array if is_array else array[()]


def decode_header(header: bytes, limit: int) -> Packed:
    """Return a state with memory for its tensors, whose values have yet to come.

    Raises some Exception if the header is damaged, or its tensors take more than ``limit`` bytes.
    """
    plain, specs = json.loads(header)
    shapes = [(DTYPES[name], tuple(map(int, shape))) for name, shape in specs]
    sizes = [_count_bytes(dtype, shape) for dtype, shape in shapes]
    if min(sizes, default=0) < 0 or sum(sizes) > limit:
        raise ValueError(f"tensors of {sum(sizes)} bytes where {limit} are")
    empty = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in shapes]
    return Packed(plain, empty)


def _count_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    *_, count = accumulate((1, *shape), lambda a, b: a * b)
    return count * dtype.itemsize if min(shape, default=0) >= 0 else -1


def read(fill: Callable[[memoryview], object], size: int) -> Packed:
    """Read ``size`` bytes that ``Packed.write`` wrote; ``fill`` fills memory with the next ones.

    Raises some Exception if they are damaged.
    """
    length = bytearray(8)
    fill(memoryview(length))
    count = int.from_bytes(length, "little")
    if count > size - 8:
        raise ValueError(f"a header of {count} bytes in a file of {size}")
    header = bytearray(count)
    fill(memoryview(header))
    packed, position = decode_header(bytes(header), size - 8 - count), 8 + count
    for tensor in packed.tensors:
        padding, memory = bytearray(-position % ALIGNMENT), memory_of(tensor)
        if position + len(padding) + len(memory) > size:
            raise ValueError("a tensor ends behind the file")
        fill(memoryview(padding))
        fill(memory)
        position += len(padding) + len(memory)
    if position != size:
        raise ValueError(f"{size - position} bytes behind the last tensor")
    return packed


# Snapshots


class Damaged(Exception):
    """A snapshot is not as it was written; the message says in which way."""


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

    ``lineage``: its run, and those that it went on from. ``weight``: of the rank in the running
    round of ``LocalSteps``.
    """

    snapshot: Snapshot
    lineage: list[str]
    weight: float
    size: int
    sha256: str


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


# Writing files


def write_snapshot(
    folder: Path, snapshot: Snapshot, packed: Packed, weight: float, lineage: list[str]
) -> None:
    """Write a snapshot; it is complete when this returns."""
    path = make_own_folder(folder) / snapshot.name
    make_own_folder(path)
    size, sha256 = _write_file(path / STATE, packed.write)
    manifest = {
        "format": FORMAT,
        **snapshot._asdict(),
        "lineage": lineage,
        "weight": weight,
        "files": {STATE: {"size": size, "sha256": sha256}},
    }
    line = json.dumps(manifest)
    text = f"{line}\n{_hash(line)}\n".encode()
    _write_file(path / MANIFEST, lambda write: write(text))
    for parent in (path.parent, folder):
        _flush_folder(parent)


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _write_file(path: Path, write_all: Callable[[Callable[[Any], object]], Any]) -> tuple[Any, str]:
    """Write a file, all of it or nothing. Return what ``write_all`` returns, and its SHA-256."""
    temporary, checksum = path.with_name(path.name + TEMPORARY), hashlib.sha256()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:

        def write(part: Any) -> None:
            file.write(part)
            checksum.update(part)

        result = write_all(write)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _flush_folder(path.parent)
    return result, checksum.hexdigest()


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


def check_trust(folder: Path) -> None:
    """Raise Untrusted if another user may write the folder, or replace it."""
    if folder.exists():
        check_folder(folder.resolve())


def read_manifest(folder: Path, snapshot: Snapshot) -> Manifest:
    """Return the manifest of a complete snapshot, whose state file has the right size.

    Raises Damaged.
    """
    path = folder / snapshot.name
    try:
        for part in (path.parent, path, path / MANIFEST, path / STATE):
            check_own(part)
        line, checksum, end = (path / MANIFEST).read_bytes().decode("ascii").split("\n")
        if checksum != _hash(line) or end:
            raise Damaged(f"the checksum of {MANIFEST} is wrong")
        content = json.loads(line)
        if content["format"] != FORMAT:
            raise Damaged(f"it has format {content['format']}, and this compopt reads {FORMAT}")
        if Snapshot(*(content[field] for field in Snapshot._fields)) != snapshot:
            raise Damaged("it lies where another one was written")
        file = content["files"][STATE]
        found = (path / STATE).stat().st_size
        if found != file["size"]:
            raise Damaged(f"{STATE} has {found} bytes and had {file['size']}")
        lineage, weight = [*map(str, content["lineage"])], float(content["weight"])
        return Manifest(snapshot, lineage, weight, file["size"], file["sha256"])
    except Damaged:
        raise
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename or path).name} is missing") from error
    except Untrusted as error:
        raise Damaged(f"another user may have written it: {error}") from error
    except Exception as error:  # whatever damaged bytes lead to
        raise Damaged(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error


def read_state(folder: Path, manifest: Manifest) -> Any:
    """Return the state of a snapshot, in memory of its own.

    Raises Damaged.
    """
    checksum = hashlib.sha256()
    try:
        with open(folder / manifest.snapshot.name / STATE, "rb") as file:

            def fill(memory: memoryview) -> None:
                if file.readinto(memory) != len(memory):
                    raise Damaged(f"{STATE} is cut short")
                checksum.update(memory)

            packed = read(fill, manifest.size)
            if file.read(1) or checksum.hexdigest() != manifest.sha256:
                raise Damaged(f"the checksum of {STATE} is wrong")
        return unpack(packed)
    except Damaged:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise Damaged(f"{STATE} cannot be read ({type(error).__name__}: {error})") from error
