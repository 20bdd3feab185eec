"""Snapshots that are damaged, crafted, of other ranks, or written while ranks are killed: what resumes from them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import snapshot_faults as faults
import torch
import torch.distributed as dist
from conformance import Small, data, mean_residual
from ranks import run_ranks
from sim import Ranks
from slow_rows import in_turn, slow_but
from snapshot_faults import CLASSES, LOST, Fleet, Saved
from snapshot_kills import kill_and_resume
from table import CASES, FORMS, INT8, by_name
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt.integrations import _snapshot_files as files
from compopt.integrations._snapshot_files import MANIFEST, STATE, Manifest, Packed, Snapshot, make_empty, pack, unpack
from compopt.integrations.snapshots import Snapshots

DAMAGES = int(os.environ.get("COMPOPT_DAMAGES", 45))
SETTINGS = [(name, size, is_shared) for name in CLASSES for size, is_shared in ((1, False), (2, False), (2, True))]
# in `make test` each class once
ROWS = [pytest.param(row, marks=() if n % 4 == 0 else pytest.mark.slow) for n, row in enumerate(SETTINGS)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[tuple, Saved]:
    """Runs that have saved, made when first asked for."""

    class Runs(dict):
        def __missing__(self, setting: tuple) -> Saved:
            self[setting] = Saved(tmp_path_factory.mktemp("saved"), *setting)
            return self[setting]

    return Runs()


@pytest.mark.parametrize("setting", ROWS, ids=str)
def test_a_damaged_snapshot_is_passed_over_or_refused(setting, saved):
    rng = random.Random(str(setting))
    for _ in range(-(-DAMAGES // len(SETTINGS))):
        faults.damage(saved[setting], rng)


def make_real(node: Path, name: str) -> tuple[DDP, torch.optim.Optimizer, Snapshots]:
    torch.manual_seed(0)
    model = DDP(Small(), find_unused_parameters=True)
    optimizer = by_name[name].make(model.parameters())
    return model, optimizer, Snapshots(node, model, optimizer)


def resumes_from_damaged(rank: int, place: str, name: str, trials: int) -> None:
    """A run saves three times; then so many resumes, each from a copy with damages."""
    folder, rng = Path(place), random.Random(name)
    model, optimizer, snapshots = make_real(folder / "source" / f"node {rank}", name)
    states = {0: faults.state_of(snapshots)}
    for step in range(1, faults.SAVES[-1] + 1):
        optimizer.zero_grad()
        x = data(rank, step, torch.float32)
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        if step in faults.SAVES:
            snapshots.save()
            snapshots.wait()
            states[step] = faults.state_of(snapshots)
    for trial in range(trials):
        copy = folder / f"trial {trial}"
        dist.barrier()
        if rank == 0:
            shutil.copytree(folder / "source", copy)
            (folder / "done").write_text(faults.damage_files(copy, rng))
        dist.barrier()
        _, _, snapshots = make_real(copy / f"node {rank}", name)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                step = snapshots.resume()
            except RuntimeError:
                step = -1
        lost = torch.tensor([any(LOST in str(one.message) for one in told)], dtype=torch.int64)
        dist.all_reduce(lost)  # rank 0 is told
        what = f"{(folder / 'done').read_text()}: step {step}"
        if not lost:
            assert faults.state_of(snapshots) == states[max(step, 0)], f"{what}: other values"
        faults.check_step(folder / "source", copy, 2, step, bool(lost), what)


@pytest.mark.parametrize("name", ["LocalSteps"])
def test_a_damaged_snapshot_is_passed_over_or_refused_by_real_ranks(name, tmp_path):
    run_ranks(resumes_from_damaged, 2, str(tmp_path), name, -(-DAMAGES // 20))


def test_every_byte_of_every_file_counts(saved, tmp_path):
    source = saved["SeparateAdam", 1, False].folder / "node 0"
    (snapshot, *_) = files.list_snapshots(source)
    manifest = files.read_manifest(source, snapshot)
    small = Packed({"tensor": 1}, [torch.arange(3, dtype=torch.uint8)])
    files.write_snapshot(tmp_path, small, manifest)
    for path in (tmp_path / snapshot.name / name for name in (STATE, MANIFEST)):
        raw = path.read_bytes()
        for place in range(len(raw)):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            with pytest.raises(files.Damaged):
                files.read_state(tmp_path, files.read_manifest(tmp_path, snapshot))
        path.write_bytes(raw)
    assert torch.equal(
        files.read_state(tmp_path, files.read_manifest(tmp_path, snapshot)), torch.arange(3, dtype=torch.uint8)
    )


class Killed(BaseException):
    pass


@pytest.mark.parametrize("function", ["open", "replace", "fsync", "close"])
def test_a_write_that_ends_anywhere_leaves_a_whole_snapshot_or_none(function, tmp_path, monkeypatch):
    packed, original = pack({"values": torch.arange(100.0)}), getattr(os, function)
    outcomes = []
    for last in range(20):
        snapshot, calls = Snapshot(1, last, "0" * 16, 0, 1), 0

        def call(*args, last: int = last, **options):
            nonlocal calls
            calls += 1
            if calls > last:
                if function == "fsync":  # the power fails: what was written is not all there
                    with contextlib.suppress(OSError):
                        os.ftruncate(args[0], 5)
                raise Killed
            return original(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, function, call)
            try:
                files.write_snapshot(tmp_path, packed, Manifest(snapshot, ["0" * 16]))
                is_killed = False
            except Killed:
                is_killed = True
        if files.is_complete(tmp_path, snapshot):
            state = files.read_state(tmp_path, files.read_manifest(tmp_path, snapshot))
            assert torch.equal(state["values"], torch.arange(100.0))
        outcomes.append((is_killed, files.is_complete(tmp_path, snapshot)))
        if not is_killed:
            break
    assert outcomes[0] == (True, False) and outcomes[-1] == (False, True), outcomes


@pytest.mark.parametrize("case", slow_but(lambda case: case in CASES, CASES + FORMS + INT8), ids=lambda case: case.name)
def test_every_class_goes_on_to_the_bit(case, tmp_path):
    fleet = Fleet(case, 2, tmp_path, is_shared=False)
    fleet.train(7)
    fleet.save()
    again = Fleet(case, 2, tmp_path, is_shared=False)
    assert again.resume() == (7, [])
    for one in (fleet, again):
        one.train(4)
        if case.sharded:
            one.ranks.world.consolidate(one.ranks.optimizers)
    assert again.states() == fleet.states()


@pytest.mark.parametrize("case", INT8, ids=lambda case: case.name)
def test_on_other_ranks_residuals_in_8_bits_go_on_from_their_mean(case, tmp_path):
    fleet = Fleet(case, 2, tmp_path, is_shared=True, **case.averaging)
    fleet.train(7)
    fleet.save()
    wanted = mean_residual(fleet.ranks)
    again = Fleet(case, 3, tmp_path, is_shared=True, **case.averaging)
    assert again.resume()[0] == 7
    # their mean is rounded to 127 levels of a block's largest
    torch.testing.assert_close(mean_residual(again.ranks), wanted, rtol=0, atol=float(wanted.abs().max()) / 60)
    again.train(3)
    if not case.averaging:  # ranks of local steps have moments of their own
        again.ranks.assert_replicas_equal()


@pytest.mark.parametrize("name", ["SeparateAdam", "LocalSteps"])
def test_all_ranks_take_the_newest_that_is_complete_on_all(name, saved, tmp_path):
    """A rank was killed before its newest was complete."""
    run = saved[name, 2, False]
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    for node in (0, 1):
        (newest,) = (tmp_path / f"node {node}").glob(f"step-00000008-*/*/{MANIFEST}")
        newest.unlink()
        step, told = run.resume_from(tmp_path)
        assert step == 6 and LOST not in told
        assert ("Those of step 8 were saved later" in told) == (node == 0)


def test_replicas_that_differed_are_passed_over(tmp_path):
    fleet = Fleet(by_name["SeparateAdam"], 2, tmp_path, is_shared=False)
    fleet.train(4)
    fleet.save()
    with torch.no_grad():
        fleet.ranks.models[1].scale[0] += 1e-6
    fleet.save()
    step, told = Fleet(by_name["SeparateAdam"], 2, tmp_path, is_shared=False).resume()
    assert step == 4 and "passed over: replica 1 had other values than replica 0" in told[0]


def test_what_a_resume_could_need_is_kept(tmp_path, monkeypatch):
    """The disk of one rank is full for a long time: the other keeps the last one that both have."""
    fleet = Fleet(by_name["SeparateAdam"], 2, tmp_path, is_shared=False)
    for step in range(1, 9):
        fleet.train(1)
        if step == 3:
            (tmp_path / "node 1").rename(tmp_path / "away")
            (tmp_path / "node 1").write_text("no folder")
        try:
            fleet.save()
        except RuntimeError as error:
            assert step >= 3 and "could not be written on rank 1" in str(error)
    (tmp_path / "node 1").unlink()
    (tmp_path / "away").rename(tmp_path / "node 1")
    found = [[s.step for s in one.find()] for one in fleet.snapshots]
    assert {1, 2} <= {*found[0]} and len(found[0]) <= 2 * 2 + 1 and found[1] == [1, 2]
    step, told = Fleet(by_name["SeparateAdam"], 2, tmp_path, is_shared=False).resume()
    assert step == 2 and "were saved later" in told[0]


@pytest.mark.parametrize("failing", ["load_state_dict", "another model"])
def test_it_is_loaded_on_all_ranks_or_on_none(failing, saved, monkeypatch):
    run = saved["LocalSteps", 2, False]
    fleet = Fleet(run.case, 2, run.folder, is_shared=False)
    before = fleet.states()
    if failing == "load_state_dict":
        loaded = []

        def fail(state: dict) -> None:
            loaded.append(state)
            if len(loaded) == 1:
                raise KeyError("not mine")

        monkeypatch.setattr(fleet.positions[1], "load_state_dict", fail)
        expected = "rank 1: KeyError: 'not mine'"
    else:
        fleet.ranks.models[1].register_buffer("more", torch.zeros(3))
        before = fleet.states()
        expected = "rank 1: more has the shape None"
    with pytest.raises(RuntimeError, match=f"step 8 in .* nothing was loaded.*{expected}"):
        fleet.resume()
    assert fleet.states() == before


def put(value: object, *keys: object) -> Callable[[dict], dict]:
    """Put ``value`` at ``keys`` into a packed state."""

    def change(plain: dict) -> dict:
        holder = faults.find_in(plain, *keys[:-1])
        (pairs,) = holder.values()
        next(pair for pair in pairs if keys[-1] in (pair[0], ...))[1] = value
        return plain

    return change


EMPTY, GROUP, OUTER = {"dict": []}, ("optimizer", "param_groups", 0), ("optimizer", "state", "up.weight", "outer")
FIRST_BASE = ("optimizer", "state", "up.weight", "base")
STRUCTURES: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "no dict": ("SeparateAdam", lambda plain: [plain], "passed over"),
    "no model": ("SeparateAdam", lambda plain: {"dict": [["optimizer", EMPTY]]}, "passed over"),
    "model a list": ("SeparateAdam", put([1, 2], "model"), "passed over"),
    "a number as a name": ("SeparateAdam", put({"dict": [[1, 2]]}, "model"), "passed over"),
    "optimizer a text": ("SeparateAdam", put("x", "optimizer"), "passed over"),
    "optimizer empty": ("SeparateAdam", put(EMPTY, "optimizer"), "passed over"),
    "no groups": ("SeparateAdam", put(None, "optimizer", "param_groups"), "passed over"),
    "group a text": ("SeparateAdam", put(["x"], "optimizer", "param_groups"), "passed over"),
    "params a text": ("SeparateAdam", put("x", *GROUP, "params"), "passed over"),
    "entry a number": ("SeparateAdam", put(1, "optimizer", "state", ...), "passed over"),
    "step a text": ("SeparateAdam", put("x", *GROUP, "step"), "got 'x'"),
    "step huge": ("SeparateAdam", put(10**30, *GROUP, "step"), "got 1000000"),
    "step negative": ("SeparateAdam", put(-4, *GROUP, "step"), "got -4"),
    "step NaN of a tensor": ("SeparateAdam", put(float("nan"), "optimizer", "state", ..., "step"), "got nan"),
    "outer a list": ("LocalSteps, rounds", put([1], *OUTER), "passed over"),
    "weight a list": ("LocalSteps, rounds", put([1], *OUTER, "weight"), r"weight is \[1\]|passed over"),
    "anchor a number": ("LocalSteps, rounds", put(3, *OUTER, "anchor"), "TypeError|had other values"),
    "no moments": ("LocalSteps, rounds", put(EMPTY, *FIRST_BASE), "lacks begun, exp_avg, exp_avg_sq, step"),
    "moments a number": (
        "LocalSteps, rounds",
        put(3, *FIRST_BASE, "exp_avg"),
        "exp_avg in the base's state of .* no tensor",
    ),
}


@pytest.mark.parametrize(("name", "size"), in_turn(STRUCTURES, [2, 3]))
def test_another_structure_is_passed_over_or_refused_on_all_ranks(name, size, saved, tmp_path):
    """One rank's snapshot has it, with the right checksums; three ranks combine what two have saved."""
    of, change, words = STRUCTURES[name]
    run, outcomes = saved[of, 2, False], {}
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    faults.rewrite_state(tmp_path / "node 1", change)
    fleet = Fleet(run.case, size, tmp_path, is_shared=False)
    before = fleet.states()

    def resume(rank: int):
        try:
            outcomes[rank] = fleet.snapshots[rank].resume()
        except RuntimeError as error:
            outcomes[rank] = str(error).replace(f"node {rank}", "node")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fleet.ranks.world.run([partial(resume, rank) for rank in range(size)])
    (outcome,) = {*outcomes.values()}
    assert len(outcomes) == size
    if outcome == 6:
        reasons = [str(one.message) for one in told if "passed over: " in str(one.message)]
        assert any(re.search(words, reason) for reason in reasons)
    else:
        assert re.search(f"step 8 in .* cannot be loaded, and nothing was loaded.*{words}", outcome)
        assert fleet.states() == before


