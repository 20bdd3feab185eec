"""Simulated ranks that save and resume, damages to what they have saved, and what a resume may then do.

A resume either raises on all ranks and changes nothing, or brings all ranks to what they were after one of the saves,
to the bit.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conformance import loss, make_ranks
from sim import Ranks
from table import CASES, FORMS, Case

from compopt.integrations._snapshot_files import MANIFEST, STATE, pack
from compopt.integrations._snapshot_loading import RankParts, hash_replica
from compopt.integrations.snapshots import Snapshots

CLASSES = ["SeparateAdam", "LocalSteps", "RadiusAdamW", "ScapeAdamS", "TagcAdamW"]
LOST = "the residuals of these ranks are lost"
NAMED = {case.name: case for case in CASES + FORMS}
SAVES = [4, 6, 8]  # steps; within a round of LocalSteps too


class Position:
    """Return the number of batches taken."""

    def __init__(self) -> None:
        self.taken = 0

    def state_dict(self) -> dict:
        return {"taken": self.taken, "begun": {self.taken: torch.tensor(self.taken)}}

    def load_state_dict(self, state: dict) -> None:
        assert state["begun"] == {state["taken"]: state["taken"]}
        self.taken = state["taken"]


def state_of(snapshots: Snapshots) -> bytes:
    """Return a rank's state, as a snapshot would hold it."""
    return b"".join(pack(snapshots._read_state()).encode())


class Fleet:
    """Ranks with snapshots, in one folder or in one for each rank."""

    def __init__(self, case: Case, size: int, folder: Path, is_shared: bool, **options: Any):
        self.ranks: Ranks = make_ranks(case, size, **options)
        self.positions = [Position() for _ in range(size)]
        self.snapshots = [
            Snapshots(folder / ("all" if is_shared else f"node {rank}"), model, optimizer, data=position)
            for (rank, model, optimizer), position in zip(self.ranks, self.positions, strict=True)
        ]

    def train(self, steps: int) -> None:
        self.ranks.train(loss, steps)
        for position in self.positions:
            position.taken = self.ranks.steps

    def save(self) -> None:
        self.ranks.world.run([one.save for one in self.snapshots])
        for one in self.snapshots:
            one.close()

    def resume(self) -> tuple[int, list[str]]:
        """Return the step that all ranks are at, and what they were warned of."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.ranks.world.run([one.resume for one in self.snapshots])
        (step,) = {optimizer._engine.steps for optimizer in self.ranks.optimizers}
        self.ranks.steps = step
        return step, [str(warning.message) for warning in told]

    def states(self) -> list[bytes]:
        return [state_of(one) for one in self.snapshots]

    def checksums(self) -> list[str]:
        """Return a checksum of what ranks have in common, of each rank; shards are gathered."""
        if self.snapshots[0]._optimizer.sharded:
            self.ranks.world.consolidate(self.ranks.optimizers)
        return [hash_replica(one._read_state(), RankParts(one._optimizer)) for one in self.snapshots]


def rewrite_state(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON of the newest snapshot in a node's folder; its checksums are right again."""
    (path,) = max(folder.glob("step-*")).glob("replica-*")
    raw = (path / STATE).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    plain, specs = json.loads(raw[8:end])
    header = json.dumps([change(plain), specs]).encode()
    raw = len(header).to_bytes(8, "little") + header + raw[end:]
    (path / STATE).write_bytes(raw)
    manifest = json.loads((path / MANIFEST).read_text().split("\n")[0])
    line = json.dumps({**manifest, "size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    (path / MANIFEST).write_text(f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n")


def find_in(plain: Any, *keys: Any) -> dict[Any, Any]:
    """Return the packed dict or list at ``keys`` of packed dicts and lists; ``...`` is the first that there is."""
    for key in keys:
        if isinstance(plain, list):
            plain = plain[key]
        else:
            (pairs,) = plain.values()
            plain = next(value for name, value in pairs if key in (name, ...))
    return plain


class Saved:
    """A run that has saved three times."""

    def __init__(self, folder: Path, name: str, size: int, is_shared: bool):
        self.folder, self.case, self.size, self.is_shared = folder, NAMED[name], size, is_shared
        fleet = Fleet(self.case, size, folder, is_shared)
        self.states, self.checksums = {0: fleet.states()}, {}
        for step in SAVES:
            fleet.train(step - fleet.ranks.steps)
            fleet.save()
            # what is loaded, and not what is there: where state is sharded, a rank then has the others' no more
            again = Fleet(self.case, size, folder, is_shared)
            assert again.resume() == (step, [])
            if not self.case.sharded:
                assert again.states() == fleet.states()
            self.states[step], self.checksums[step] = again.states(), again.checksums()

    def resume_from(self, folder: Path) -> tuple[int, str]:
        """Resume, and check what it did. Return the step, -1 if it was refused, and what ranks were told."""
        fleet = Fleet(self.case, self.size, folder, self.is_shared)
        try:
            step, told = fleet.resume()
        except RuntimeError as error:
            assert fleet.states() == self.states[0], f"a half load: {error}"
            return -1, str(error)
        if any(LOST in text for text in told):
            assert fleet.checksums() == self.checksums[step], f"other values in common than those of step {step}"
        else:
            assert fleet.states() == self.states[step], f"other values than those of step {step}: {told}"
        return step, " ".join(told)


# Damages


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def _fill(path: Path, rng: random.Random, make: Callable[[int], bytes]) -> None:
    raw = bytearray(path.read_bytes())
    begin = rng.randrange(len(raw))
    length = min(rng.choice([1, 16, 256, 4096, len(raw)]), len(raw) - begin)
    raw[begin : begin + length] = make(length)
    path.write_bytes(raw)


def zero(path: Path, rng: random.Random) -> None:
    _fill(path, rng, bytes)


def garbage(path: Path, rng: random.Random) -> None:
    _fill(path, rng, rng.randbytes)


def truncate(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: rng.choice([0, 1, len(raw) - 1, rng.randrange(len(raw))])])


