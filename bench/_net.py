"""Slow links on one machine: a network namespace per rank, a bridge between them, token buckets on both ends.

    with Links(ranks=2, rate="100mbit") as links:
        outputs = links.run([sys.executable, "worker.py"])

Every namespace is called compopt-PID-..., the bridge too lives in one, so nothing in the machine's own network changes
and two runs never meet. Deleting the namespaces deletes all of it. That happens on exit, after an exception and on
SIGINT, SIGTERM and SIGHUP; what a SIGKILL leaves behind goes with

    python bench/_net.py --clean

Without root, `ip`, `tc` or a kernel that lets us, the ranks are plain processes on loopback: nothing is shaped and
bytes are not counted. With `round_trip` a process holds every frame (`_delay.py`) in place of the bridge.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

PREFIX = "compopt"
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def bits_per_second(rate: str) -> float:
    """`rate` as tc writes it ("100mbit", "2.5gbit"), in bit/s. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate must read like '100mbit', '1gbit' or '2.5gbit', and be above zero; got {rate!r}.")
    return float(match[1]) * UNITS[match[2]]


def sent_bytes() -> int | None:
    """Bytes this rank's interface has transmitted so far, headers included; None where the sockets are not private."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface == "lo":
        return None
    with open("/proc/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])  # 8 receive columns come first, then bytes transmitted
    raise RuntimeError(f"Interface {interface!r} of GLOO_SOCKET_IFNAME is not in this network namespace.")


def _call(*words: str) -> str:
    """Run one system command and return what it printed; RuntimeError says which command failed and how."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]


