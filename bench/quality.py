"""Train examples/train_gpt.py with every method for the same number of steps: losses of the older runs.

    python bench/quality.py "AdamW (DDP)" "RadiusAdamW 0.4" --lr 2e-3 4e-3       # 800 steps on two ranks: minutes each
    python bench/quality.py "LocalSteps 30, int4, growing 800" --ranks 4 --steps 2000 --seeds 0 1 2
    python bench/quality.py "AdamW (DDP)" --width 512 --bf16 --steps 1500 --lr 1e-3
    python bench/tables.py                                                       # shows all that is kept

Each run is a process a rank, of one thread, with real sockets between them. Runs are kept, a line each, in
results/quality.jsonl; one that is there is not trained again. bench/ladder.py trains longer and tunes rates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from _table import RESULTS
from torch import int8

import compopt

ROOT = Path(__file__).parent.parent
KEPT = RESULTS / "quality.jsonl"
DENSE = 0.15  # of the steps, averaged dense at the start; what a run "from scratch" does without
WEIGHT_DECAY = 1e-2  # of all methods
PAPERS = (0.9, 0.95)  # betas of AdamS and SCAPE, as their authors train Llama
Make = Callable[[list, float, int], torch.optim.Optimizer]  # from groups, learning rate, dense steps


def adamw(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)


def adams(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
    return compopt.AdamS(groups, lr=lr, betas=PAPERS, weight_decay=WEIGHT_DECAY)


def of(cls: str, **options: object) -> Make:
    """A class of ours, with a dense start unless the options say otherwise."""
    made = {"weight_decay": WEIGHT_DECAY} | options
    return lambda groups, lr, dense: getattr(compopt, cls)(groups, lr=lr, **{"dense_steps": dense, **made})


def radius(density: float, interval: int = 20, **options: object) -> Make:
    return of("RadiusAdamW", density=density, interval=interval, **options)


def scape(density: float, **options: object) -> Make:
    return of("ScapeAdamS", **{"betas": PAPERS, "density": density, "density_steps": 0, **options})


def gaussian(ratio: int, **options: object) -> Make:
    return of("SeparateAdam", **{"projection": "gaussian", "ratio": ratio, **options})


def around_adams(**options: object) -> Make:
    return lambda groups, lr, dense: compopt.Separate(adams(groups, lr, dense), dense_steps=dense, **options)


def tagc(density: float, **options: object) -> Make:
    return of("TagcAdamW", density=density, **options)


def local(every: int, payload: str, growth: int, outer_lr: float | None = None) -> Make:
    """Local steps of AdamW; the start is their own."""
    options = {} if outer_lr is None else {"outer_lr": outer_lr}
    return lambda groups, lr, dense: compopt.LocalSteps(
        adamw(groups, lr, dense), every, payload_dtype=payload, growth_steps=growth, **options
    )


def rival(cls: str, start: float = 0.0, **options: object) -> Make:
    """A class of _rivals.py; it begins with this share of the steps that others average dense."""

    def make(groups: list, lr: float, dense: int) -> torch.optim.Optimizer:
        import _rivals

        begins = {"dense": round(start / DENSE * dense)} if start else {}
        return getattr(_rivals, cls)(groups, lr=lr, weight_decay=WEIGHT_DECAY, **begins, **options)

    return make


# They average by themselves, and DDP's own average is switched off: it would be a second one.
RIVALS: dict[str, Make] = {"DeMo 8": rival("DeMo", k=8), "SparseLoCo 30": rival("SparseLoCo", every=30, start=0.005)}
# A string names a hook of examples/baselines.py and its rank or density.
METHODS: dict[str, Make | str] = {
    "AdamW (DDP)": adamw,
    "AdamS": adams,
    **{f"PowerSGD rank {rank}": f"powersgd {rank}" for rank in (2, 4, 6, 8, 13)},
    **{f"naive top-k {density}": f"topk {density}" for density in (0.4, 0.2, 0.025)},
    **{f"RadiusAdamW {density}": radius(density) for density in (0.9, 0.8, 0.6, 0.5, 0.4, 0.2)},
    **{f"RadiusAdamW {d}, interval {n}": radius(d, n) for d in (0.8, 0.6, 0.4, 0.2) for n in (100, 400)},
    **{f"RadiusAdamW 0.4, residual scale {share}": radius(0.4, residual_scale=share) for share in (0.3, 0.1)},
    "RadiusAdamW 0.4, int8": radius(0.4, payload_dtype=int8),
    **{f"ScapeAdamS {density}": scape(density) for density in (0.2, 0.1, 0.05, 0.01)},
    "ScapeAdamS 0.1, int8": scape(0.1, payload_dtype=int8),
    "ScapeAdamS 0.1, as printed, from scratch": scape(0.1, clip="scape", dense_steps=0),
    **{f"ScapeAdamS {density}, no mask delay": scape(density, mask_delay=0) for density in (0.1, 0.01)},
    "ScapeAdamS 0.1, sharded": scape(0.1, sharded=True),
    "ScapeAdamS 0.1, offload": scape(0.1, offload="residual"),
    **{f"SeparateAdam {ratio}": gaussian(ratio) for ratio in (8, 16, 64)},
    **{f"SeparateAdam {ratio}, blocks": gaussian(ratio, block_rows="auto") for ratio in (8, 16)},
    **{f"SeparateAdam {ratio}, no error feedback": gaussian(ratio, ef_beta=1.0) for ratio in (16, 64)},
    "SeparateAdam 16, from scratch": gaussian(16, dense_steps=0),
    "SeparateAdam 16, adaptive": gaussian(16, adaptive=True, adapt_interval=100),
    **{f"SeparateAdam tracked {rank}, int8": of("SeparateAdam", rank=rank, payload_dtype=int8) for rank in (4, 16)},
    **{
        f"SeparateAdam tracked {rank}, int4": of("SeparateAdam", rank=rank, payload_dtype="int4")
        for rank in (4, 8, 16, 32)
    },
    "Separate tracked 16 around AdamS, int8": around_adams(projection="tracked", rank=16, payload_dtype=int8),
    "Separate 16 around AdamS": around_adams(projection="gaussian", ratio=16),
    **{f"TagcAdamW {density}": tagc(density) for density in (0.2, 0.1, 0.0125)},
    "TagcAdamW 0.0125, bf16": tagc(0.0125, payload_dtype=torch.bfloat16),
    **{
        f"TagcAdamW 0.0125, bf16, updates in {word}": tagc(0.0125, payload_dtype=torch.bfloat16, update_dtype=word)
        for word in ("int8", "int4", "int2")
    },
    **{f"LocalSteps 30, int4, growing {growth}": local(30, "int4", growth) for growth in (600, 780, 800)},
    "LocalSteps 250, int4, growing 2000": local(250, "int4", 2000),
    "LocalSteps 300, int4, growing 2000, outer lr 1": local(300, "int4", 2000, 1.0),
    **{
        f"LocalSteps {every}, int2, growing {growth}, outer lr 1": local(every, "int2", growth, 1.0)
        for every, growth in ((30, 780), (30, 1500), (30, 2000), (140, 1500), (140, 2000))
    },
    **RIVALS,
}
REMOVED = (
    "SeparateAdam 16, orthonormal",
    "LocalSteps 30, tracked 16, int4, growing 780",
)  # run, with options since removed


class Run(NamedTuple):
    """The key of a run."""

    name: str
    lr: float
    steps: int
    ranks: int = 2
    seed: int = 0
    width: int = 128  # of the model; 128: 0.86 M parameters, 512: 13 M
    bf16: bool = False  # matrix products in bfloat16


def parts(name: str) -> tuple[Make, str, str]:
    """Return a maker of the method's optimizer, the hook of examples/baselines.py and its setting ("": none)."""
    method = METHODS[name]
    if name in RIVALS:
        return RIVALS[name], "alone", ""
    return (adamw, *method.split()) if isinstance(method, str) else (method, "", "")