def append(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice([1, 64])))


def swap(path: Path, rng: random.Random) -> None:
    """Swap a file with another of its name, or its folder with another."""
    if rng.random() < 0.5:
        path = path.parent
    root = path
    while not root.name.startswith("step-"):
        root = root.parent
    root = root.parent.parent
    others = sorted(other for other in root.rglob(path.name if path.is_file() else "replica-*") if other != path)
    other, between = rng.choice(others), root / "between"
    path.rename(between), other.rename(path), between.rename(other)


def remove(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        path.unlink()
    else:
        shutil.rmtree(path.parent)


DAMAGES = [flip, zero, garbage, truncate, append, swap, remove]


def damage_files(folder: Path, rng: random.Random) -> str:
    """Damage one to four files or folders of snapshots, and return how."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        files = [path for name in (STATE, MANIFEST) for path in sorted(folder.rglob(name))]
        kind, path = rng.choice(DAMAGES), rng.choice(files)
        if path.stat().st_size:
            kind(path, rng)
            done.append(f"{kind.__name__} {path.relative_to(folder)}")
    return ", ".join(done)


def damage(saved: Saved, rng: random.Random) -> str:
    """Damage a copy of what was saved, and resume from it. Return what was done and seen.

    Raises AssertionError if the damage was not noticed.
    """
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(copy) / "saved"
        shutil.copytree(saved.folder, folder)
        done = damage_files(folder, rng)
        step, told = saved.resume_from(folder)
        what = f"{done}: step {step}, told {told}"
        check_step(saved.folder, folder, saved.size, step, LOST in told, what)
        return what


def check_step(source: Path, folder: Path, size: int, step: int, is_lost: bool, what: str) -> None:
    """Raise AssertionError if another step than that of the newest intact snapshots in ``folder`` was resumed.

    ``step``: -1 if the resume was refused. ``is_lost``: the parts of a rank were told to be.
    """
    counts = {step: intact_replicas(source, folder, step) for step in SAVES}
    whole = [step for step, count in counts.items() if count == size]
    partial = [step for step, count in counts.items() if count]
    assert is_lost == bool(partial and not whole), what
    assert step == max(whole or partial, default=0) or (step == -1 and not partial), what


def intact_replicas(source: Path, folder: Path, step: int) -> int:
    """Return of how many replicas all files of one save are as they were written."""
    places = [path.relative_to(source) for path in source.rglob(f"step-{step:08}-*/replica-*")]
    return sum(read_files(folder / place) == read_files(source / place) for place in places)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*")}