def _remove(namespace: str) -> None:
    """Kill what still runs in the namespace, then delete it: a namespace outlives its name while a process is in it."""
    for pid in _call("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself since the listing
            os.kill(int(pid), signal.SIGKILL)
    _call("ip", "netns", "del", namespace)


def clean() -> list[str]:
    """Remove the namespaces of runs that are over (their process is gone) and return the names."""
    dead = [name for name in _namespaces() if not os.path.exists(f"/proc/{name.split('-')[1]}")]
    for name in dead:
        _remove(name)
    return dead


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Links:
    """A private network of `ranks` hosts, as a context manager.

    Args:
        ranks: number of hosts, one process each (1 to 250).
        rate: what each host may send, and receive, as tc writes it ("100mbit"); None leaves the links unshaped.
        burst: bytes that may leave ahead of the rate after a pause; None is 72 KiB, or 1 ms at rates where that is
            more. Messages of that size and below cross as if there were no limit, so where they matter it must be less
            (32 KiB holds 100 Mbit/s within 10 %).
        round_trip: seconds that a message and its answer take beside their bytes; None: a bridge, without delay.

    Attributes:
        private: True inside the `with` block when the namespaces exist; False when the ranks share the loopback
            interface, in which case nothing is shaped and `sent_bytes` returns None.

    Raises:
        ValueError: `ranks`, `rate` or `round_trip` is not usable.
    """

    def __init__(
        self, ranks: int, rate: str | None = None, burst: int | None = None, round_trip: float | None = None
    ) -> None:
        if not 1 <= ranks <= 250:
            raise ValueError(f"ranks must be between 1 and 250 (one subnet); got {ranks}.")
        if rate is not None:
            bits_per_second(rate)
        self.ranks, self.rate, self.burst, self.private = ranks, rate, burst, False
        self._name = f"{PREFIX}-{os.getpid()}"
        self._subnet = f"10.77.{os.getpid() % 256}"
        self._signals: dict[int, object] = {}
        if round_trip is not None and not 0 <= round_trip < 10:
            raise ValueError(f"round_trip must be seconds from 0 to 10; got {round_trip}.")
        self._delay: subprocess.Popen[bytes] | None = None
        self.round_trip, self._switch = round_trip, f"{self._name}-switch"

    def __enter__(self) -> Links:
        self._catch_signals()
        atexit.register(self._tear_down)
        try:
            self._build()
            self.private = True
        except RuntimeError as error:
            self.__exit__(None, None, None)
            print(f"Links are neither shaped nor counted, ranks talk over loopback: {error}", file=sys.stderr)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._tear_down()
        finally:
            atexit.unregister(self._tear_down)
            for number, handler in self._signals.items():
                signal.signal(number, handler)
            self._signals.clear()

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 600.0) -> list[str]:
        """Run `argv` once per rank, each in its namespace, and return what each rank wrote to stdout.

        The ranks find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
        OMP_NUM_THREADS=1 in their environment, and what `env` adds or overrides.

        Raises:
            RuntimeError: a rank failed, or `timeout` (seconds) passed; the others are killed first.
        """
        port = str(29500 if self.private else _free_port())
        ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            files = [
                (stack.enter_context(tempfile.TemporaryFile()), stack.enter_context(tempfile.TemporaryFile()))
                for _ in range(self.ranks)
            ]
            try:
                for rank, (out, err) in enumerate(files):
                    ranks.append(self._start(rank, argv, port, env or {}, out, err))
                self._wait(ranks, files, timeout)
                return [_text(out) for out, _ in files]
            finally:
                for process in ranks:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()

    def _start(
        self, rank: int, argv: Sequence[str], port: str, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        local = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": f"{self._subnet}.1" if self.private else "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": f"e{rank}" if self.private else "lo",
            "OMP_NUM_THREADS": "1",
        }
        inside = ["ip", "netns", "exec", f"{self._name}-r{rank}"] if self.private else []
        return subprocess.Popen(
            [*inside, *argv],
            env={**os.environ, **local, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that killing a rank kills what it started
        )

    def _wait(self, ranks: list[subprocess.Popen[bytes]], files: list[tuple], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in ranks) or any(process.returncode for process in ranks):
            for rank, process in enumerate(ranks):
                if process.poll():
                    message = (_text(files[rank][1]) or _text(files[rank][0])).strip()[-2000:]
                    raise RuntimeError(f"Rank {rank} ended with exit code {process.returncode}. It said: {message}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"The ranks were still running after {timeout:g} s and were stopped.")
            time.sleep(0.02)

    def _build(self) -> None:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise RuntimeError(f"the command `{tool}` (package iproute2) is missing.")
        if os.geteuid() != 0:
            raise RuntimeError("network namespaces need root.")
        switch = self._switch
        _call("ip", "netns", "add", switch)
        if self.round_trip is None:
            _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _call("ip", "-n", switch, "link", "set", "br0", "up")
        for rank in range(self.ranks):
            host, inner, outer = f"{self._name}-r{rank}", f"e{rank}", f"v{rank}"
            _call("ip", "netns", "add", host)
            _call("ip", "-n", switch, "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host)
            bridge = ["master", "br0"] if self.round_trip is None else []
            _call("ip", "-n", switch, "link", "set", outer, *bridge, "up")
            _call("ip", "-n", host, "addr", "add", f"{self._subnet}.{rank + 1}/24", "dev", inner)
            _call("ip", "-n", host, "link", "set", inner, "up")
            _call("ip", "-n", host, "link", "set", "lo", "up")
            self._shape(host, inner)  # what this rank sends
            self._shape(switch, outer)  # what it receives
        if self.round_trip is not None:
            self._start_delay(self.round_trip / 2)

    def _start_delay(self, seconds: float) -> None:
        """Start the process that passes frames on; `_tear_down` ends it."""
        words = ["ip", "netns", "exec", self._switch, sys.executable, str(Path(__file__).parent / "_delay.py")]
        words += ["--seconds", str(seconds), *(f"v{rank}" for rank in range(self.ranks))]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"a process that delays frames cannot be started: `{' '.join(words)}` failed.")
        self._delay = process

    def _shape(self, namespace: str, interface: str) -> None:
        if self.rate is None:
            return
        # One that does not hold 64 KiB and a header splits the kernel's segments; one of 1 ms keeps up with fast rates.
        burst = self.burst or max(72 * 1024, int(bits_per_second(self.rate) / 8 * 1e-3))
        limits = ("rate", self.rate, "burst", f"{burst}b", "latency", "200ms")
        _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limits)

    def _tear_down(self) -> None:
        self.private = False
        if self._delay is not None:
            self._delay.kill()
            self._delay.communicate()
            self._delay = None
        if shutil.which("ip") is None or os.geteuid() != 0:
            return
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                _remove(name)

    def _catch_signals(self) -> None:
        """Turn the signals that end a process silently into exceptions; SIGINT is one already, unless ignored."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; atexit still cleans up
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._signals[number] = signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description="Remove network namespaces that killed benchmark runs left behind.")
    parser.add_argument("--clean", action="store_true", required=True, help="remove them (root)")
    parser.parse_args()
    removed = clean()
    print(f"Removed {', '.join(removed)}." if removed else "Nothing was left behind.")


if __name__ == "__main__":
    main()
