"""Deliberate faults: each is put into a copy of the package, and the tests that should see it must fail.

    python tests/mutants.py                          # all of them, 25 minutes on two cores
    python tests/mutants.py --area radius --only 12  # one of tests/mutants/radius.txt, counted from 1

How an area's list is written, patches.py says. Of one process, which has imported torch, a child is
forked for every patch, that imports the package from the copy. A fault is seen when a test fails, the
child dies, waits for ever, or computes without end: the speed of the machine decides nothing. Tests run
once without any, at first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from patches import LISTS, ROOT, Mutant, read

BASELINE = 10  # times as long may the tests take without a fault, all of an area together
IDLE = 180.0  # seconds without work after which a child is taken to wait for ever; tests/support/ranks.py ends sooner
WAITING = 0.1  # of a processor that each of its processes uses, or waits for, at most while it waits for others

# What finds the two packages in the copy, also in processes that tests start: on their path as sitecustomize.py.
FINDER = """
import importlib.util, os, sys

class Copy:
    folders = {"compopt": "compopt", "compopt_kernels": "kernels"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.folders:
            folder = os.path.join(os.environ["COMPOPT_COPY"], cls.folders[name])
            init = os.path.join(folder, "__init__.py")
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[folder])

sys.meta_path.insert(0, Copy)
"""
COMPILED = ("kernels/native", "compopt/_backends/native")


def copy_of(folder: Path, mutant: Mutant | None) -> str | None:
    """A copy of both packages in ``folder``, with the fault; returns what is wrong with the patch."""
    for name in ("compopt", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is None:
        return None
    if misfit := mutant.find_misfit():
        return misfit
    path = folder / mutant.file
    path.write_text(mutant.patched(path.read_text()))
    return None


def child(folder: Path, tests: list[str], is_c: bool) -> int:
    """Run tests on the copy, whose C passes are compiled first where they have the fault; never returns."""
    os.setsid()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    (folder / "sitecustomize.py").write_text(FINDER)
    os.environ["COMPOPT_COPY"] = str(folder)
    os.environ["PYTHONPATH"] = str(folder)
    if is_c:
        build = subprocess.run([sys.executable, folder / "kernels/native/build_passes.py"], stderr=subprocess.PIPE)
        if build.returncode:
            print("ERROR: no C,", build.stderr.decode().replace("\n", " "), flush=True)
            os._exit(2)
    exec(FINDER, {})
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    import pytest

    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    code = 3
    try:
        code = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


@dataclass
class Job:
    """A child at work."""

    mutant: Mutant | None
    name: str
    folder: Path
    pid: int
    began: float
    limit: float
    work: float = 0.0
    last_work: float = 0.0
    late: str = ""

    def find_late(self) -> str:
        """Why it will not end, if so: it computes without end, or waits."""
        now, (used, delayed, processes) = time.monotonic(), processor_time(self.pid)
        work = used + delayed
        idle = 0.1 + min(WAITING * processes, 0.5) * (now - self.last_work)
        if not used or not -0.1 < work - self.work < idle:  # not told on this system, or of fewer processes, or more
            self.work, self.last_work = work, now
        if used > self.limit:
            return f"it computed for {used:.0f} s"
        return f"it waited for {IDLE:.0f} s" if now > self.last_work + IDLE else ""

    def outcome(self, status: int) -> str:
        """Return the outcome, in a word or a sentence."""
        seconds, code = time.monotonic() - self.began, os.waitstatus_to_exitcode(status)
        output = (self.folder / "output").read_text(errors="replace")
        if self.mutant is None:
            return "" if code == 0 else f"fail without a fault ({code}): {complaints(output)}"
        if self.late or code < 0:
            return f"killed in {seconds:.0f} s: " + (self.late or f"signal {-code}")
        if code == 1:
            records = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
            return f"killed in {seconds:.0f} s by {records[0] if records else 'a test'}"
        return "SURVIVED" if code == 0 else f"no verdict (pytest's {code}): {complaints(output)}"


def processor_time(engine: int) -> tuple[float, float, int]:
    """The processor time of a child and all that it has started, for how long their main threads have waited for a
    processor, which one that computes beside much other work does all the time, and how many processes they are.
    """
    ticks = delay = processes = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == engine:
                ticks, processes = ticks + sum(map(int, fields[11:15])), processes + 1
                delay += int((stat.parent / "schedstat").read_text().split()[1])
    return ticks / os.sysconf("SC_CLK_TCK"), delay / 1e9, processes


def complaints(output: str) -> str:
    """Return what pytest says is wrong."""
    return " ".join(re.findall(r"^(?:ERROR|FAILED|E  ).*", output, re.M))[-600:]


def run(
    jobs: Iterator[tuple[Mutant | None, str, list[str]]],
    at_once: int,
    limit: float,
    on_result: Callable[[Job, str], None],
) -> None:
    """A child for each, so many ``at_once``, for so many seconds of a processor each."""
    running: dict[int, Job] = {}
    looked = time.monotonic()
    try:
        while True:
            while len(running) < at_once and (job := next(jobs, None)):
                mutant, name, tests = job
                folder = Path(tempfile.mkdtemp(prefix="compopt-mutant-"))
                wrong = copy_of(folder, mutant)
                if wrong:
                    on_result(Job(mutant, name, folder, 0, 0.0, 0.0), wrong)
                    shutil.rmtree(folder)
                    continue
                is_c = mutant is not None and mutant.file.endswith((".c", ".h"))
                pid = os.fork() or child(folder, tests, is_c)
                now = time.monotonic()
                running[pid] = Job(mutant, name, folder, pid, now, limit, last_work=now)
            if not running:
                return
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                done = running.pop(pid)
                on_result(done, done.outcome(status))
                end(done)
            if time.monotonic() > looked + 1:
                looked = time.monotonic()
                for job in running.values():
                    job.late = job.late or job.find_late()
                    if job.late:
                        os.killpg(job.pid, signal.SIGKILL)
            time.sleep(0.02)
    finally:
        for job in running.values():
            end(job)


def end(job: Job) -> None:
    """Processes that it has started end with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    shutil.rmtree(job.folder, ignore_errors=True)


