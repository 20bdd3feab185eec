"""Ranks that others wait for in vain, real ones: ``consolidate_state()`` on some only, and interrupted steps."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conformance import Small, loss, make_ranks
from lossy import run_lossy
from ranks import FOREVER, HANG_GUARD, free_port, run_ranks
from sim import Ranks, SimCommunicator
from table import FORMS, by_name
from torch import nn

import compopt
from compopt._engine import missing_ranks
from compopt._engine.meetings import RanksMissing, gather_at_store
from compopt._engine.missing_ranks import (
    Note,
    explain_failure,
    explain_missing_rank,
    post_lost_masks,
    post_note,
    run_watching_ranks,
)
from compopt._wire.collectives import Communicator
from compopt._wire.groups import BoundedStore, get_group_store
from compopt._wire.in_flight import PendingCollective
from compopt._wire.requests import RankSilent

FAILED = compopt.CommunicationError("it failed")
by_name = by_name | {case.name: case for case in FORMS}


class Run:
    def __init__(self, rank: int, name: str = "RadiusAdamW", **options):
        torch.manual_seed(0)
        self.rank, self.t = rank, 0
        self.model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        self.optimizer = by_name[name].make(self.model.parameters(), **options)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * self.t + self.rank))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.t += 1

    def sum(self) -> float:
        return float(nn.utils.parameters_to_vector(self.model.parameters()).double().sum())


def consolidate(run: Run, **options) -> str:
    try:
        run.optimizer.consolidate_state(**options)
    except (compopt.CommunicationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def consolidated_by_some(rank: int) -> dict:
    """Rank 0 is alone while the others step, and while they are in a barrier; then all come, and training goes on."""
    missing_ranks.LOOK_AFTER = 0.05
    results = {}
    for name in ("RadiusAdamW", "TagcAdamW", "AdamS"):
        run, message = Run(rank, name, **({"payload_dtype": None} if name == "AdamS" else {})), []
        run.train(4)
        if rank == 0:
            message.append(consolidate(run, patience=0.5))
            time.sleep(0.5)  # the others know by now that it gave up, and wait on
        run.train()
        if rank == 0:
            message.append(consolidate(run, patience=0.5))
        dist.barrier()
        run.train(2)
        if rank == 0 and name == "RadiusAdamW":  # the others come first, and wait for rank 0
            time.sleep(0.5)
            message.append(consolidate(run, patience=HANG_GUARD))
        elif name == "RadiusAdamW":
            message.append(consolidate(run))
        complete = consolidate(run)
        run.train(2)
        steps = run.optimizer.stats.applied_steps
        results[name] = {"said": message, "complete": complete, "sum": run.sum(), "steps": steps}
    a, b = Run(rank), Run(rank, "SeparateAdam")
    results["others"] = consolidate(a if rank == 0 else b), consolidate(a), consolidate(b)
    run = Run(rank)
    run.train(3)
    results["not rank 0"] = consolidate(run, patience=0.5) if rank == 1 else dist.barrier()
    if rank == 1:
        dist.barrier()
    run.train()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_alone_in_consolidate_state_is_told_and_training_goes_on(size):
    ranks = run_ranks(consolidated_by_some, size)
    absent = "rank 1" if size == 2 else "rank 1, rank 2"
    for name in ("RadiusAdamW", "TagcAdamW"):
        for results in ranks:
            assert results[name]["complete"] == "" and results[name]["sum"] == ranks[0][name]["sum"]
            assert results[name]["steps"] == 9
        for message in ranks[0][name]["said"][:2]:
            assert message.startswith("CommunicationError: consolidate_state() was called on rank 0, but ")
            assert f"but {absent} did not come within 0.5 s: call it on all ranks, before `if rank == 0:`" in message
            assert "or wait longer (patience=). Nothing was changed." in message
    assert all(results["RadiusAdamW"]["said"][-1] == "" for results in ranks)  # who waits for rank 0 is patient
    for results in ranks:
        assert set(results["AdamS"]["said"]) <= {""}  # which has nothing to exchange
        differ, *equal = results["others"]
        assert differ.startswith("ValueError: ranks differ in consolidate_state(): rank 0 has RadiusAdamW, ")
        assert "rank 1 has SeparateAdam, " in differ and equal == ["", ""]
    assert "called on rank 1, but rank 0" in ranks[1]["not rank 0"]


def waiting_elsewhere(rank: int) -> str:
    """All ranks that wait leave when one of them gives up, though they would wait longer."""
    run = Run(rank)
    run.train(2)
    store = run.optimizer.comm.store
    while rank == 0 and not store.check(["compopt/meeting/0/1"]):
        time.sleep(0.01)
    message = "" if rank == 2 else consolidate(run, patience=0.1 if rank == 0 else HANG_GUARD)
    dist.barrier()
    return message


def test_a_rank_that_gives_up_ends_the_meeting_for_all():
    first, second, third = run_ranks(waiting_elsewhere, 3)
    assert "on rank 0, but rank 2 did not come within 0.1 s" in first
    assert "on rank 1, but rank 2 did not come within 0.1 s" in second and third == ""


def gone(rank: int, trainings: list, file: str) -> list[str]:
    missing_ranks.LOOK_AFTER = 0.3
    training = trainings[0]
    for _ in range(3):
        training.backward(rank)
        training.optimizer.step()
    if rank == 1:
        os.kill(os.getpid(), 9)
    try:
        training.optimizer.consolidate_state(patience=1.0)
    except compopt.CommunicationError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_have_ended_are_not_waited_for(size):
    for report in run_lossy(gone, size, dying=1).values():
        assert re.search("rank 1(, rank 2)? did not come within 1 s: call it on all ranks", report[0])


def uncaught(rank: int, trainings: list, file: str) -> list[str]:
    missing_ranks.LOOK_AFTER = 0.3
    training = trainings[0]
    for _ in range(3):
        training.backward(rank)
        training.optimizer.step()
    try:
        if rank == 0:
            training.optimizer.consolidate_state(patience=1.0)
        training.backward(rank)
        training.optimizer.step()
    except compopt.CommunicationError as error:
        if rank == 0:
            os.kill(os.getpid(), 9)
        return [str(error)]
    return []


def test_the_others_say_why_rank_0_has_ended():
    for rank, report in run_lossy(uncaught, 3, dying=0).items():
        assert report[0].startswith(f"step 4 was not applied on rank {rank}: "), report
        assert report[0].endswith(" (rank 0 was in consolidate_state(): call it on all ranks, before `if rank == 0:`)")


def interrupted(rank: int, name: str) -> dict:
    """Ctrl-C while rank 1 waits in a step. It lives on, and nobody waits for the timeout: all go on over another group.

    What rank 1 has started may still arrive, so the others may have applied that step.
    """
    missing_ranks.LOOK_AFTER = 0.3
    groups = [dist.new_group(timeout=FOREVER) for _ in range(2)]
    run = Run(rank, name, process_group=groups[0])
    run.train(3)
    completes_within, message = PendingCollective.completes_within, ""

    def interrupt(pending: PendingCollective, seconds: float) -> bool:
        signal.raise_signal(signal.SIGINT)
        return completes_within(pending, seconds)

    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        PendingCollective.completes_within = interrupt
    try:
        run.train(9)
    except (compopt.CommunicationError, KeyboardInterrupt) as error:
        message = f"{type(error).__name__}: {error}"
    PendingCollective.completes_within = completes_within
    run.optimizer.rebind(groups[1])
    run.t = run.optimizer._engine.steps
    run.train(4)
    if name.startswith("LocalSteps"):
        run.optimizer.end_round()
    return {"said": message, "sum": run.sum()}


@pytest.mark.parametrize("name", ["RadiusAdamW", "SeparateAdam", "LocalSteps, rounds"])
def test_a_rank_that_is_interrupted_in_a_step_tells_the_others(name):
    ranks = run_ranks(interrupted, 3, name)
    for rank, results in enumerate(ranks):
        if rank == 1:
            assert results["said"].startswith("KeyboardInterrupt")
        else:
            assert re.search(rf"CommunicationError: step \d was (not applied|taken) on rank {rank}", results["said"])
            assert re.search(r"rank 1 was interrupted by KeyboardInterrupt after step \d", results["said"])
            assert "Make a new process group on all ranks and call rebind()" in results["said"]
        assert results["sum"] == ranks[0]["sum"]


class LateStore(dist.HashStore):
    """Says once too often that a meeting goes on; meanwhile the last rank comes."""

    def __init__(self):
        super().__init__()
        self.last_rank = self.texts = None

    def check(self, keys):
        if keys[0].endswith("outcome") and self.last_rank is not None:
            comes, self.last_rank = self.last_rank, None
            self.texts = comes()
            return False
        return super().check(keys)


def test_a_meeting_ends_once():
    store = LateStore()
    first, second = (functools.partial(gather_at_store, store, rank, 2) for rank in range(2))
    store.last_rank = lambda: second("b", patience=0)
    assert first("a", patience=-1) == store.texts == ["a", "b"]  # though it would have given up
    with pytest.raises(RanksMissing, match="rank 0 did not come within 0 s"):
        second("b", patience=0)
    store.last_rank = lambda: second("d", patience=0)
    assert first("c", patience=60) == store.texts == ["c", "d"]
    left = [number for number in range(4) if dist.HashStore.check(store, [f"compopt/meeting/{number}/outcome"])]
    assert left == [0, 2], "of a meeting that was complete nothing is left after the next one"


class DyingStore(dist.HashStore):
    """Ends the rank that would set the outcome of a meeting."""

    def set(self, key, value):
        if key.endswith("outcome"):
            raise SystemExit
        super().set(key, value)


def test_a_meeting_ends_without_the_rank_that_was_to_end_it(monkeypatch):
    monkeypatch.setattr("compopt._engine.meetings.PATIENCE", 0.1)
    store = DyingStore()
    with pytest.raises(SystemExit):
        gather_at_store(store, 0, 2, "a", patience=0)
    assert int(store.get("compopt/meetings")) == 1
    store.set("compopt/meetings", "0")  # the other rank was in it already
    with pytest.raises(RuntimeError, match="Wait timeout"):
        gather_at_store(store, 1, 2, "b", patience=0)


def test_notes_are_heeded_in_the_steps_that_their_rank_does_not_come_to(monkeypatch):
    monkeypatch.setattr(SimCommunicator, "can_poll_store", lambda comm, device: True)
    ranks = make_ranks(by_name["RadiusAdamW"], 2)
    ranks.train(loss, 3)
    here, there = (optimizer._engine for optimizer in ranks.optimizers)
    store = BoundedStore(dist.HashStore(), HANG_GUARD)
    for engine in (here, there):
        engine.comm.store = store
    post_note(there, Note.LEFT, "rank 1 was interrupted")
    assert (
        explain_missing_rank(here) == "rank 1 was interrupted"
        and explain_failure(here, FAILED) == " (rank 1 was interrupted)"
    )
    here.option_groups[0]["step"] -= 1  # a step that rank 1 has applied
    assert explain_missing_rank(here) == explain_failure(here, FAILED) == ""
    here.option_groups[0]["step"] += 2
    assert explain_missing_rank(here)
    run_watching_ranks(ranks.optimizers[1]._engine, lambda: None)
    assert explain_missing_rank(here) == "", "it has taken a step since"

    post_lost_masks(there)
    assert explain_missing_rank(here) == "rank 1 lost the masks that followed step 3, and others have them"
    post_lost_masks(here)
    assert explain_missing_rank(here) == explain_missing_rank(there) == "", "all have lost them, and choose anew"
    post_note(there, Note.CONSOLIDATES, "rank 1 was in consolidate_state()")
    assert explain_missing_rank(here) == "" and "consolidate_state" in explain_failure(here, FAILED), (
        "it may come later"
    )


def test_what_is_no_note_is_passed_over():
    ranks = make_ranks(by_name["RadiusAdamW"], 3)
    here, _, there = (optimizer._engine for optimizer in ranks.optimizers)
    store = BoundedStore(dist.HashStore(), HANG_GUARD)
    for engine in (here, there):
        engine.comm.store = store
    post_note(there, Note.LEFT, "rank 2 was interrupted")
    owner, steps = missing_ranks._identify_step(here)
    for text in ("[", "7", "[1, 2]", *map(json.dumps, ([owner, "0", "left", ""], [owner, steps, "gone", ""]))):
        store.run(lambda s, text=text: s.set(f"{missing_ranks.PREFIX}note/1", text))
        assert explain_missing_rank(here) == "rank 2 was interrupted"
        assert explain_failure(here, FAILED) == " (rank 2 was interrupted)"


def test_local_steps_that_fail_in_the_handshake_say_which_step_it_is():
    def make(params, process_group):
        return compopt.LocalSteps(torch.optim.AdamW(params), 2, growth_steps=0, process_group=process_group)

    ranks = Ranks(2, Small, make)
    ranks.world.failing_everywhere.add(0)
    with pytest.raises(
        compopt.CommunicationError, match=r"^step 1 was not applied on rank 0: collective 0 was made to"
    ):
        ranks.train(loss, 1)


class StuckStore(dist.HashStore):
    """Answers once ``answers`` is set, as a store whose host cannot be reached."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()

    def check(self, keys):
        self.answers.wait()
        return super().check(keys)


