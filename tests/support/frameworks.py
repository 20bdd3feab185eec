"""Frameworks that train by themselves: their own entry point on two ranks of one thread, each with four optimizers.

The scripts in ``tests/frameworks/scripts`` are what a user writes. They take the name of an optimizer first, make it by
``make_optimizer``, and end with ``report``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ranks import HANG_GUARD, free_port

SUPPORT, SCRIPTS = Path(__file__).parent, Path(__file__).parents[1] / "frameworks/scripts"
NAMES = ["adamw", "average", "separate", "local"]
IN_PLACE = dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def make_optimizer(name: str, params: Any, lr: float, process_group: Any = None, **options: Any) -> Any:
    """The framework's own AdamW, one of ours that loses nothing, and two that do."""
    import torch

    import compopt

    params = list(params)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, **options)
    if name == "average":
        return compopt.Average(torch.optim.AdamW(params, lr=lr, **options), process_group=process_group)
    if name == "separate":
        return compopt.SeparateAdam(params, lr=lr, dense_steps=3, rank=4, process_group=process_group, **options)
    # some frameworks pass no names, by which Muon knows hidden matrices
    rule = None if isinstance(params[0], tuple) else (lambda _, p: p.ndim == 2)
    return compopt.LocalSteps(compopt.MuonAdamW(params, lr=lr, use_muon=rule), every=2, process_group=process_group)


def report(model: Any, **more: Any) -> None:
    """Print whether both ranks have the same model, the sum of its parameters' sizes, and ``more``."""
    import torch
    import torch.distributed as dist

    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    flat = torch.cat([p.detach().double().reshape(-1) for p in whole])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    if dist.get_rank() == 0:
        sizes = dict(equal=all(torch.equal(both[0], one) for one in both), size=float(flat.abs().sum()))
        print("RESULT", json.dumps({**sizes, **more}), flush=True)


def run_framework(script: str, folder: Path, *args: object, **environment: str) -> dict[str, Any]:
    """Run a script on two ranks in ``folder``; return the last report, and all that was written as "text"."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    paths = os.pathsep.join([str(SUPPORT), str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*launcher, str(SCRIPTS / script), *map(str, args)],
        cwd=folder,
        env={**os.environ, **IN_PLACE, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_GUARD,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert "Exception ignored" not in run.stdout, run.stdout[-3000:]
    lines = [line.partition("RESULT ")[2] for line in run.stdout.splitlines() if "RESULT {" in line]
    return {**(json.loads(lines[-1]) if lines else {}), "text": run.stdout}


def check_runs(runs: dict[str, dict[str, Any]]) -> None:
    """Replicas are equal, losses fall, and what loses nothing ends where AdamW ends."""
    for name, run in runs.items():
        assert run["equal"], name
        assert run["losses"][-1] < run["losses"][0], (name, run["losses"])
    ours, theirs = runs["average"], runs["adamw"]
    assert abs(ours["size"] / theirs["size"] - 1) < 1e-5
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    assert all(abs(a - b) < 1e-5 * max(1, abs(b)) for a, b in pairs), (ours["losses"], theirs["losses"])
