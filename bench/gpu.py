"""Is everything right on a GPU, and what does it cost there? One prepared run of at most nine minutes.

    bash bench/gpu.sh [FOLDER]        # default: runs/gpu. Needs torch, triton, pytest, pytest-xdist
    bash bench/gpu.sh FOLDER --dry    # the same parts, small, on a CPU: in a minute
    python bench/gpu.py --part correct            # one part: correct, fsdp, steps SIZE or train ("steps tiny" on a CPU)

Every part is a process with a time limit of its own, and one that fails stops none of the others. FOLDER gets its
output as PART.txt, and summary.json: the machine, and of each part the seconds, how it ended and its lines of JSON.
Parts are of one process over NCCL (gloo on a CPU) with ``simulate=True``: every class against the CPU, its step() alone
and in training. ``correct`` under torchrun takes as many gloo ranks as there are, which share the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _model import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # compopt, where it is not installed
import compopt

ROOT, BENCH = Path(__file__).parents[1], Path(__file__).parent
DRY_LIMITS = 6  # times the seconds of a part in a dry run
WORKERS = 10  # processes that share the tests marked gpu
RUNGS = ["DDP + AdamW", "LocalSteps(Muon) 30, int4, 800"]


CUDA = torch.cuda.is_available()
DEVICE, RANK, WORLD = "cuda" if CUDA else "cpu", int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
Model = nn.Module
Make = Callable[[Model], Any]
SIZES = {"124M": (768, 12, 50257), "355M": (1024, 24, 50257), "tiny": (64, 2, 500)}


def adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, fused=CUDA)


def muon(model: Model) -> compopt.MuonAdamW:
    return compopt.MuonAdamW(model.named_parameters(), lr=6e-4)


def of(cls: str, **options: Any) -> Make:
    return lambda model: getattr(compopt, cls)(model.parameters(), lr=6e-4, **options)


def around(cls: str, inside: Make, **options: Any) -> Make:
    return lambda model: getattr(compopt, cls)(inside(model), simulate=True, **options)


ONE = dict(simulate=True)
START, NOW = dict(dense_steps=2), dict(dense_steps=0, growth_steps=0)
CLASSES: dict[str, Make] = {
    "AdamS": of("AdamS"),
    "RadiusAdamW .4": of("RadiusAdamW", density=0.4, interval=4, **START, **ONE),
    "RadiusAdamW .4, int8": of("RadiusAdamW", density=0.4, interval=4, payload_dtype="int8", **START, **ONE),
    "ScapeAdamS .1": of("ScapeAdamS", density=0.1, density_steps=0, **ONE),
    "ScapeAdamS .01": of("ScapeAdamS", density=0.01, density_steps=0, **ONE),
    "SeparateAdam": of("SeparateAdam", **START, **ONE),
    "SeparateAdam, float32": of("SeparateAdam", payload_dtype=None, **START, **ONE),
    "SeparateAdam, Gaussian": of("SeparateAdam", projection="gaussian", **ONE),
    "Separate(AdamW)": around("Separate", adamw, **START),
    "Separate(MuonAdamW)": around("Separate", muon, **START),
    "TagcAdamW": of("TagcAdamW", **ONE),
    "Average(AdamW), int8": around("Average", adamw, payload_dtype="int8"),
    "Average(AdamW), int4": around("Average", adamw, payload_dtype="int4"),
    "MuonAdamW": muon,
    "LocalSteps(AdamW)": around("LocalSteps", adamw, every=3, **NOW),
    "LocalSteps(MuonAdamW), int2": around("LocalSteps", muon, every=3, payload_dtype="int2", **NOW),
    "LocalSteps(AdamW), offloaded": around("LocalSteps", adamw, every=3, offload="outer", **NOW),
}


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def rows_of(rows: dict[str, Make], measure: Callable[[Make], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line for each; one that fails says why, and the others go on."""
    for name, make in rows.items():
        start = time.perf_counter()
        try:
            line = measure(make)
        except Exception as error:
            traceback.print_exc(limit=-4)
            line = {"failed": f"{type(error).__name__}: {error}"[:400]}
        yield {"row": name, **line, "seconds": round(time.perf_counter() - start, 1)}
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


# The same steps on the CPU and on the GPU


def batch(seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 96, (size, context), generator=torch.Generator().manual_seed(seed))
    return x, (3 * x + 1) % 96