def test_a_group_has_its_store_where_torch_gives_no_way_to_it(tmp_path, monkeypatch):
    """As before torch 2.9: all steps of several ranks use it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        store = get_group_store(dist.group.WORLD)
        monkeypatch.delattr(dist.ProcessGroup, "get_group_store", raising=False)
        get_group_store(dist.group.WORLD).set("here", "too")
        assert store.get("here") == b"too"
    finally:
        dist.destroy_process_group()


def test_no_call_of_a_store_that_does_not_answer_is_waited_for():
    stuck = StuckStore()
    store = BoundedStore(stuck, HANG_GUARD)
    with pytest.raises(RuntimeError, match=r"the store did not answer within 0\.01 s"):
        store.run(lambda s: s.check(["key"]), 0.01)
    for call in (lambda: store.check(["key"]), lambda: store.set("key", "value")):
        with pytest.raises(RuntimeError, match="an earlier call of the store has not been answered yet"):
            call()
    stuck.answers.set()
    store._running.join()
    assert not store.check(["key"])
    store.set("key", "value")
    assert store.check(["key"]) and store.get("key") == b"value" and store.add("count", 2) == 2
    store.wait(["key"], timedelta(seconds=0))
    store.delete_key("key")
    with pytest.raises(RuntimeError):  # the store's own error
        store.wait(["key"], timedelta(milliseconds=1))


def test_a_step_does_not_wait_for_the_store(monkeypatch):
    """It does for the other ranks; and consolidate_state() says that the store does not answer."""
    monkeypatch.setattr(missing_ranks, "NOTE_LIMIT", 0.01)
    ranks = make_ranks(by_name["RadiusAdamW"], 2)
    ranks.train(loss, 2)
    engine, stuck = ranks.optimizers[0]._engine, StuckStore()
    engine.comm.store = BoundedStore(stuck, 0.05)
    monkeypatch.setattr(SimCommunicator, "can_poll_store", lambda comm, device: True)
    waits = iter([False, False, True])
    monkeypatch.setattr(PendingCollective, "completes_within", lambda pending, seconds: next(waits))
    pending = PendingCollective("of the test", type("Done", (), {"wait": lambda work: None})(), lambda: None)
    run_watching_ranks(ranks.optimizers[0]._engine, pending.wait)
    assert next(waits, None) is None and explain_failure(engine, RankSilent("it failed")).startswith(". Another rank")
    with pytest.raises(compopt.CommunicationError, match=r"could not reach the other ranks.* does not answer"):
        ranks.optimizers[0].consolidate_state()
    stuck.answers.set()


def silent(rank: int, address: str, file: str) -> tuple[str, str]:
    """Rank 0, which has the store, is stopped; rank 1 raises although nobody answers its looks."""
    missing_ranks.LOOK_AFTER = 0.05
    dist.destroy_process_group()
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=timedelta(seconds=2))
    run, message, printed = Run(rank), "", ""
    run.train(3)
    if rank == 0:
        Path(file).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 1 has raised
    try:
        run.train()
    except compopt.CommunicationError as error:
        message, printed = str(error), "".join(traceback.format_exception(error))
    if rank == 1:
        os.kill(int(Path(file).read_text()), signal.SIGCONT)
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{file}-2", rank=rank, world_size=2, timeout=FOREVER)
    return message, printed


def test_a_rank_raises_at_the_timeout_though_the_host_of_the_store_is_silent(tmp_path):
    answers = run_ranks(silent, 2, f"tcp://127.0.0.1:{free_port()}", str(tmp_path / "pid"))
    for rank, (message, printed) in enumerate(answers):
        assert message.startswith(f"step 4 was not applied on rank {rank}: "), message
        assert "Another rank, or its node, is gone or does not answer: make a new process group" in message
        frames = re.findall(r'File ".*/compopt/(_\w+/\w+\.py)", line', printed)
        assert frames == ["_engine/optimizer.py", "_engine/missing_ranks.py"], "few come before the sentence"
        assert printed.count("Traceback") == 1


def one_step_less(rank: int, name: str, can_poll: bool, patience: float | None) -> tuple[str, list[str]]:
    """Rank 0 makes a step less than the others, and stays until they have told for whom they wait."""
    missing_ranks.LOOK_AFTER = 0.05
    if not can_poll:  # as on NCCL
        Communicator.can_poll_store = lambda comm, device: False
    run, message = Run(rank, name), ""
    run.optimizer.patience = patience
    run.train(8)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    missing_ranks.NAME_AFTER = 1.0
    if rank == 0:
        store.wait(["told"], FOREVER)
        if patience is None:
            run.train()  # it was only late
        return "", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            threading.Thread(target=lambda: tell(store, caught), daemon=True).start()
        try:
            run.train()
        except compopt.CommunicationError as error:
            message = str(error)
        return message, [str(w.message) for w in caught if "come to" in str(w.message)]


def tell(store, caught: list) -> None:
    """Let rank 0 go on once this rank has named it."""
    while not any("come to" in str(w.message) for w in caught):
        time.sleep(0.01)
    store.set("told", "")


@pytest.mark.parametrize(("name", "can_poll"), [("SeparateAdam", True), ("RadiusAdamW", False), ("LocalSteps", True)])
def test_ranks_that_wait_say_for_whom_and_wait_on(name, can_poll):
    first, second, third = run_ranks(one_step_less, 3, name, can_poll, None)
    (text,) = second[1]
    assert text.startswith("rank 0 has not come to step 9, in which rank 1 has waited for 1 s, and waits on"), text
    assert "call step() equally often on all ranks (drop_last=True, or torch's Join)" in text
    assert first == ("", []) and second[0] == "" and third == ("", []), "one of those that wait says so"


def test_ranks_with_patience_raise_and_name_who_has_not_come():
    answers = run_ranks(one_step_less, 3, "SeparateAdam", True, 1.5)
    for rank, (message, _) in enumerate(answers[1:], start=1):
        assert message.startswith(f"step 9 was not applied on rank {rank}: rank 0 has not come to step 9 within"), (
            message
        )


def uneven(rank: int) -> int:
    """All ranks but one have started a collective."""
    if rank:
        dist.all_reduce(torch.zeros(3), async_op=True)
    return rank


def destroyed(rank: int) -> int:
    """A rank has no group when the others answer."""
    dist.barrier()  # all have connected
    dist.destroy_process_group()
    time.sleep(0.5 * rank)
    return rank


@pytest.mark.parametrize("function", [uneven, destroyed])
def test_ranks_end_whatever_has_become_of_their_group(function):
    assert run_ranks(function, 3) == [0, 1, 2]


def ended(rank: int) -> str:
    """Rank 0 leaves its loop, and destroys the group a while later."""
    missing_ranks.LOOK_AFTER, missing_ranks.NAME_AFTER = 0.05, 0.3
    run, message = Run(rank), ""
    run.train(3)
    if rank == 0:
        time.sleep(1.0)
        dist.destroy_process_group()
        return ""
    try:
        run.train()
    except compopt.CommunicationError as error:
        message = str(error)
    dist.destroy_process_group()
    return message


def test_the_error_at_the_end_names_who_had_not_come():
    message = run_ranks(ended, 2)[1]
    assert "Rank 0 has not come to step 4: call step() equally often on all ranks" in message, message