def import_all() -> None:
    """Import what children would import for seconds each. None of it is ours."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    wanted = ("numpy", "hypothesis", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")
    for name in (*wanted, "torch.testing._internal.common_optimizers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


def find_uncollected(mutants: list[Mutant]) -> list[str]:
    """Return a sentence for every test that the lists name by a row which it has not."""
    rows = sorted({f"tests/{test}" for mutant in mutants for test in mutant.tests if "[" in test})
    words = [Path(sys.executable).with_name("pytest"), "--collect-only", "-q", "-p", "no:cacheprovider", *rows]
    collected = subprocess.run(words, cwd=ROOT, capture_output=True, text=True) if rows else None
    missing = re.findall(r"not found: .*?/(tests/\S.*)$", collected.stderr + collected.stdout, re.M) if rows else []
    return [f"stale, there is no row {row}" for row in dict.fromkeys(missing)]


class Report:
    """The outcomes of all mutants, by area."""

    def __init__(self, areas: list[str], every: bool):
        self.totals, self.every = {area: Counter() for area in areas}, every
        self.trouble: list[str] = []

    def on_result(self, job: Job, outcome: str) -> None:
        killed = outcome.startswith("killed")
        if job.mutant:
            self.totals[job.mutant.area]["seen" if killed else "left"] += 1
        if outcome and not killed:
            self.trouble.append(f"{job.name}: {outcome}")
        if self.every or (outcome and not killed):
            print(f"{job.name}: {outcome or 'passes'}", flush=True)

    def finish(self, seconds: float) -> None:
        for area, total in self.totals.items():
            same = f", {total['same']} change nothing" if total["same"] else ""
            print(f"{area:14} {total['seen']} of {total['seen'] + total['left']} seen{same}")
        total = sum(self.totals.values(), Counter())
        print(f"{total.total()} mutants, {total['left']} survive, {total['same']} change nothing; {seconds:.0f} s")
        print(*self.trouble, sep="\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    areas = sorted(path.stem for path in LISTS.glob("*.txt"))
    parser.add_argument("--area", nargs="*", choices=areas, default=areas)
    parser.add_argument("--only", nargs="*", type=int, help="numbers within the area")
    parser.add_argument("-j", type=int, default=2, help="children at once")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a processor that a mutant may take")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--check", action="store_true", help="run nothing: only look whether every patch fits its file")
    parser.add_argument("-v", action="store_true", help="say what sees each")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    mutants = [m for area in args.area for m in read(LISTS / f"{area}.txt") if not args.only or m.number in args.only]
    stale = [f"{m}: {misfit}" for m in mutants if (misfit := m.find_misfit())]
    stale += [f"{m}: stale, there is no test {test}" for m in mutants for test in m.unknown_tests()]
    stale += find_uncollected(mutants)
    print(*stale, f"{len(mutants)} patches, {len(stale)} do not fit", sep="\n", flush=True)
    if args.check or stale:
        return bool(stale)
    import_all()
    began, report = time.monotonic(), Report(args.area, args.v)
    tried = [m for m in mutants if not m.equivalent]
    for mutant in mutants:
        report.totals[mutant.area]["same"] += bool(mutant.equivalent)
    if not args.trust:
        named = {area: list(dict.fromkeys(t for m in tried if m.area == area for t in m.tests)) for area in args.area}
        tests = ((None, f"tests of {area}", names) for area, names in named.items() if names)
        run(tests, args.j, BASELINE * args.limit, report.on_result)
        if report.trouble:
            return 2
        print(f"{len(set().union(*named.values()))} tests pass, {time.monotonic() - began:.0f} s", flush=True)
    run(((m, str(m), m.tests) for m in tried), args.j, args.limit, report.on_result)
    report.finish(time.monotonic() - began)
    return bool(report.trouble)


if __name__ == "__main__":
    sys.exit(main())
