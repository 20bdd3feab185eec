"""The files of a snapshot.

Every rank writes a folder of its own, here that of replica 1 of 3::

    folder/step-00000120-1759312345678901234-9f3c52d07be1a684/replica-1-of-3/
        state.distcp    see ``_snapshot_codec``
        .metadata       the manifest: what the snapshot is, and the size and SHA-256 of its state

Where a replica is sharded over four ranks, that of the first is ``replica-1-of-3-shard-0-of-4``.

A file is written under another name, flushed to the disk, and renamed, the manifest last: a
snapshot that has one is complete. The second line of a manifest is the SHA-256 of its first. So any
change of a file shows, and a snapshot is *intact* only if it is as it was written, where it was
written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .._wire.trust import Untrusted, check_folder, check_own, make_own_folder
from ._snapshot_codec import Packed, read, unpack

STATE, MANIFEST, TEMPORARY = "state.distcp", ".metadata", ".part"
FORMAT = 1  # of files
PATTERN = re.compile(
    r"step-(\d+)-(\d+)-([0-9a-f]{16})/replica-(\d+)-of-(\d+)(?:-shard-(\d+)-of-(\d+))?$"
)


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


# Writing


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


# Reading


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
