"""Snapshots: the newest that any rank has, on any number of ranks, in folders apart or in one."""

from __future__ import annotations

import functools
import gc
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import fsdp_models
import hsdp_models
import pytest
import torch
import torch.distributed as dist
from conformance import Small, loss
from ranks import run_ranks
from slow_rows import slow_but
from table import by_name
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import compopt
from compopt._engine import meetings
from compopt.integrations import snapshots as module
from compopt.integrations._snapshot_files import (
    MANIFEST,
    STATE,
    Snapshot,
    assign_snapshots,
    choose_snapshots,
    list_snapshots,
)
from compopt.integrations.snapshots import Snapshots

RUN = "0123456789abcdef"
OPTIONS = [dict(), dict(fragments=2, delay=2), dict(dense_steps=100)]  # the last: averaged in every step


class Position:
    """Of the data: how many samples were taken, also of each shard that was begun."""

    def __init__(self):
        self.samples, self.shards = 0, {}

    def state_dict(self) -> dict:
        return {"samples": self.samples, "shards": self.shards, "begun": [{"shard": n} for n in self.shards]}

    def load_state_dict(self, state_dict: dict) -> None:
        self.samples, self.shards = state_dict["samples"], state_dict["shards"]
        assert [*self.shards] == [entry["shard"] for entry in state_dict["begun"]]

    def take(self, samples: int) -> None:
        self.samples += samples
        self.shards[self.samples // 100] = torch.tensor(self.samples)


class Run:
    def __init__(self, folder: Path, kind: str, **options):
        torch.manual_seed(0)
        self.model = DDP(Small(), find_unused_parameters=True)
        if kind == "rounds":
            options = {"every": 4, "growth_steps": 0, "payload_dtype": "int4", **options}
            adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.optimizer = compopt.LocalSteps(adamw, **options)
        else:
            self.optimizer = compopt.RadiusAdamW(self.model.parameters(), lr=1e-2, density=0.3, dense_steps=1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.position = Position()
        stateful = dict(scheduler=self.scheduler, data=self.position)
        self.snapshots = Snapshots(folder, self.model, self.optimizer, **stateful)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * self.position.samples + dist.get_rank())
            x = torch.randn(16, 64, generator=generator)
            (self.model(x) - x.flip(1)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.position.take(16 * dist.get_world_size())

    def parts(self) -> dict[str, torch.Tensor]:
        """The parameters, and all tensors of the optimizer's state by their names."""
        results = {name: p.detach().clone() for name, p in self.model.module.named_parameters()}

        def add(prefix: str, entry: dict) -> None:
            for name, value in entry.items():
                if isinstance(value, dict):
                    add(f"{prefix}.{name}", value)
                else:
                    results[f"{prefix}.{name}"] = value.clone()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for place, entry in self.optimizer.state_dict()["state"].items():
                add(str(place), entry)
        return results


def begins(rank: int, folder: str, kind: str, options: dict, is_shared: bool) -> dict[str, torch.Tensor]:
    """Six steps, a snapshot, and more: what the snapshot must have."""
    run = Run(Path(folder) / ("all" if is_shared else f"node {rank}"), kind, **options)
    assert run.snapshots.resume() == 0
    for _ in range(3):
        run.train(2)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*is incomplete")  # every rank saves its part
            run.snapshots.save()
        saved = run.parts()
    run.train(1)  # while it is written
    run.snapshots.close()
    assert {s.step for s in run.snapshots.find()} == {2, 4, 6}, "as many as are kept, and the last"
    run.train(1)
    return {**saved, **{f"then {name}": value for name, value in run.parts().items()}}


def resumes(
    rank: int, folder: str, kind: str, options: dict, is_shared: bool, at: int = 6, warned: str = ""
) -> dict[str, torch.Tensor]:
    """Return what is there after resuming, with this warning on rank 0, and two steps later."""
    run = Run(Path(folder) / ("all" if is_shared else f"node {rank}"), kind, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert run.snapshots.resume() == at
    texts = [str(warning.message) for warning in told]
    assert (warned in texts[0] and len(texts) == 1) if warned and rank == 0 else not texts, texts
    loaded = run.parts()
    position = run.position
    assert run.scheduler.last_epoch == at and position.samples == max(position.shards.values()) > 100
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / (at + 1))
    run.train(2)
    results = {**loaded, **{f"then {name}": value for name, value in run.parts().items()}}
    if isinstance(run.optimizer, compopt.LocalSteps):
        run.optimizer.end_round()
    run.snapshots.save()
    run.snapshots.close()
    mine = torch.cat([p.detach().view(-1) for p in run.model.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    assert torch.equal(mine, other)
    return results


KINDS = [("rounds", OPTIONS[0]), ("rounds", OPTIONS[1]), ("Radius", {})]
WHOLE = ("rounds", OPTIONS[2])


@pytest.fixture(scope="module")
def begin(tmp_path_factory) -> Callable[..., list[dict[str, torch.Tensor]]]:
    """Run what two ranks begin with, once for each way; copy the snapshots of it into a folder, return its parts."""

    @functools.cache
    def run_once(kind: str, number: int, is_shared: bool) -> tuple[Path, list[dict[str, torch.Tensor]]]:
        folder = tmp_path_factory.mktemp("begun")
        return folder, run_ranks(begins, 2, str(folder), kind, OPTIONS[number], is_shared)

    def begin(folder: Path, kind: str, options: dict, is_shared: bool = False) -> list[dict[str, torch.Tensor]]:
        source, parts = run_once(kind, OPTIONS.index(options), is_shared)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return parts

    return begin


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_same_ranks_go_on_to_the_bit(kind, options, begin, tmp_path):
    before = begin(tmp_path, kind, options)
    after = run_ranks(resumes, 2, str(tmp_path), kind, options, False)
    for was, now in zip(before, after, strict=True):
        assert was.keys() == now.keys()
        assert [name for name in was if not torch.equal(was[name], now[name])] == []


def is_own(name: str) -> bool:
    return any(part in name for part in ("residual", ".base.exp_avg")) and "outer.optimizer.base" not in name


ON_OTHERS = [(*kind, *ranks) for kind in (*KINDS[::2], WHOLE) for ranks in ((3, False), (3, True), (1, True))]
MAIN = [(*KINDS[0], 3, False), (*KINDS[2], 1, True), (*WHOLE, 3, True)]


@pytest.mark.parametrize(("kind", "options", "ranks", "is_shared"), slow_but(lambda *row: row in MAIN, ON_OTHERS))
def test_other_ranks_go_on_from_the_mean(kind, options, ranks, is_shared, begin, tmp_path):
    """Common state is the same on all ranks, and state of single ranks becomes its mean."""
    before = begin(tmp_path, kind, options, is_shared)
    after = run_ranks(resumes, ranks, str(tmp_path), kind, options, is_shared)
    for now in after:
        for name, value in now.items():
            if name.startswith("then "):
                continue
            was = [one[name] for one in before]
            if value.is_floating_point() and value.dim() > 0:
                mean = torch.stack(was).double().mean(0)
                torch.testing.assert_close(
                    value.double(), mean, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
                )
            elif name.split(".")[-1] not in ("is_due",):
                assert torch.equal(value, was[0]), name


def factored(rank: int, folder: str, is_first: bool) -> dict[str, torch.Tensor]:
    """Return the state of an inner optimizer whose second moments are factors, after 4 steps or resumed."""
    torch.manual_seed(0)
    model = Small()
    optimizer = compopt.LocalSteps(torch.optim.Adafactor(model.parameters(), lr=1e-2), every=4, growth_steps=0)
    snapshots = Snapshots(Path(folder) / f"node {1 if is_first else rank}", model, optimizer)
    assert snapshots.resume() == (0 if is_first else 4)
    for step in range(4 if is_first else 0):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    snapshots.save()
    snapshots.close()
    entries = [optimizer.base.state[p] for p in (model.up.weight, model.up.bias)]
    return {name: value for entry in entries for name, value in entry.items()}


def test_factors_become_those_of_one_rank_as_they_are(tmp_path):
    """They have no mean. The rank whose state all take over may have loaded no snapshot itself."""
    [was] = run_ranks(factored, 1, str(tmp_path), True)
    assert {"row_var", "col_var", "variance"} < was.keys()
    for now in run_ranks(factored, 2, str(tmp_path), False):
        assert [name for name in was if not torch.equal(was[name], now[name])] == []


LOST = "the snapshots of step 6 are not there of replica 0 of 2: the residuals of these ranks are lost"


def test_a_rank_that_is_gone_takes_only_its_own_part_with_it(begin, tmp_path):
    before = begin(tmp_path, "rounds", {})
    shutil.rmtree(tmp_path / "node 0")
    (tmp_path / "node 1").rename(tmp_path / "node 0")
    (now,) = run_ranks(resumes, 1, str(tmp_path), "rounds", {}, False, 6, LOST)
    for name in ("0.outer.anchor", "0.base.exp_avg", "0.outer.optimizer.base.momentum_buffer"):
        torch.testing.assert_close(now[name], before[1][name])


def test_what_is_not_complete_is_passed_over(begin, tmp_path):
    begin(tmp_path, "rounds", {})
    torn = tmp_path / "node 0" / Snapshot(8, 1, RUN, 0, 2).name
    torn.mkdir(parents=True)
    (torn / STATE).write_bytes(b"torn")
    run_ranks(resumes, 2, str(tmp_path), "rounds", {}, False)


def resumes_at_different_speeds(rank: int, folder: str) -> None:
    """Rank 1 reads for longer than the patience of ``consolidate_state()``, and writes for longer than that."""
    meetings.PATIENCE = 0.1

    def slowly(method: Callable) -> Callable:
        def call(*args):
            time.sleep(rank)
            return method(*args)

        return call

    run = Run(Path(folder), "rounds")
    run.snapshots._write_state = slowly(run.snapshots._write_state)
    assert run.snapshots.resume() == 6
    torch.manual_seed(0)
    model = DDP(Small())
    sharded = compopt.TagcAdamW(model.parameters())
    snapshots = Snapshots(Path(folder) / "sharded", model, sharded)
    snapshots._finish_writing = slowly(snapshots._finish_writing)
    snapshots.save()
    snapshots.close()


def test_ranks_wait_for_one_that_reads_or_writes_slowly(begin, tmp_path):
    begin(tmp_path, "rounds", {}, is_shared=True)
    run_ranks(resumes_at_different_speeds, 3, str(tmp_path / "all"))


def saves_and_resumes(rank: int, folder: str) -> int:
    run = Run(Path(folder) / f"node {rank}", "rounds", **OPTIONS[1])
    run.train(4)
    run.snapshots.save()
    run.snapshots.close()
    run.optimizer.end_round()
    del run
    gc.collect()  # which destroys the process group of delayed exchanges
    return Run(Path(folder) / f"node {rank}", "rounds", **OPTIONS[1]).snapshots.resume()


def test_a_process_may_resume_its_own_run(tmp_path):
    assert run_ranks(saves_and_resumes, 2, str(tmp_path)) == [4, 4]


def begins_elsewhere(rank: int, folder: str, kind: str) -> None:
    """Go on from the older snapshot on node 0 and a new node, to the step of the newer one."""
    run = Run(Path(folder) / f"node {(0, 2)[rank]}", kind)
    assert run.snapshots.resume() == 4
    run.position.samples += 1000  # other data
    run.train(2)
    run.snapshots.save()
    run.snapshots.close()


@pytest.mark.parametrize("kind", ["rounds", pytest.param("Radius", marks=pytest.mark.slow)])
def test_snapshots_of_runs_that_parted_are_not_mixed(kind, begin, tmp_path):
    """Node 0 was killed while it wrote the newest one, and node 1, which has its part of it, comes back later."""
    begin(tmp_path, kind, {})
    (newest,) = (tmp_path / "node 0").glob(f"step-00000006-*/replica-0-of-2/{MANIFEST}")
    newest.unlink()
    shutil.move(tmp_path / "node 1", tmp_path / "away")
    run_ranks(begins_elsewhere, 2, str(tmp_path), kind)
    shutil.move(tmp_path / "away", tmp_path / "node 1")
    run_ranks(resumes, 2, str(tmp_path), kind, {}, False, 4, "Those of step 6, 6 were saved later, but are not there")


def make_alone(folder: Path, keep: int) -> tuple[Snapshots, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.SeparateAdam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    return Snapshots(folder, model, optimizer, keep=keep), optimizer


def save_in_vain(snapshots: Snapshots, monkeypatch) -> None:
    """Begin a snapshot that is never written: the process is killed."""
    with monkeypatch.context() as patch:
        patch.setattr(module.files, "write_snapshot", lambda *a: None)
        snapshots.save()
    snapshots._pending = None


def test_the_last_snapshot_remains_until_the_next_is_complete(tmp_path, monkeypatch):
    snapshots, optimizer = make_alone(tmp_path, keep=1)
    optimizer.step()
    snapshots.save()
    optimizer.step()
    save_in_vain(snapshots, monkeypatch)
    assert [s.step for s in snapshots.find()] == [1]
    snapshots.save()
    assert list_snapshots(tmp_path)[0].step == 1, "it is needed until then"
    snapshots.save()
    snapshots.close()
    assert [s.step for s in list_snapshots(tmp_path)] == [2, 2]


def test_a_second_snapshot_of_a_step_leaves_the_first_until_it_is_complete(tmp_path, monkeypatch):
    """As at the end of a run: after the last step, and after the round was ended there."""
    snapshots, optimizer = make_alone(tmp_path, keep=1)
    optimizer.step()
    snapshots.save()
    snapshots.wait()
    (first,) = snapshots.find()
    save_in_vain(snapshots, monkeypatch)
    assert snapshots.find() == [first]
    snapshots.save()
    snapshots.close()
    _, second = snapshots.find()
    assert second.step == first.step and second.stamp > first.stamp


def test_two_runs_in_one_folder_keep_their_own_and_are_told(tmp_path):
    longer, optimizer = make_alone(tmp_path, keep=1)
    optimizer.step()
    longer.save()
    longer.close()
    other, its_optimizer = make_alone(tmp_path, keep=1)
    for _ in range(3):
        its_optimizer.step()
        other.save()
    other.close()
    with pytest.warns(UserWarning, match="another run writes snapshots into"):
        longer.save()
    for _ in range(2):
        optimizer.step()
        longer.save()
    longer.close()
    assert sorted(s.step for s in longer.find()) == [2, 2, 3, 3]


def test_a_run_that_went_on_removes_what_it_went_on_from_when_it_has_its_own(tmp_path):
    snapshots, optimizer = make_alone(tmp_path, keep=2)
    for _ in range(3):
        optimizer.step()
        snapshots.save()
    snapshots.close()
    (tmp_path / Snapshot(9, snapshots._stamp + 1, snapshots._meeting.lineage[0], 0, 1).name).mkdir(parents=True)
    again, optimizer = make_alone(tmp_path, keep=2)
    assert again.resume() == 3
    steps = []
    for _ in range(4):
        optimizer.step()
        again.save()
        again.wait()
        steps.append([s.step for s in list_snapshots(tmp_path)])
    assert steps == [[1, 2, 3, 9, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7]]


def test_a_snapshot_that_is_removed_in_part_is_not_complete(tmp_path, monkeypatch):
    snapshots, optimizer = make_alone(tmp_path, keep=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # the process is killed there
    for _ in range(3):
        optimizer.step()
        snapshots.save()
    snapshots.close()
    assert [s.step for s in snapshots.find()] == [2, 3]


def test_a_snapshot_may_be_removed_while_the_folder_is_read(tmp_path):
    names = [Snapshot(n, 1, RUN, 0, 2).name for n in range(50)]
    snapshots, _ = make_alone(tmp_path, keep=1)
    stop = threading.Event()

    def remove_and_write() -> None:
        while not stop.is_set():
            for name in names:
                (tmp_path / name).mkdir(parents=True)
                (tmp_path / name / MANIFEST).touch()
            for name in names:
                shutil.rmtree((tmp_path / name).parent)

    other_rank = threading.Thread(target=remove_and_write)
    other_rank.start()
    try:
        for _ in range(300):
            snapshots.find()
    finally:
        stop.set()
        other_rank.join()


def test_a_snapshot_that_could_not_be_written_is_told_and_the_next_one_belongs_to_those_of_other_ranks(tmp_path):
    snapshots, optimizer = make_alone(tmp_path, keep=1)
    optimizer.step()
    snapshots.save()
    snapshots.wait()
    (first,) = snapshots.find()
    in_the_way = tmp_path / first._replace(step=2, stamp=first.stamp + 1).name
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file where the folder is to be")
    optimizer.step()
    snapshots.save()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"step-00000002.* could not be written on rank 0 \(\w+Error: "):
        snapshots.save()  # which raises before it writes
    assert snapshots.find() == [first]
    optimizer.step()
    snapshots.save()
    snapshots.close()
    last = first._replace(step=4, stamp=first.stamp + 3)
    assert snapshots.find() == [first, last], "a stamp for every save(), on all ranks"


def goes_on_over_another_group(rank: int, folder: str) -> list[Snapshot]:
    """Rank 2 is left behind while a snapshot is being written; the others go on by rebind()."""
    run = Run(Path(folder) / f"node {rank}", "rounds")
    run.train(4)
    run.snapshots.save()
    dist.destroy_process_group()
    file, size = f"file://{folder}/meets {rank // 2}", (2, 1)[rank // 2]
    dist.init_process_group("gloo", init_method=file, rank=rank % 2, world_size=size)
    run.optimizer.rebind()
    if rank == 2:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.model = DDP(run.model.module, find_unused_parameters=True, init_sync=False)
    compopt.attach(run.model, run.optimizer)
    run.train(4)
    run.snapshots.save()
    run.snapshots.close()
    return run.snapshots.find()


def test_snapshots_go_on_after_a_rebind(tmp_path):
    first, second, _ = run_ranks(goes_on_over_another_group, 3, str(tmp_path))
    for rank, found in enumerate((first, second)):
        assert [(s.step, s.replica, s.replicas) for s in found] == [(4, rank, 3), (8, rank, 2)]
        assert found[-1] == first[-1]._replace(replica=rank)


def some(*numbers: int, stamp: int = 2, size: int = 3, shard: int = 0, shards: int = 1) -> list[Snapshot]:
    return [Snapshot(9, stamp, RUN, n, size, shard, shards) for n in numbers]


def test_each_snapshot_is_loaded_once():
    everything = some(0, 1, 2)
    assert assign_snapshots([], [[], []]) == [[], []]
    apart = [some(1), some(0), some(2)]
    assert assign_snapshots(everything, apart) == apart, "folders apart: ranks have other numbers"
    assert assign_snapshots(everything, [everything] * 3) == [some(0), some(1), some(2)]
    assert assign_snapshots(everything, [everything] * 2) == [some(0, 2), some(1)]
    assert assign_snapshots(everything, [everything] * 4) == [some(0), some(1), some(2), []]
    assert assign_snapshots(some(1, 2), [everything] * 3) == [[], some(1), some(2)], "one is gone: each has its own"


def test_the_newest_that_every_replica_has_is_chosen_else_the_newest():
    assert choose_snapshots([]) is None
    whole, later = some(0, 1, stamp=3, size=2), some(1, stamp=4, size=2)
    choice = choose_snapshots([*some(0, 1, stamp=2, size=2), *later, *whole])
    assert (choice.snapshots, choice.passed_over, choice.missing_replicas) == (whole, [9], [])
    choice = choose_snapshots([*some(0, stamp=3), *later])
    assert (choice.snapshots, choice.passed_over, choice.missing_replicas) == (later, [], [0])
    other = [one._replace(run="f" * 16) for one in later]
    assert choose_snapshots([*some(0, stamp=4, size=2), *other]).snapshots == other, "of one run"
    shards = [*some(0, size=2, shards=2), *some(0, size=2, shard=1, shards=2), *some(1, size=2, shards=2)]
    choice = choose_snapshots(shards)
    assert (choice.snapshots, choice.missing_replicas) == (shards[:2], [1]), "a replica has all its shards"


def make_sharded(mesh: DeviceMesh, folder: str, name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Snapshots]:
    model, optimizer = hsdp_models.hsdp(mesh, by_name[name].make)
    return model, optimizer, Snapshots(Path(folder) / name, model, optimizer)


def saves_shards(rank: int, folder: str, name: str) -> torch.Tensor:
    """Two replicas of two ranks save, and go on; the same ranks resume, and go on to the bit. What they saved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer, snapshots = make_sharded(mesh, folder, name)
    hsdp_models.train(model, optimizer, range(5), rank)
    snapshots.save()
    snapshots.close()
    saved = fsdp_models.whole(model)
    dist.barrier()
    again, its_optimizer, snapshots = make_sharded(mesh, folder, name)
    assert snapshots.resume() == 5
    assert torch.equal(fsdp_models.whole(again), saved)
    for one, its in ((model, optimizer), (again, its_optimizer)):
        hsdp_models.train(one, its, range(5, 7), rank)
    assert torch.equal(fsdp_models.whole(again), fsdp_models.whole(model))
    return saved


def resumes_one_replica(rank: int, folder: str, name: str) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model, _, snapshots = make_sharded(mesh, folder, name)
    assert snapshots.resume() == 5
    values = fsdp_models.whole(model)
    if name != "TagcAdamW":
        return values
    whole = DDP(hsdp_models.make(), find_unused_parameters=True)
    snapshots = Snapshots(Path(folder) / "TagcAdamW", whole, by_name["TagcAdamW"].make(whole.parameters()))
    with pytest.raises(RuntimeError, match="are of replicas of 2 ranks, and here a replica has 1: nothing was loaded"):
        snapshots.resume()
    return values


@pytest.mark.parametrize("name", ["TagcAdamW", pytest.param("LocalSteps", marks=pytest.mark.slow)])
def test_each_rank_of_a_sharded_replica_writes_its_shard(name, tmp_path):
    before = run_ranks(saves_shards, 4, str(tmp_path), name)
    for now in run_ranks(resumes_one_replica, 2, str(tmp_path), name):
        torch.testing.assert_close(now, (before[0] + before[2]) / 2)


def test_what_cannot_be_is_refused():
    model = torch.nn.Linear(4, 4)
    optimizer = compopt.SeparateAdam(model.parameters())
    with pytest.raises(ValueError, match="keep must be"):
        Snapshots("x", model, optimizer, keep=0)
    with pytest.raises(TypeError, match="one optimizer of compopt, got list"):
        Snapshots("x", model, [optimizer])
    with pytest.raises(TypeError, match="one optimizer of compopt, got second as well"):
        Snapshots("x", model, optimizer, second=compopt.SeparateAdam(torch.nn.Linear(4, 4).parameters()))
    optimizer.replaces_reduce_scatter = True
    with pytest.raises(ValueError, match=r"save with torch\.distributed\.checkpoint"):
        Snapshots("x", model, optimizer)


def test_a_tensor_of_one_element_may_have_any_stride(tmp_path):
    model = Small()
    model.scale = torch.nn.Parameter(torch.arange(10.0)[::5][1:])
    assert model.scale.stride() == (5,)
    optimizer = compopt.LocalSteps(torch.optim.AdamW(model.parameters()), growth_steps=0, simulate=True)
    snapshots = Snapshots(tmp_path, model, optimizer)
    snapshots.resume()
    model.scale.grad = torch.ones(1)
    optimizer.step()
    was = float(model.scale.detach())
    snapshots.save()
    snapshots.close()
    with torch.no_grad():
        model.scale.zero_()
    assert snapshots.resume() == 1 and float(model.scale.detach()) == was != 5
