"""One prepared run on one GPU, of at most nine minutes: correctness, tests, kernels, steps, training, the ladder.

    bash bench/gpu.sh [FOLDER]        # default: runs/gpu. Needs torch, triton, pytest, pytest-xdist
    bash bench/gpu.sh FOLDER --dry    # the same parts, small, on a CPU: in a minute

Every part is a process with a time limit of its own, and one that fails stops none of the others. FOLDER gets its
output as PART.txt, and summary.json: the machine, and of each part the seconds, how it ended and its lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT, BENCH = Path(__file__).parents[1], Path(__file__).parent
WORKERS = 10  # processes that share the tests marked gpu
RUNGS = ["DDP + AdamW", "LocalSteps(Muon) 30, int4, 800"]


class Part(NamedTuple):
    """A command, and the seconds that it may take."""

    command: list[str]
    limit: float
    environment: dict[str, str] = {}


def parts(is_dry: bool) -> dict[str, Part]:
    """In the order of their worth. Tests run on several processes, all others alone."""
    python, script = sys.executable, str(BENCH / "_gpu_parts.py")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["tiny"] if is_dry else ["124M", "355M"]
    kernels = [python, str(BENCH / "gpu_kernels.py"), *(["--dry"] if is_dry else ["--parameters", "0"])]
    ladder = [
        python,
        str(BENCH / "ladder.py"),
        "run",
        "--size",
        "0.2M",
        "--rows",
        *RUNGS,
        "--lr",
        "4e-3",
        "--tokens",
        "4",
    ]
    ladder += ["--minutes", "0.05"] if is_dry else ["--minutes", "1.2", "--device", "cuda"]
    return {
        "correct": Part([python, script, "correct"], 60),
        "tests": Part([], 120),  # see run_tests
        "kernels": Part(kernels, 30, {"TRITON_INTERPRET": "1"} if is_dry else {}),
        **{f"steps-{size}": Part([python, script, "steps", size], 50) for size in sizes},
        "ranks": Part([*torchrun, script, "correct"], 70),
        "fsdp": Part([python, script, "fsdp"], 25),
        "train": Part([python, script, "train"], 55),
        "ladder": Part(ladder, 75, {"COMPOPT_LADDER": "OUT"}),
    }


def run(part: Part, out: Path, folder: Path) -> dict[str, Any]:
    """Run a command with its limit; its processes end with it."""
    environment = os.environ | {k: v.replace("OUT", str(folder)) for k, v in part.environment.items()}
    start, ended = time.perf_counter(), "in time"
    with out.open("w") as file:
        child = subprocess.Popen(
            part.command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            child.wait(part.limit)
        except subprocess.TimeoutExpired:
            ended = f"stopped after {part.limit:.0f} s"
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = out.read_text(errors="replace")
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
    failed = [row["row"] for row in rows if row.get("failed")]
    seconds = round(time.perf_counter() - start, 1)
    return {"seconds": seconds, "ended": ended, "code": child.returncode, "failed": failed, "rows": rows}


def run_tests(limit: float, folder: Path, is_dry: bool) -> dict[str, Any]:
    """The tests marked gpu, on several processes (pytest-xdist); and the names of those that fail."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path) for path in paths if re.search(r"mark\.gpu|\bdevice\b", path.read_text())]
    if is_dry:
        files = [file for file in files if "test_kernels_quantize" in file]
    # pytest by its own entry: "-m pytest" would put this folder's kernels/ on the path
    command = [sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main())", "-q", "-m", "gpu", "-rfE"]
    command += ["-n", str(WORKERS), "--dist", "worksteal", "-p", "no:cacheprovider", "--tb=short", "--durations=10"]
    result = run(Part([*command, *files], limit), folder / "tests.txt", folder)
    text = (folder / "tests.txt").read_text()
    return result | {
        "code": 0 if result["code"] == 5 else abs(result["code"]),  # 5: nothing was selected
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S.*)$", text, re.M),
        "rows": [{"summary": line} for line in re.findall(r"^(\d+ .* in [\d.]+s.*)$", text, re.M)],
    }


def machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    facts = {"date": time.strftime("%F", time.gmtime()), "device": name, "cores": os.cpu_count(), "triton": version}
    return {**facts, "torch": torch.__version__, "commit": commit.stdout.strip()}


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("folder", nargs="?", default=str(ROOT / "runs" / "gpu"))
    cli.add_argument("--dry", action="store_true", help="small, on a CPU")
    args = cli.parse_args()
    if not args.dry and not torch.cuda.is_available():
        print("no GPU: --dry runs every part on the CPU")
        return 0
    folder = Path(args.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"machine": machine(), "parts": {}}
    with tempfile.TemporaryDirectory() as packages:  # of the kernels, which are imported by another name
        (Path(packages) / "compopt_kernels").symlink_to(ROOT / "kernels")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), packages, str(ROOT / "tests")])
        os.environ["OMP_NUM_THREADS"] = "1"
        for name, part in parts(args.dry).items():
            if name == "tests":
                result = run_tests(part.limit, folder, args.dry)
            else:
                result = run(part, folder / f"{name}.txt", folder)
            if (kept := folder / "ladder.jsonl").exists():
                result["rows"] += [json.loads(line) | {"evals": None} for line in kept.read_text().splitlines()]
            summary["parts"][name] = result
            (folder / "summary.json").write_text(json.dumps(summary, indent=1))
            print(f"{name:<12}{result['seconds']:>7} s  {result['ended']}, code {result['code']}, "
                  f"{len(result['rows'])} rows, failed: {result['failed'] or 'none'}", flush=True)  # fmt: skip
    return int(any(result["code"] or result["failed"] for result in summary["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
