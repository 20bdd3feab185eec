"""Torchrun agents on this machine that come and go: events during a run of examples/elastic.py, and what they cost.

    python tests/elastic_run.py        # about six minutes on two cores; as `make elastic`

Starts two agents, kills a worker, then an agent with its worker, adds one, then two, and compares the losses with
those of a run that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=15,is_host=0,join_timeout=600"
SMALL = ["--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--batch", "4", "--lr", "1e-2"]

# Else torch 2.13 goes on with the store of the first rendezvous: its keys are stale, and new nodes never learn of it.
PRIVATE_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Fleet:
    """Agents, each with a worker and a folder of snapshots, which meet at a store that outlives all of them."""

    def __init__(self, folder: Path, arguments: list[str]):
        self.folder, self.arguments = folder, arguments
        self.open_store()
        self.agents: dict[int, subprocess.Popen] = {}
        self.log = folder / "log.jsonl"

    def open_store(self) -> None:
        """Agents that start later meet at a new store: they cannot at one where others have finished."""
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def add(self, node: int) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"]
        launcher += [
            "--max-restarts",
            "100",
            "--monitor-interval",
            "0.1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "elastic",
        ]
        launcher += ["--rdzv-endpoint", f"127.0.0.1:{self.store.port}", "--rdzv-conf", RENDEZVOUS]
        launcher += ["--local-addr", "127.0.0.1", str(ROOT / "examples" / "elastic.py"), *self.arguments]
        launcher += ["--losses", str(self.log), "--snapshots", str(self.folder / f"node {node}"), "--timeout", "60"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **PRIVATE_STORES}
        with open(self.folder / f"node {node}.txt", "ab") as output:
            self.agents[node] = subprocess.Popen(
                launcher, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def worker_of(self, node: int) -> int:
        """The process that trains on a node."""
        agent = self.agents[node].pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return next(int(pid) for pid in children if b"elastic.py" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def kill_worker(self, node: int) -> None:
        os.kill(self.worker_of(node), signal.SIGKILL)

    def kill_agent(self, node: int) -> None:
        """Only the agent: its worker finds itself alone."""
        self.agents.pop(node).kill()

    def lines(self) -> list[dict]:
        text = self.log.read_text() if self.log.exists() else ""
        results = []
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last may be cut
                results.append(json.loads(line))
        return results

    def wait_until(self, is_reached: Callable[[list[dict]], bool], seconds: float) -> list[dict]:
        end = time.monotonic() + seconds
        while not is_reached(lines := self.lines()):
            if time.monotonic() > end or all(agent.poll() is not None for agent in self.agents.values()):
                raise AssertionError(f"not reached in {seconds} s: {self.describe()}")
            time.sleep(0.05)
        return lines

    def finish(self, seconds: float) -> list[int]:
        """The exit codes of the agents that are left."""
        end = time.monotonic() + seconds
        return [agent.wait(max(1.0, end - time.monotonic())) for agent in self.agents.values()]

    def describe(self) -> str:
        post_commit = [path.read_text()[-2000:] for path in sorted(self.folder.glob("node *.txt"))]
        return f"{self.lines()[-1:]}\n" + "\n".join(post_commit)

    def end(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)


def lost_steps(lines: list[dict]) -> list[tuple[int, int]]:
    """At every restart the number of steps that were taken again, and the number of ranks from there on."""
    return [
        (a["step"] + 1 - b["step"], b["ranks"])
        for a, b in itertools.pairwise(lines)
        if b["step"] <= a["step"] or b["ranks"] != a["ranks"]
    ]


def last_losses(lines: list[dict], steps: int, count: int) -> float:
    """The mean loss of the last ``count`` steps of a run."""
    by_step = {line["step"]: line["loss"] for line in lines}
    return sum(by_step[step] for step in range(steps - count + 1, steps + 1)) / count


def main(steps: int = 800, every: int = 10, patience: float = 900) -> None:
    arguments = [*SMALL, "--steps", str(steps), "--every", str(every), "--growth", "1"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        quiet = Fleet(Path(folder), arguments)
        try:
            quiet.add(0), quiet.add(1)
            assert quiet.finish(patience) == [0, 0], quiet.describe()
            expected = last_losses(quiet.lines(), steps, 100)
        finally:
            quiet.end()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        fleet = Fleet(Path(folder), arguments)
        try:
            fleet.add(0), fleet.add(1)

            def further(ranks: int, by: int) -> None:
                """Train on until ``ranks`` ranks have taken so many steps."""
                at = len(fleet.lines())
                fleet.wait_until(lambda lines: sum(line["ranks"] == ranks for line in lines[at:]) >= by, patience)

            events = [
                ("a worker is killed", lambda: fleet.kill_worker(1), 2),
                ("an agent is killed", lambda: fleet.kill_agent(1), 1),
                ("a node joins", lambda: fleet.add(2), 2),
                ("two nodes join", lambda: (fleet.add(3), fleet.add(4)), 4),
            ]
            further(2, 100)
            for name, happen, ranks in events:
                at, began = len(fleet.lines()), time.monotonic()
                happen()
                further(ranks, 60)
                lost = lost_steps(fleet.lines()[at - 1 :])
                seconds = time.monotonic() - began
                print(f"{name}: (steps lost, ranks then) {lost}, {seconds:.0f} s until 60 more steps", flush=True)
            print("exit codes:", fleet.finish(patience))
            print(
                f"loss of the last 100 steps: {last_losses(fleet.lines(), steps, 100):.3f}, undisturbed {expected:.3f}"
            )
        finally:
            fleet.end()


if __name__ == "__main__":
    main()
