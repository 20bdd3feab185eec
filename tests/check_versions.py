"""Try the package on the oldest and the newest release of torch: a part of the tests, and README's first hour.

    python tests/check_versions.py                       # both, side by side; environments in runs/versions, 10 GB
    python tests/check_versions.py 2.9.0 --folder /tmp/v # another release; with Python 3.13: PYTHON=python3.13

An environment is made once: four minutes, most of them for CUDA packages, which torch of a registry brings along. The
lines at the end say what ran. A release that cannot be installed is an error, or with ``--may-skip`` a line.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 900.0  # seconds that one command may take
TOOLS = ["numpy", "pytest", "hypothesis", "expecttest", "greenlet", "setuptools>=77"]

# What is run on each release, and what it stands for.
TESTS = {
    "conformance of all classes": ["tests/conformance/test_conformance.py"],
    "faults: bad gradients, options and states of all classes": ["tests/conformance/test_conformance_faults.py"],
    "faults: killed ranks, ranks that do not come": [
        "tests/faults/test_lost_ranks.py::test_a_killed_rank",
        "tests/faults/test_missing_ranks.py",
    ],
    "LocalSteps on real ranks, that go and come": ["tests/local/test_local_ranks.py"],
    "DDP inside a site, HSDP": ["tests/integrations/test_ddp_sites.py"],
}
TESTS_OF_NEWEST = {"inside FSDP2": ["tests/integrations/test_fsdp_inside.py"]}

# The optimizers that take the place of the one in docs/launch.md's script; two of them around MuonAdamW.
MUON = "compopt.MuonAdamW(model.named_parameters(), lr=1e-3)"
OPTIMIZERS = {
    "SeparateAdam": None,
    "Separate(MuonAdamW)": f"compopt.Separate({MUON})",
    "LocalSteps(MuonAdamW)": f"compopt.LocalSteps({MUON})",
}


class NotInstalledError(RuntimeError):
    """A release of torch that cannot be had here."""


class Release:
    """One release of torch, in an environment of its own."""

    def __init__(self, asked: str, folder: Path, index: str, ends: float):
        self.asked, self.index, self.ends, self.lines = asked, index, ends, list[str]()
        self.bin = folder.absolute() / f"torch-{asked}" / "bin"
        self.folder = self.bin.parent
        self.failed = False

    def run(self, *command: object) -> str:
        """Return what a command prints, or raise CalledProcessError."""
        words = [str(word) for word in command]
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{self.bin}:{os.environ['PATH']}"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        process = subprocess.Popen(words, cwd=ROOT, env=settings, **pipes)
        try:
            printed, _ = process.communicate(timeout=max(0.0, min(LIMIT, self.ends - time.monotonic())))
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.communicate()
            raise TimeoutError(f"not done within its time: {' '.join(words)[:200]}") from error
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words, printed)
        return printed

    def install(self) -> None:
        """Make the environment, or bring that of the newest release up to date."""
        torch = "torch" if self.asked == "newest" else f"torch=={self.asked}"
        pip = [self.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        where = ["--index-url", self.index] if self.index else []
        ready = self.folder / "ready"
        try:
            if not ready.exists():
                self.run(os.environ.get("PYTHON", sys.executable), "-m", "venv", self.folder)
            if not ready.exists() or self.asked == "newest":
                self.run(*pip, *where, "--upgrade", torch)
            self.run(*pip, *TOOLS)
            self.run(*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        except subprocess.CalledProcessError as error:
            raise NotInstalledError((error.output.strip().splitlines() or [str(error)])[-1]) from error
        except TimeoutError as error:
            raise NotInstalledError(str(error)) from error
        ready.touch()

    def check(self) -> None:
        """Run everything on this release, and write a line for each part."""
        self.install()
        versions = "import torch, platform; print(torch.__version__, 'with Python', platform.python_version())"
        self.lines.append(f"torch {self.run(self.bin / 'python', '-c', versions).strip()}")
        for name, optimizer in OPTIMIZERS.items():
            self.note(f"docs/launch.md on two ranks, {name}", lambda optimizer=optimizer: self.train(optimizer))
        self.note("compopt-advise as in README", self.advise)
        parts = TESTS | TESTS_OF_NEWEST if self.asked == "newest" else TESTS
        for name, tests in parts.items():
            self.note(name, lambda tests=tests: self.test(tests))

    def note(self, name: str, part: Callable[[], str]) -> None:
        """Run a part, and add how it ended and what it took."""
        began = time.monotonic()
        try:
            how = part()
        except (subprocess.CalledProcessError, TimeoutError, AssertionError) as error:
            if is_over := time.monotonic() >= self.ends:
                how = "NOT RUN to its end, the time is over"
            else:
                print(f"torch {self.asked}, {name}:\n{getattr(error, 'output', None) or error}", flush=True)
                how = "FAILED"
            self.failed |= not is_over
        self.lines.append(f"    {name}: {how}, {time.monotonic() - began:.0f} s")
        print(f"torch {self.asked}:{self.lines[-1]}", flush=True)

    def train(self, optimizer: str | None) -> str:
        """Run the page's script with another optimizer on two ranks: the loss must fall by a quarter."""
        script = re.search(r"```python\n(.*?)```", (ROOT / "docs/launch.md").read_text(), re.S)[1]
        if optimizer is not None:
            script = re.sub(r"(?m)^optimizer = .*$", f"optimizer = {optimizer}", script)
        file = self.folder / "train.py"
        file.write_text(script)
        printed = self.run(self.bin / "torchrun", "--standalone", "--nproc-per-node", 2, file)
        losses = [float(loss) for loss in re.findall(r"^\d+ loss ([\d.]+)", printed, re.M)]
        assert len(losses) == 4 and losses[-1] < 0.75 * losses[0], printed
        return f"loss {losses[0]:.2f} to {losses[-1]:.2f}"

    def advise(self) -> str:
        command = re.search(r"^    compopt-advise (.*?) *#", (ROOT / "README.md").read_text(), re.M)[1]
        printed = self.run(self.bin / "compopt-advise", *command.split())
        assert "Use " in printed, printed
        return "advice"

    def test(self, tests: list[str]) -> str:
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
        return self.run(self.bin / "pytest", *options, *tests).strip().splitlines()[-1].split(" in ")[0]


def answering(index: str) -> str:
    """Return the address of an index if it answers, else the empty word: the registry is asked."""
    with suppress(OSError, ValueError):
        urllib.request.urlopen(f"{index}/torch/", timeout=3).close()
        return index
    return ""


def find_oldest() -> str:
    """Return the oldest release that pyproject.toml admits."""
    return re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1] + ".0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=[find_oldest(), "newest"])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "versions")
    parser.add_argument("--index", default="", help="where torch for CPUs is; the registry if it does not answer")
    parser.add_argument("--may-skip", action="store_true", help="a release that cannot be had is no error")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds, after which nothing is begun")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    index = answering(args.index)
    ends = time.monotonic() + args.within
    releases = [Release(asked, args.folder, index, ends) for asked in args.releases]
    bad = False
    with ThreadPoolExecutor() as pool:
        for release, result in [(one, pool.submit(one.check)) for one in releases]:
            try:
                result.result()
            except NotInstalledError as error:
                release.lines.append(f"torch {release.asked} SKIPPED, it cannot be installed: {error}")
                bad |= not args.may_skip
            bad |= release.failed
    print("\n".join(line for release in releases for line in release.lines))
    sys.exit(bad)


if __name__ == "__main__":
    main()
