"""Counts of the benchmarks, tables that are kept, the prepared run on a GPU, small, on the CPU; shaped links."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import HANG_GUARD
from sim import World
from torch import nn

import compopt

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu
from _fake_ranks import fake_ranks
from _ladder_seconds import seconds_to
from _table import print_rows, read_rows, show_kept, write_rows
from memory import Allocations, bytes_in


def test_allocations_are_seen_while_held_and_at_their_most():
    before = torch.zeros(1000)
    with Allocations() as results:
        held = torch.empty(500)
        with results.mark("first"):
            torch.empty(3000).add_(before.sum())
        with results.mark("second"):
            more = torch.empty(250)
    assert results.before == {"first": 2000, "second": 2000}
    assert 2000 + 12000 <= results.most["first"] < 2000 + 12000 + 100  # and a sum
    assert results.held == 3000 == bytes_in([held, held.view(5, 100), more])


def a_model() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 60))
    return [(name, nn.Parameter(p.detach().clone())) for name, p in model.named_parameters()]


CASES = {
    "Radius": ("RadiusAdamW", dict(density=0.4, interval=100, dense_steps=1)),
    "Radius, int8": ("RadiusAdamW", dict(density=0.4, interval=100, dense_steps=1, payload_dtype=torch.int8)),
    "SCAPE": ("ScapeAdamS", dict(density=0.1, density_steps=0)),
    "SCAPE, sharded": ("ScapeAdamS", dict(density=0.1, density_steps=0, sharded=True)),
    "SEPARATE": ("SeparateAdam", dict(projection="gaussian", ratio=8)),
}


def gradients(params: list[tuple[str, nn.Parameter]], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    for _, p in params:
        p.grad = torch.randn(p.shape, generator=generator) * (1 if step else 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_of_two_hands_over_what_two_simulated_ranks_do(name):
    cls, options = CASES[name]
    world, ranks = World(2), [a_model(), a_model()]
    simulated = [
        getattr(compopt, cls)(params, process_group=comm, **options)
        for params, comm in zip(ranks, world.comms, strict=True)
    ]
    with fake_ranks(2) as comm:
        single = a_model()
        optimizer = getattr(compopt, cls)(single, process_group=comm, **options)
        comm.follow(optimizer)
        for step in range(4):
            for rank, params in enumerate(ranks):
                gradients(params, rank, step)
            gradients(single, 0, step)
            comm.reset()
            world.step(simulated)
            optimizer.step()
            assert optimizer.stats.bytes_sent == simulated[0].stats.bytes_sent
        assert optimizer.stats.phase == simulated[0].stats.phase != "dense"
    if "int8" in name:  # of the first stage half goes to oneself, the header to each; then the own half to the other
        words = 4 * (len(single) + len(optimizer._buckets[-1].control.numbers))
        assert comm.received["header"] == pytest.approx(words) and comm.handed["header"] == pytest.approx(2 * words)
        row = 128 + 4  # values that share a scale: halves are cut between two of them
        assert abs(comm.received.total() - optimizer.stats.bytes_sent) < row + 16
        return
    assert comm.handed.total() == pytest.approx(optimizer.stats.bytes_sent)
    local = 0.5 if "sharded" in name else 0  # half of what is reduced to owners stays here
    for kind in ("payload", "header", "masks", "gathered"):
        stays = local * comm.handed[kind] if kind in ("payload", "header") else 0
        assert comm.received[kind] == pytest.approx(comm.handed[kind] - stays, rel=0.02)


def test_what_grows_with_ranks():
    """An all-reduce's bytes at a rank tend to twice the message, a gather's to all messages, headers to one a rank."""
    received = {}
    for ranks in (2, 32):
        for name in ("SCAPE", "SCAPE, sharded"):
            cls, options = CASES[name]
            with fake_ranks(ranks) as comm:
                params = a_model()
                optimizer = getattr(compopt, cls)(params, process_group=comm, **options)
                comm.follow(optimizer)
                for step in range(4):
                    gradients(params, 0, step)
                    comm.reset()
                    optimizer.step()
            received[name, ranks] = comm
    few, many = received["SCAPE", 2], received["SCAPE", 32]
    assert many.sent["payload"] == pytest.approx(2 * 31 / 32 * many.handed["payload"])
    assert many.received["masks"] == 31 * many.handed["masks"] and many.handed["masks"] < few.handed["masks"] / 8
    assert many.handed["header"] == few.handed["header"]
    few, many = received["SCAPE, sharded", 2], received["SCAPE, sharded", 32]
    assert many.handed["header"] == 16 * few.handed["header"]


def test_rows_of_other_names_stay_in_a_file(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    write_rows(path, [{"name": "a", "x": 1.2345}, {"name": "b", "x": None}], digits={"x": 2})
    write_rows(path, [{"name": "b", "x": 3.0}, {"name": "c", "x": 4.0}], keep=["name"])
    assert read_rows(path) == [{"name": "a", "x": "1.23"}, {"name": "b", "x": "3.0"}, {"name": "c", "x": "4.0"}]
    assert read_rows(tmp_path / "none.csv") == []
    print_rows([{"name": "a", "x": 1.25}, {"name": "b", "x": ""}], {"x": ("bytes", "8.1%")}, "name", 10)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "bytes"],
        ["a", "125.0%"],
        ["b", "-"],
    ]


def test_a_kept_table_is_shown_as_it_is(capsys):
    show_kept("quality", "run", "steps", "loss")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "steps", "loss"] and lines[1].split() == ["AdamW", "(DDP)", "200", "2.3308"]
    assert len(lines) == 144


def test_a_loss_is_reached_between_two_evaluations():
    evals = [{"seconds": s, "val_loss": v} for s, v in ((10, 2.0), (20, 1.5), (30, 1.6), (40, 1.2))]
    assert seconds_to(1.6, evals) == pytest.approx(18)
    assert seconds_to(1.4, evals) == pytest.approx(35)
    assert seconds_to(2.5, evals) == 10
    assert seconds_to(1.1, evals) is None


def test_all_parts_fit_in_nine_minutes():
    assert sum(part.limit for part in gpu.parts(is_dry=False).values()) <= 9 * 60


def test_a_part_that_hangs_is_stopped_and_one_that_fails_is_told(tmp_path):
    hangs = gpu.Part([sys.executable, "-c", "import time; print('{\"row\": 1}', flush=True); time.sleep(999)"], 1.0)
    result = gpu.run(hangs, tmp_path / "out.txt", tmp_path)
    assert result["ended"] == "stopped after 1 s" and result["code"] < 0 and result["rows"] == [{"row": 1}]
    fails = gpu.Part([sys.executable, "-c", 'print(\'{"row": "a", "failed": "why"}\'); 1 / 0'], 60)
    result = gpu.run(fails, tmp_path / "out.txt", tmp_path)
    assert result["failed"] == ["a"] and result["code"] == 1


@pytest.mark.slow
def test_the_whole_run_on_a_cpu(tmp_path):
    command = ["bash", str(gpu.BENCH / "gpu.sh"), str(tmp_path), "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parts"].keys() == gpu.parts(is_dry=True).keys() and summary["machine"]["commit"]
    rows = {name: len(part["rows"]) for name, part in summary["parts"].items()}
    assert rows["correct"] == rows["ranks"] >= 17 and rows["kernels"] == 18 and rows["steps-tiny"] == 12
    assert rows["fsdp"] == 4 and rows["train"] == 7 and rows["tests"] == 1


NET = Path(__file__).parents[2] / "bench" / "_net.py"
spec = importlib.util.spec_from_file_location("bench_net", NET)
_net = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_net)

PAYLOAD = 2_000_000
TALK = f"""
import os, socket, sys, time
sys.path.insert(0, {str(NET.parent)!r})
from _net import sent_bytes
address, before = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), sent_bytes()
if os.environ["RANK"] == "0":
    peer, left, start = socket.create_server(address).accept()[0], {PAYLOAD}, time.perf_counter()
    while left > 0:
        left -= len(peer.recv(1 << 20))
    print(time.perf_counter() - start)
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(bytes({PAYLOAD}))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print(-1 if before is None else sent_bytes() - before)
"""


@pytest.fixture
def namespaces():
    """Skip where namespaces cannot be made; otherwise give a function that lists those of this naming scheme."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc")
    with _net.Links(1) as links:
        if not links.private:
            pytest.skip("this kernel or container does not allow network namespaces with a bridge and veth")
    return lambda pid: [name for name in _net._namespaces() if name.startswith(f"{_net.PREFIX}-{pid}-")]