def train_on(
    device: str, make: Make, sharded: bool, steps: int = 12 if CUDA else 4
) -> tuple[list[float], list[Tensor], int]:
    """Return losses, parameters at the end, and the bytes that the last step sent."""
    torch.manual_seed(0)
    model: Model = GPT(2, 64, 4).to(device)
    if sharded:
        mesh = init_device_mesh(device, (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer, losses = make(model), []
    net = model if sharded else DistributedDataParallel(model)
    for step in range(steps):
        x, y = batch(100 * step + RANK, 4, 64)
        loss = net(x.to(device), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hasattr(optimizer, "end_round"):
        optimizer.end_round()
    whole = (getattr(p, "full_tensor", lambda p=p: p)().detach().float().cpu() for p in model.parameters())
    stats = getattr(optimizer, "stats", None)
    return losses, list(whole), stats.bytes_sent if stats else 0


def compare(make: Make, sharded: bool = False) -> dict[str, Any]:
    """The largest relative differences between CPU and GPU, and whether ranks ended with the same parameters."""
    runs = [train_on(device, make, sharded) for device in dict.fromkeys(("cpu", DEVICE))]
    (losses, params, sent), (others, theirs, their_sent) = runs[0], runs[-1]
    flat = torch.cat([p.view(-1) for p in theirs])
    of_rank_0 = flat.clone()
    dist.broadcast(of_rank_0, 0)
    return {
        "loss": round(others[-1], 5),
        "loss_difference": max(abs(a - b) / abs(a) for a, b in zip(losses, others, strict=True)),
        "difference": max(
            float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in zip(params, theirs, strict=True)
        ),
        "bytes": [sent, their_sent],
        "equal_ranks": torch.equal(flat, of_rank_0),
    }


# step() alone


def gpt2(size: str) -> nn.ParameterDict:
    """Parameters in GPT-2's shapes, with gradients."""
    width, layers, words = SIZES[size]
    shapes = {"wte": (words, width), "wpe": (1024, width)}
    for i in range(layers):
        for name, shape in {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}.items():
            shapes[f"blocks-{i}-{name}"] = (shape[0] * width, shape[1] * width)
            shapes[f"blocks-{i}-{name}-bias"] = (shape[0] * width,)
        shapes |= {f"blocks-{i}-norm{n}": (width,) for n in range(4)}
    params = nn.ParameterDict({n: nn.Parameter(torch.randn(s, device=DEVICE) * 0.02) for n, s in shapes.items()})
    for p in params.values():
        p.grad = torch.randn_like(p) * 0.01
    return params


def named(model: Model) -> list[tuple[str, Tensor]]:
    return [(name.replace("-", "."), p) for name, p in model.named_parameters()]


STEADY: dict[str, Make] = {
    "AdamW, fused": adamw,
    "AdamS": CLASSES["AdamS"],
    "RadiusAdamW .4, sparse": of("RadiusAdamW", density=0.4, interval=10**6, dense_steps=1, **ONE),
    "RadiusAdamW .4, int8": of("RadiusAdamW", density=0.4, interval=10**6, dense_steps=1, payload_dtype="int8", **ONE),
    "ScapeAdamS .01": CLASSES["ScapeAdamS .01"],
    "SeparateAdam": CLASSES["SeparateAdam"],
    "SeparateAdam, Gaussian": CLASSES["SeparateAdam, Gaussian"],
    "Average(AdamW), int8": CLASSES["Average(AdamW), int8"],
    "TagcAdamW": CLASSES["TagcAdamW"],
    "MuonAdamW": lambda model: compopt.MuonAdamW(named(model), lr=1e-4),
    "LocalSteps(AdamW), between": around("LocalSteps", adamw, every=10**6, **NOW),
    "LocalSteps(AdamW), exchange, int4": around("LocalSteps", adamw, every=1, payload_dtype="int4", **NOW),
}


def profiled(step: Callable[[], object]) -> dict[str, Any]:
    """Launches of a step, and the kernels that take longest, in ms."""
    if not CUDA:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    times: dict[str, float] = {}
    for event in events:
        times[event.name[:60]] = times.get(event.name[:60], 0) + event.device_time_total / 1e3
    heaviest = sorted(times.items(), key=lambda item: -item[1])[:5]
    return {"launches": len(events), "heaviest": {name: round(ms, 2) for name, ms in heaviest}}


def time_step(size: str, make: Make, repeats: int = 10 if CUDA else 2) -> dict[str, Any]:
    torch.manual_seed(0)
    params = gpt2(size)
    synchronize()
    before = torch.cuda.memory_allocated() if CUDA else 0
    optimizer = make(params)
    for _ in range(5):
        optimizer.step()
    synchronize()
    held = torch.cuda.memory_allocated() if CUDA else 0
    torch.cuda.reset_peak_memory_stats() if CUDA else None
    whole, host = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        optimizer.step()
        host.append(1e3 * (time.perf_counter() - start))
        synchronize()
        whole.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    count = sum(p.numel() for p in params.values())
    return {
        "parameters": count,
        "ms": round(statistics.median(whole), 3),
        "host_ms": round(statistics.median(host), 3),
        "state_bytes": round((held - before) / count, 2),
        "peak_bytes": round((peak - before) / count, 2),
        **profiled(optimizer.step),
    }


# A training step

TRAINED = ["SeparateAdam", "RadiusAdamW .4", "ScapeAdamS .01", "TagcAdamW", "Average(AdamW), int8", "MuonAdamW"]


def time_training(make: Make) -> dict[str, Any]:
    layers, width, context, size, steps = (12, 768, 1024, 8, 24) if CUDA else (2, 64, 64, 4, 3)
    torch.manual_seed(0)
    model: Model = GPT(layers, width, width // 64, context).to(DEVICE)
    optimizer, net, times, losses = make(model), DistributedDataParallel(model), [], []
    for step in range(steps):
        x, y = (part.to(DEVICE) for part in batch(step, size, context))
        synchronize()
        start = time.perf_counter()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = net(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    return {"ms": round(statistics.median(times[steps // 3 :]), 2), "loss": round(losses[-1], 4)}


def run_part(part: str, *sizes: str) -> None:
    """One part in this process: lines of JSON, one a row of a table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(4 if CUDA else 1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29613")
    if WORLD == 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    inside = {n: m for n, m in CLASSES.items() if n in ("SeparateAdam", "TagcAdamW", "Average(AdamW), int8")}
    training = {"DDP + AdamW, fused": adamw, **{name: CLASSES[name] for name in TRAINED}}
    rows = {
        "correct": lambda: rows_of(CLASSES, compare),
        "fsdp": lambda: rows_of({"AdamW": adamw, **inside}, lambda make: compare(make, sharded=True)),
        "steps": lambda: rows_of(STEADY, lambda make: time_step(sizes[0], make)),
        "train": lambda: rows_of(training, time_training),
    }
    for line in rows[part]():
        if RANK == 0 or line.get("failed"):
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


# The prepared run


class Part(NamedTuple):
    """A command, and the seconds that it may take."""

    command: list[str]
    limit: float
    environment: dict[str, str] = {}


def parts(is_dry: bool) -> dict[str, Part]:
    """In the order of their worth. Tests run on several processes, all others alone. The limits are those of
    a GPU's hour; a dry run, on any machine, has more.
    """
    python, script = sys.executable, __file__
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["tiny"] if is_dry else ["124M", "355M"]
    kernels = [python, str(BENCH / "gpu_kernels.py"), *(["--dry"] if is_dry else [])]
    ladder = [python, str(BENCH / "ladder.py"), "run", "--rows", *RUNGS, "--lr", "4e-3", "--tokens", "4"]
    ladder += ["--minutes", "0.05"] if is_dry else ["--minutes", "1.2", "--device", "cuda"]
    all_parts = {
        "correct": Part([python, script, "--part", "correct"], 60),
        "tests": Part([], 120),  # see run_tests
        "kernels": Part(kernels, 30, {"TRITON_INTERPRET": "1"} if is_dry else {}),
        **{f"steps-{size}": Part([python, script, "--part", "steps", size], 50) for size in sizes},
        "ranks": Part([*torchrun, script, "--part", "correct"], 70),
        "fsdp": Part([python, script, "--part", "fsdp"], 25),
        "train": Part([python, script, "--part", "train"], 55),
        "ladder": Part(ladder, 75, {"COMPOPT_LADDER": "OUT"}),
    }
    return {name: part._replace(limit=part.limit * (DRY_LIMITS if is_dry else 1)) for name, part in all_parts.items()}


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
        files = [file for file in files if "test_quantized_means" in file]
    # pytest by its own entry: "-m pytest" would put this folder's kernels/ on the path
    command = [sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main())", "-q", "-m", "gpu", "-rfE"]
    command += ["-n", str(2 if is_dry else WORKERS), "--dist", "worksteal"]
    command += ["-p", "no:cacheprovider", "--tb=short", "--durations=10"]
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
    cli.add_argument("--part", nargs="+", metavar="PART", help="correct, fsdp, steps SIZE or train, in this process")
    args = cli.parse_args()
    if args.part:
        run_part(*args.part)
        return 0
    if not args.dry and not torch.cuda.is_available():
        print("no GPU: --dry runs every part on the CPU")
        return 0
    folder = Path(args.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"machine": machine(), "parts": {}}
    with tempfile.TemporaryDirectory() as packages:  # of the kernels, which are imported by another name
        (Path(packages) / "compopt_kernels").symlink_to(ROOT / "kernels")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), packages, str(ROOT / "tests/support")])
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
