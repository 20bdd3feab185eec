"""The benchmark's shaped links: the rate holds, bytes are counted, and nothing is left behind however a run ends."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import HANG_GUARD

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