def test_rate_holds_and_bytes_are_counted(namespaces):
    with _net.Links(2, "20mbit") as links:
        assert len(namespaces(os.getpid())) == 3  # two ranks and the switch
        seconds, sent = (float(text) for text in links.run([sys.executable, "-c", TALK], timeout=HANG_GUARD))
    ideal = PAYLOAD * 8 / 20e6
    # The bucket's 72 KiB go ahead of the rate. It takes longer where ranks wait for a processor.
    assert seconds > 0.8 * ideal
    assert PAYLOAD <= sent < 1.02 * PAYLOAD
    assert namespaces(os.getpid()) == []


PING = """
import os, socket, time
address, seconds = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), []
if os.environ["RANK"] == "0":
    peer = socket.create_server(address).accept()[0]
while os.environ["RANK"] == "1":
    try:
        peer = socket.create_connection(address)
        break
    except OSError:
        time.sleep(0.05)
for _ in range(5):
    start = time.perf_counter()
    if os.environ["RANK"] == "1":
        peer.sendall(b"x")
    peer.sendall(peer.recv(1)) if os.environ["RANK"] == "0" else peer.recv(1)
    seconds.append(time.perf_counter() - start)
print(min(seconds))
"""


@pytest.mark.slow
def test_a_round_trip_takes_no_less_than_it_should(namespaces):
    with _net.Links(2, "100mbit", round_trip=0.2) as links:
        _, seconds = (float(text) for text in links.run([sys.executable, "-c", PING], timeout=HANG_GUARD))
        relay = links._delay
    assert seconds > 0.2  # and longer where processes wait for a processor
    assert relay.poll() is not None and namespaces(os.getpid()) == []


