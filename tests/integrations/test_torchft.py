"""Ranks that leave and join under torchft: what its manager is asked, and when; with torchft itself in `make slow`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import HANG_GUARD
from sim import World
from torch import nn

import compopt
from compopt.integrations._quorum_waits import AdaptiveTimeout, ConnectTimeout, check_store
from compopt.integrations.torchft import FaultTolerant, make_manager

HERE = Path(__file__)


class Backend:
    """In place of torch's group in torchft's, and of its backend."""

    def _get_backend(self, device) -> Backend:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


class Group:
    """In place of torchft's group, of this rank alone."""

    generation, failures, backend = 0, 0, "torchft-gloo"
    _timeout = timedelta(seconds=60)

    def __init__(self):
        self.waits, self.parent = [], Backend()

    def reconfigure(self, options) -> None:
        self.waits.append(self._timeout.total_seconds())
        if self.failures:
            self.failures -= 1
            raise TimeoutError("not connected")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def getBackendName(self) -> str:
        return self.backend

    def abort(self) -> None:
        self.is_aborted = True

    def size(self) -> int:
        return 1

    def name(self) -> str:
        return "torchft-gloo"


class Options:
    def __init__(self, uuid: int):
        self.uuid, self.handles = uuid, []


class Manager:
    """In place of torchft's: notes what it is asked, and answers as it was told."""

    def __init__(self, group: Group):
        self.group, self.asked, self.answers, self.numbers = group, [], [], {"step": 0, "batches_committed": 0}
        self.error, self.generation, self.is_new, self.timeouts = None, 0, True, []

    def register_state_dict_fn(self, key, load_state_dict, state_dict) -> None:
        self.load, self.save = load_state_dict, state_dict

    def start_quorum(self, shrink_only=False, timeout=None) -> None:
        self.error = None
        self.asked.append("shrink" if shrink_only else "quorum")
        self.timeouts.append(timeout and timeout.total_seconds())
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if self.is_new or answer is not None:
            self.generation, self.is_new = self.generation + 1, False
            try:
                self.group.reconfigure(Options(self.generation))
            except OSError as error:
                self.report_error(error)
                return
        if isinstance(answer, dict):  # this rank is behind: it loads a peer's state
            self.load(answer["state"])
            self.numbers["step"] = answer["step"]

    def errored(self):
        return self.error

    def report_error(self, error) -> None:
        self.error, self.is_new = error, True

    def should_commit(self) -> bool:
        self.asked.append("no" if self.error else "yes")
        self.numbers["step"] += not self.error
        return not self.error

    def current_step(self) -> int:
        return self.numbers["step"]

    def participating_rank(self) -> int:
        return 0

    def num_participants(self) -> int:
        return 1

    def state_dict(self) -> dict:
        return dict(self.numbers)

    def load_state_dict(self, state) -> None:
        self.numbers = dict(state)