def work(run: Run, out: str) -> None:
    """One rank: train_gpt.py's main, with the optimizer of this run."""
    sys.path.insert(0, str(ROOT / "examples"))
    import baselines
    import train_gpt

    method, hook, setting = parts(run.name)
    given = {"steps": run.steps, "lr": run.lr, "dense-share": DENSE, "seed": run.seed, "width": run.width, "out": out}
    words = [f"--{key}={value}" for key, value in given.items()] + [f"--bf16={int(run.bf16)}"]
    if hook == "powersgd":
        baselines.POWERSGD_RANK = int(setting)
    elif hook == "alone":
        from _rivals import handed_back

        baselines.HOOKS["alone"] = lambda ddp, args: ddp.register_comm_hook(None, handed_back)
    elif hook:
        words += ["--density", setting]
    optimizer = hook or run.name
    train_gpt.OPTIMIZERS[optimizer] = lambda params, args: method(params, args.lr, args.dense_steps)
    sys.argv = ["train_gpt.py", "--optimizer", optimizer, *words]
    train_gpt.main()


def train(run: Run) -> dict:
    """Train one run in processes of its own. Returns what is kept of it."""
    print(f"{run.name}, lr {run.lr:g}, {run.steps} steps, {run.ranks} ranks, seed {run.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        worker = [__file__, "--worker", json.dumps(run), out]
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*launcher, *worker], env=env, check=True, timeout=900 + 4 * run.steps)
        result = json.loads(Path(out).read_text())
    line = {"run": run.name, "lr": run.lr, "steps": run.steps, "ranks": run.ranks, "seed": run.seed}
    line |= {"width": run.width} if run.width != 128 else {}
    line |= {"bf16": True} if run.bf16 else {}
    line |= {key: result[key] for key in ("parameters", "bytes_per_step", "phases")}
    line["evals"] = [{k: round(e[k], 4) for k in ("step", "bytes", "train_loss", "val_loss")} for e in result["evals"]]
    return line


def kept() -> dict[Run, dict]:
    """All runs there are; of two of the same name, the later."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    runs = [json.loads(line) for line in lines]
    others = Run._field_defaults  # said where they differ
    return {Run(r["run"], r["lr"], r["steps"], *(r.get(key, others[key]) for key in others)): r for r in runs}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS).replace("%", "%%"))
    cli.add_argument("--lr", type=float, nargs="+", default=[2e-3])
    cli.add_argument("--steps", type=int, default=800)
    cli.add_argument("--ranks", type=int, default=2)
    cli.add_argument("--seeds", type=int, nargs="+", default=[0])
    cli.add_argument("--width", type=int, default=128, help="of the model: 128 is 0.86 M parameters, 512 is 13 M")
    cli.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    cli.add_argument("--dry", action="store_true", help="print the lines of these runs, keep nothing")
    cli.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.worker:
        run, out = args.worker
        return work(Run(*json.loads(run)), out)
    if not args.methods or set(args.methods) - METHODS.keys():
        cli.error(f"name methods of these: {', '.join(METHODS)}")
    for name, lr, seed in product(args.methods, args.lr, args.seeds):
        run = Run(name, lr, args.steps, args.ranks, seed, args.width, args.bf16)
        if args.dry:
            print(json.dumps(train(run)))
        elif run not in kept():
            line = train(run)
            with KEPT.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