@pytest.mark.parametrize("seconds", [-0.1, 10, float("nan")])
def test_a_round_trip_out_of_range_is_refused(seconds):
    with pytest.raises(ValueError, match="round_trip"):
        _net.Links(2, "100mbit", round_trip=seconds)


def test_a_failing_rank_ends_the_others(namespaces):
    script = "import os, sys, time; sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(1e6)"
    with pytest.raises(RuntimeError, match=r"(?s)Rank 1 .*exit code 1.*no luck"), _net.Links(2) as links:
        links.run([sys.executable, "-c", script], timeout=HANG_GUARD)
    assert namespaces(os.getpid()) == []


def state(pid: str) -> str:
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid: str) -> bool:
    try:
        return state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_run() -> subprocess.Popen:
    """A run whose ranks sleep, in namespaces that are in use."""
    script = f"import sys; sys.path.insert(0, {str(NET.parent)!r}); from _net import Links\n"
    script += "with Links(2, '1gbit') as links:\n    print(flush=True)\n    links.run(['sleep', '3600'])"
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    run.stdout.readline()
    while not all(_net._call("ip", "netns", "pids", f"compopt-{run.pid}-r{rank}").split() for rank in range(2)):
        time.sleep(0.01)
    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(namespaces, number):
    run = start_run()
    assert namespaces(run.pid) != []
    run.send_signal(number)
    run.communicate(timeout=HANG_GUARD)
    assert namespaces(run.pid) == []


def test_clean_removes_what_a_kill_left_and_nothing_else(namespaces):
    with _net.Links(1):
        run = start_run()
        run.kill()
        run.communicate(timeout=HANG_GUARD)
        assert len(namespaces(run.pid)) == 3
        orphans = _net._call("ip", "netns", "pids", f"compopt-{run.pid}-r0").split()
        assert orphans != []
        message = subprocess.run(
            [sys.executable, str(NET), "--clean"], capture_output=True, text=True, timeout=HANG_GUARD
        ).stdout
        assert f"compopt-{run.pid}-switch" in message
        deadline = time.monotonic() + HANG_GUARD
        while any(map(is_alive, orphans)):  # a signal takes its time on a machine with other work
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert namespaces(run.pid) == []
        assert len(namespaces(os.getpid())) == 2


def test_without_namespaces_ranks_talk_over_loopback(monkeypatch, capsys):
    monkeypatch.setattr(_net.shutil, "which", lambda tool: None)
    with _net.Links(2, "100mbit") as links:
        assert not links.private
        _, sent = links.run([sys.executable, "-c", TALK], timeout=HANG_GUARD)
    assert int(sent) == -1
    assert "neither shaped nor counted" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["fast", "0mbit", "100", "100mbps"])
def test_a_rate_that_tc_would_not_take_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        _net.Links(2, rate)