class Trained:
    """A model, its optimizer with a scheduler, and the manager."""

    def __init__(self, name: str = "LocalSteps", **options):
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        alone = compopt.Ranks(None, 0, 1)
        if name == "LocalSteps":
            inner = torch.optim.AdamW(self.model.parameters(), 0.01)
            settings = {"every": 3, "growth_steps": 0, **options}
            self.optimizer = compopt.LocalSteps(inner, process_group=alone, **settings)
        else:
            options = {"dense_steps": 1, **options}
            self.optimizer = getattr(compopt, name)(self.model.parameters(), 0.01, process_group=alone, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.group = Group()
        self.manager = Manager(self.group)
        self.ft = FaultTolerant(
            self.manager, self.group, self.optimizer, self.model, patience=60, scheduler=self.scheduler
        )

    def train(self, until: int, before_step=lambda step: None) -> list[str]:
        """Train; return what the manager was asked meanwhile, with the steps that were taken."""
        asked = self.manager.asked
        for step in self.ft.steps(until):
            self.optimizer.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            before_step(step)
            self.optimizer.step()
            self.scheduler.step()
            asked.append(str(step))
        return asked

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def fail(trained: Trained, monkeypatch, times: int = 1) -> None:
    """Let the next collectives fail."""
    start, left = type(trained.optimizer.comm).start, [times]

    def failing(comm, request):
        if left[0]:
            left[0] -= 1
            raise compopt.CommunicationError("a rank is gone")
        return start(comm, request)

    monkeypatch.setattr(type(trained.optimizer.comm), "start", failing)


def test_a_quorum_begins_each_round_and_one_comes_before_its_exchange():
    asked = Trained().train(7)
    first, second = ["0", "1", "shrink", "yes", "2"], ["quorum", "3", "4", "shrink", "yes", "5"]
    assert asked == ["quorum", "yes", *first, *second, "quorum", "6", "shrink", "yes"], "and the last round is ended"


def test_other_classes_have_a_quorum_in_each_step():
    asked = Trained("SeparateAdam").train(3)
    assert asked == ["quorum", "yes", "yes", "0", "quorum", "yes", "1", "quorum", "yes", "2"]


@pytest.mark.parametrize("name", ["LocalSteps", "SeparateAdam"])
def test_an_exchange_that_fails_is_repeated_and_no_step_is_lost(name, monkeypatch):
    undisturbed, trained = Trained(name), Trained(name)
    undisturbed.train(6)
    asked = trained.train(6, lambda step: fail(trained, monkeypatch) if step == 5 else None)
    assert asked[-4:] == ["no", "shrink", "yes", "5"]
    assert trained.group.is_aborted
    assert trained.ft.step == 6
    assert all(map(torch.equal, trained.values(), undisturbed.values()))


def take_steps(trained: Trained, rank: int, count: int) -> None:
    for _ in range(count):
        seed = 10 * trained.ft.step + rank
        trained.optimizer.zero_grad()
        with torch.enable_grad():
            trained.model(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        trained.optimizer.step()


def test_a_rank_takes_its_step_where_a_peer_was_in_it_already(monkeypatch):
    """One rank has found its new peers, and lost them in the exchange; the other has not found them."""

    def begin() -> tuple[list[Trained], World]:
        pair, world = [Trained(), Trained()], World(2)
        world.run([partial(t.optimizer.rebind, comm) for t, comm in zip(pair, world.comms, strict=True)])
        for trained in pair:
            trained.ft._met_at = 2  # the quorum before the exchange
        world.run([partial(take_steps, t, rank, 2) for rank, t in enumerate(pair)])
        return pair, world

    undisturbed, world = begin()
    world.run([partial(take_steps, t, rank, 1) for rank, t in enumerate(undisturbed)])
    (first, second), _ = begin()
    world, first.ft._met_at, second.optimizer._engine.run_step = World(2), 0, None
    with monkeypatch.context() as patched:
        fail(second, patched)
        with pytest.raises(compopt.CommunicationError, match="step 3 was taken"):
            take_steps(second, 1, 1)

    def bind(rank: int) -> None:
        pair[rank].optimizer.rebind(world.comms[rank])
        pair[rank].optimizer.run_handshake()

    def end_round() -> None:
        bind(1)
        second.optimizer.end_round()

    pair, first.ft._bind = (first, second), partial(bind, 0)
    world.run([partial(take_steps, first, 0, 1), end_round])
    assert [t.ft.step for t in pair] == [3, 3]
    assert all(map(torch.equal, pair[0].values(), pair[1].values()))
    assert all(map(torch.equal, pair[0].values(), undisturbed[0].values()))


def test_a_rank_that_was_left_out_asks_to_come_back_and_takes_the_state_of_a_peer():
    peer, trained = Trained(), Trained()
    peer.train(9)
    state, rates = peer.manager.save(), peer.scheduler.get_last_lr()
    seen = []

    def look(step: int) -> None:
        seen.append((step, trained.scheduler.get_last_lr(), trained.optimizer.param_groups[0]["lr"]))
        if step == 5:  # the exchange follows
            trained.manager.answers = [TimeoutError("no answer"), {"state": state, "step": 4}]

    asked = trained.train(12, look)
    assert asked[asked.index("4") + 1 :][:3] == ["shrink", "quorum", "5"]
    assert seen[6][0] == 9, "the step of the peer"
    assert seen[6][1] == rates
    assert seen[6][2] == rates[0], "the loop has moved the scheduler on meanwhile"
    assert asked.count("9") == 1
    assert trained.ft.step == 12


def test_a_peer_gets_copies_with_no_residual():
    trained = Trained("SeparateAdam", rank=4)
    trained.train(4)
    state = trained.manager.save()
    assert trained.optimizer.stats.residual_norm() > 0
    before = trained.values()
    for value in state["model"].values():
        value.zero_()
    assert all(map(torch.equal, before, trained.values()))
    assert not state["optimizer"]["state"][0]["residual"].any()


def test_a_quorum_that_never_comes_ends_the_wait():
    trained = Trained()
    trained.train(2)
    trained.ft.patience = 0.0
    trained.manager.answers = [TimeoutError("no answer")]
    with pytest.raises(TimeoutError):
        trained.train(3)


def test_an_error_of_the_loop_is_raised():
    trained = Trained("SeparateAdam")
    with pytest.raises(ZeroDivisionError):
        trained.train(3, lambda step: 1 / (1 - step))


def test_a_step_before_the_first_quorum_is_refused():
    trained = Trained()
    with pytest.raises(RuntimeError, match=r"no quorum yet: call begin_step\(\)"):
        trained.optimizer.step()


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("LocalSteps", {"round_seconds": 3.0, "every": None}, "round_seconds=None"),
        ("LocalSteps", {"every": 4, "fragments": 2}, "fragments=1"),
        ("LocalSteps", {"delay": 1}, "delay=0"),
        ("TagcAdamW", {}, "cuts its state into shards"),
    ],
)
def test_what_no_rank_can_join_is_refused(name, options, told):
    with pytest.raises(ValueError, match=told):
        Trained(name, **options)