class Evil:
    def __reduce__(self):
        return os.system, ('touch "$FLAG"',)


@pytest.fixture
def flag(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLAG", str(tmp_path / "code ran"))
    return tmp_path / "code ran"


CRAFTED = [
    [{"tensor": 1}, [["float32", [1099511627776]]]],
    [{"__reduce__": ["os.system", "touch x"]}, []],
    [{"tensor": 1}, [["load", [1]]]],
    [{"tensor": 1}, [["uint8", [-1, -8]]]],
]


def crafted() -> list[bytes]:
    """Files that run code where they are unpickled, or that no reader should trust."""
    pickled = pickle.dumps(Evil())
    described = [json.dumps(content).encode() for content in CRAFTED]
    headers = [len(raw).to_bytes(8, "little") + raw for raw in (*described, b"[" * 100_000)]
    return [pickled, *headers, b"", b"\xff" * 100]


@pytest.mark.parametrize("number", range(len(crafted())))
def test_a_crafted_folder_runs_nothing(number, flag, tmp_path):
    """Also one whose checksums are right."""
    content = crafted()[number]
    fleet = Fleet(by_name["SeparateAdam"], 1, tmp_path, is_shared=False)
    fleet.train(1)
    fleet.save()
    node, before = tmp_path / "node 0", fleet.states()
    (snapshot,) = files.list_snapshots(node)

    class Crafted(Packed):
        def encode(self) -> list[bytes]:
            return [content]

    files.write_snapshot(node, Crafted(None, []), Manifest(snapshot, ["0" * 16]))
    for is_manifest in (False, True):
        if is_manifest:
            (node / snapshot.name / MANIFEST).write_bytes(content)
        fleet = Fleet(by_name["SeparateAdam"], 1, tmp_path, is_shared=False)
        fresh = fleet.states()
        with pytest.raises(RuntimeError, match=r"no snapshot in .* can be loaded"):
            fleet.resume()
        assert fleet.states() == fresh != before
    assert not flag.exists()


@pytest.mark.parametrize("content", CRAFTED, ids=str)
def test_a_crafted_message_of_a_peer_runs_nothing(content, flag, saved, tmp_path, monkeypatch):
    run = saved["SeparateAdam", 1, False]
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(Packed, "describe", lambda packed: content)
    fleet = Fleet(run.case, 2, tmp_path, is_shared=False)
    with pytest.raises(Exception):  # noqa: B017 -- whatever the bytes lead to
        fleet.resume()
    assert not flag.exists()
    assert [optimizer._engine.steps for optimizer in fleet.ranks.optimizers] == [0, 0]


@pytest.mark.parametrize("what", ["folder", "parent", "snapshot", "file", "link"])
def test_what_others_may_write_is_refused(what, saved, tmp_path):
    run = saved["SeparateAdam", 1, False]
    folder = tmp_path / "mine"
    shutil.copytree(run.folder, folder)
    node = folder / "node 0"
    newest = max(node.glob("step-*"))
    fleet = Fleet(run.case, 1, folder, is_shared=False)
    if what in ("folder", "parent"):
        (node if what == "folder" else folder).chmod(0o777)
        for call in (fleet.resume, fleet.save):
            with pytest.raises(RuntimeError, match=r"is writable for others .*another user could change a snapshot"):
                call()
        folder.chmod(0o1777)  # where only its owner renames an entry
        node.chmod(0o700)
        assert fleet.resume() == (8, [])
        return
    if what == "link":
        newest.rename(tmp_path / "elsewhere")
        newest.symlink_to(tmp_path / "elsewhere")
    else:
        (newest if what == "snapshot" else next(newest.rglob(STATE))).chmod(0o770)
    step, told = run.resume_from(folder)
    assert step == 6 and "another user may have written it" in told


def test_the_package_unpickles_nothing():
    """Ranks tell each other JSON and tensors, and files are read without pickle."""
    calls = re.compile(
        r"all_gather_object|gather_object|broadcast_object_list|scatter_object_list|(send|recv)_object_list"
        r"|torch\.load\(|pickle\.loads?\(|Unpickler|distributed\.checkpoint\.(state_dict_)?(load|save|filesystem)"
    )
    root = Path(compopt.__file__).parent
    found = [f"{path.name}: {hit[0]}" for path in root.rglob("*.py") for hit in [calls.search(path.read_text())] if hit]
    assert found == []


def test_objects_of_the_user_reach_a_rank_that_joins(tmp_path):
    """State that resumes on the same ranks is sent to a new one too."""
    import collections

    import numpy as np

    values = [
        np.random.RandomState(0).get_state(),
        np.float64(0.5),
        collections.deque([1], 3),
        {1, frozenset([2])},
        collections.Counter([1, 1]),
        random.Random(0).getstate(),
        (1, 2.5, None, 1j, b"\x00", 2**70, float("inf"), {(1, "x"): [torch.eye(2).bfloat16()]}),
    ]

    class Holder:
        def __init__(self):
            self.state = None

        def state_dict(self):
            return {"values": self.state}

        def load_state_dict(self, state):
            self.state = state["values"]

    def make(size: int) -> tuple[Fleet, list[Holder]]:
        fleet, holders = (
            Fleet(by_name["SeparateAdam"], size, tmp_path, is_shared=False),
            [Holder() for _ in range(size)],
        )
        for one, holder in zip(fleet.snapshots, holders, strict=True):
            one._stateful["sampler"] = holder
        return fleet, holders

    fleet, holders = make(2)
    for holder in holders:
        holder.state = values
    fleet.train(1)
    fleet.save()
    for size in (2, 3):
        again, held = make(size)
        assert again.resume() == (1, [])
        for holder in held:
            assert repr(holder.state) == repr(values)
    holders[1].state = {"begun": datetime.datetime(2026, 1, 1)}
    with pytest.raises(
        TypeError, match=r"\['sampler'\]\['values'\]\['begun'\] is a datetime.datetime, which a snapshot"
    ):
        fleet.save()


def test_a_header_promises_as_much_as_there_is():
    for bytes_there in (3, 5):
        with pytest.raises(ValueError, match=f"4 bytes where {bytes_there} are"):
            make_empty({"tensor": 1}, [["float32", []]], bytes_there)
    for plain, words in (({"code": []}, "unknown kind"), ({"tensor": 0}, "tensor 0 of 1")):
        with pytest.raises(ValueError, match=words):
            unpack(Packed(plain, [torch.zeros(1)]))


def move_by(model: torch.nn.Module, distance: float) -> None:
    model.weight.grad = torch.full_like(model.weight, distance)


@pytest.mark.parametrize("rounds", [{"weighted": True, "every": 100}, {"round_seconds": 1e6}], ids=["steps", "time"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weights_of_a_round_are_carried(size, rounds, tmp_path):
    """Three ranks have moved by 1, 2 and 6, with weights 1, 3 and 5: by any ranks the round ends at their mean."""

    def make(size: int) -> tuple[Ranks, list[Snapshots]]:
        ranks = Ranks(
            size,
            lambda: torch.nn.Linear(1, 1, bias=False),
            lambda params, process_group: compopt.LocalSteps(
                torch.optim.SGD(params, lr=1.0),
                **rounds,
                growth_steps=0,
                outer_lr=1.0,
                outer_momentum=0.0,
                payload_dtype="float32",
                process_group=process_group,
            ),
        )
        with torch.no_grad():
            for model in ranks.models:
                model.weight.zero_()
        snapshots = [Snapshots(tmp_path, m, o) for _, m, o in ranks]
        return ranks, snapshots

    ranks, snapshots = make(3)
    for model, distance in zip(ranks.models, (1.0, 2.0, 6.0), strict=True):
        move_by(model, distance)
    ranks.world.step(ranks.optimizers, (1, 3, 5))
    if "round_seconds" in rounds:  # a rank that takes more steps than the others
        move_by(ranks.models[1], 0.0)
        ranks.optimizers[1].step(samples=0)
    ranks.world.run([one.save for one in snapshots])
    for one in snapshots:
        one.close()
    again, snapshots = make(size)
    again.world.run([one.resume for one in snapshots])
    assert {optimizer._engine.steps for optimizer in again.optimizers} <= {1, 2}
    if size == 1:  # a single process has no round to end
        assert again.models[0].weight.item() == pytest.approx(-37 / 9)
        return
    weights = [optimizer._counts.weight for optimizer in again.optimizers]
    assert weights == ([1, 3, 5] if size == 3 else [3] * size)
    again.world.run([optimizer.end_round for optimizer in again.optimizers])
    for model in again.models:
        assert model.weight.item() == pytest.approx(-37 / 9)


def save_while_another_ends_its_round(rank: int, folder: str) -> tuple[str, float, int]:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = compopt.LocalSteps(torch.optim.SGD(model.parameters(), lr=1.0), round_seconds=1e6, growth_steps=0)
    snapshots, message = Snapshots(Path(folder) / str(rank), model, optimizer), ""
    with torch.no_grad():
        model.weight.zero_()
    move_by(model, rank + 1.0)
    optimizer.step()
    if rank == 0:
        optimizer.patience = 0.2
        try:
            snapshots.save()
        except compopt.CommunicationError as error:
            message = str(error)
        optimizer.patience = None
    optimizer.end_round()
    snapshots.save()
    snapshots.close()
    return message, model.weight.item(), len(snapshots.find())


def test_a_rank_that_saves_while_another_ends_its_round_raises(tmp_path):
    """And has sent nothing: the round ends when it comes, and both save."""
    (message, weight, found), (_, other, found_there) = run_ranks(save_while_another_ends_its_round, 2, str(tmp_path))
    assert re.match(r"save\(\) was called on rank 0, but rank 1 did not come within 0\.2 s: .*same round", message)
    assert weight == other and (found, found_there) == (1, 1)


KILLS = int(os.environ.get("COMPOPT_KILLS", 1))
KILLS_SETTINGS = [(2, "LocalSteps"), (3, "SeparateAdam")] + [(size, name) for name in CLASSES for size in (2, 3)]


@pytest.mark.parametrize("number", range(KILLS))
def test_what_killed_ranks_left_goes_on_to_the_bit(number):
    size, name = KILLS_SETTINGS[number % len(KILLS_SETTINGS)]
    print(kill_and_resume(size, name, random.Random(number)))