def test_a_checkpoint_continues_when_all_are_gone():
    undisturbed, first, second = Trained(), Trained(), Trained()
    undisturbed.train(9)
    first.train(6)
    second.ft.load_state_dict(first.ft.state_dict())
    second.train(9)
    assert second.ft.step == 9
    assert second.manager.current_step() == undisturbed.manager.current_step()
    assert second.scheduler.get_last_lr() == undisturbed.scheduler.get_last_lr()


def test_ranks_connect_within_seconds_and_exchange_as_long_as_the_group_lets_them():
    trained = Trained("SeparateAdam")
    trained.train(1)
    assert trained.group.waits == [5.0], "nothing is known yet"
    trained.group.failures = 2
    trained.manager.is_new = True
    trained.train(2)
    assert trained.group.waits[1:] == pytest.approx([1.2, 2.4, 4.8]), "the double after each that failed"
    trained.manager.is_new = True
    trained.train(3)
    assert trained.group.waits[4:] == pytest.approx([1.2])
    assert trained.group._timeout == trained.group.parent.timeout == timedelta(seconds=60)
    assert trained.manager._connect_timeout == timedelta(seconds=1.2), "for a peer's manager, too"


def test_groups_that_connect_later_keep_their_timeout():
    trained = Trained("SeparateAdam")
    trained.group.backend = "torchft-nccl"
    trained.train(1)
    assert trained.group.waits == [60.0]


def test_a_connect_that_was_slow_gets_more_time():
    timeout = ConnectTimeout(60.0)
    timeout._seconds.append(3.0)
    assert timeout.seconds == 15.0
    timeout._failures = 3
    assert timeout.seconds == 60.0


def test_who_is_not_in_a_quorum_asks_anew_before_the_lighthouse_gives_up_others():
    trained = Trained()
    trained.ft.join_timeout = 3.0
    trained.manager.answers = [TimeoutError("no answer"), TimeoutError("no answer")]
    trained.train(6)
    assert trained.manager.asked[:3] == ["quorum"] * 3
    assert trained.manager.timeouts[:3] == [1.0] * 3
    assert trained.manager.timeouts[3:] == [60.0, None, 60.0], "who is in the last one waits for the others"

    def leave_out(step: int) -> None:
        if step == 8:  # the exchange follows
            trained.manager.answers = [TimeoutError("no answer")]

    trained.train(9, leave_out)
    assert trained.manager.timeouts[6:] == [None, 60.0, 1.0]


def test_ranks_of_a_replica_group_ask_anew_together():
    trained = Trained()
    trained.ft._has_others = True
    trained.manager.answers = [TimeoutError("no answer")]
    asked = trained.train(1)
    assert asked[:4] == ["quorum", "no", "quorum", "yes"]


@pytest.mark.parametrize("ending", ["refused", "reset", "silent"])
def test_a_store_whose_process_is_gone_is_found_at_once(ending):
    with socket.create_server(("127.0.0.1", 0)) as server:
        handles = [json.dumps({"store": f"127.0.0.1:{server.getsockname()[1]}"})]
        if ending == "refused":
            server.close()
        elif ending == "reset":
            threading.Thread(target=lambda: server.accept()[0].close()).start()
        with contextlib.nullcontext() if ending == "silent" else pytest.raises(ConnectionError):
            check_store(handles, 30.0)


@pytest.mark.parametrize("handles", [[], ["?"], ["{}"], ['{"store": "host"}'], ['{"store": 1}']])
def test_handles_of_another_form_are_left_to_torchft(handles):
    check_store(handles, 30.0)


def test_a_timeout_adapts():
    timeout = AdaptiveTimeout(60.0, least=5.0)
    assert timeout.seconds == 60
    for seconds in (1.0, 1.2, 0.8, 1.0, 1.1):
        timeout.add(seconds)
    assert timeout.seconds == 5
    for seconds in (9.0, 11.0) * 20:
        timeout.add(seconds)
    assert 20 < timeout.seconds < 60


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE is not set: start `torchft_lighthouse"):
        make_manager(Group())
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'compopt\[torchft\]'"):
        make_manager(Group())


needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed (pip install 'compopt[torchft]')"
)


@pytest.mark.slow
@pytest.mark.long
@needs_torchft
@pytest.mark.parametrize(
    "words",
    [
        (
            "--optimizer",
            "local",
            "--kills",
            "4",
            "--places",
            "time",
            "exchange",
            "heal, the source",
            "heal, the joiner",
        ),
        ("--optimizer", "separate", "--kills", "3", "--places", "forward", "vote", "connect"),
        ("--optimizer", "local", "--kills", "2", "--places", "connect", "time", "--groups", "2", "--away", "3"),
        ("--optimizer", "local", "--kills", "1", "--places", "time", "--pace", "0.3", "--join-timeout", "1.2"),
        ("--optimizer", "radius", "--kills", "1", "--places", "time"),
        ("--optimizer", "scape", "--kills", "1", "--places", "time"),
        ("--optimizer", "local", "--kills", "1", "--places", "pause"),
        ("--optimizer", "local-muon", "--kills", "1", "--places", "time", "--groups", "2", "--ranks", "2"),
        ("--optimizer", "local", "--kills", "1", "--places", "time", "--groups", "2", "--ranks", "2", "--ddp", "1"),
    ],
    ids=" ".join,
)
def test_killed_groups_come_back_and_all_commits_are_equal(words, tmp_path):
    command = [sys.executable, HERE.parents[1] / "support" / "quorum_runs.py", tmp_path, *words]
    child = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"
