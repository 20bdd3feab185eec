"""Train examples/train_gpt.py with every method for the same number of steps, and show the older runs.

    python bench/quality.py "AdamW (DDP)" "RadiusAdamW 0.4" --lr 2e-3 4e-3       # 800 steps on two ranks: minutes each
    python bench/quality.py "LocalSteps 30, int4, growing 800" --ranks 4 --steps 2000 --seeds 0 1 2
    python bench/quality.py "AdamW (DDP)" --width 512 --bf16 --steps 1500 --lr 1e-3
    python bench/quality.py                        # train nothing: tables of all runs and of what was measured once

Each run is a process a rank, of one thread, with real sockets between them. Runs are kept, a line each, in
results/quality.jsonl; one that is there is not trained again. bench/ladder.py trains longer and tunes rates.

Runs that are alike but for method, rate and seed are a table. A method is shown at the best rate of seed 0, its loss
the mean of the seeds that ran at that rate; ``x AdamW`` is over AdamW's best, means over means, then by seed; ``same
lr`` is over AdamW's at the same rate, on seed 0. Seconds are composed: step times at 100 Mbit/s that were measured once
(results/time_to_loss.jsonl) x the steps of each phase. Saves results/quality.csv and time_to_loss-100mbit.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby, product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from _table import RESULTS, Row, print_rows, read_rows, write_rows
from torch import int8

import compopt

ROOT = Path(__file__).parent.parent
KEPT, TIMED = RESULTS / "quality.jsonl", RESULTS / "time_to_loss.jsonl"
RATE = "100mbit"
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
    "RadiusAdamW 0.4, int8": radius(0.4, payload_dtype=int8),
    **{f"ScapeAdamS {density}": scape(density) for density in (0.2, 0.1, 0.05, 0.01)},
    "ScapeAdamS 0.1, int8": scape(0.1, payload_dtype=int8),
    "ScapeAdamS 0.1, as printed, from scratch": scape(0.1, clip="scape", dense_steps=0),
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
    *(f"RadiusAdamW 0.4, residual scale {share}" for share in (0.3, 0.1)),
    *(f"ScapeAdamS {density}, no mask delay" for density in (0.1, 0.01)),
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


# Tables

ADAMW = "AdamW (DDP)"
TOKENS = 512  # of a rank and step
KIND = ("width", "bf16", "ranks", "steps")  # of runs: what a table has in common
LEVELS = (1.05, 1.1, 1.2)  # times AdamW's last loss
Runs = dict[Run, dict]


def kind_of(run: Run) -> tuple:
    return tuple(getattr(run, name) for name in KIND)


def last_loss(line: dict) -> float:
    return line["evals"][-1]["val_loss"]


def tabulate(runs: Runs) -> list[Row]:
    """A row for each kind of run and method, in the order of METHODS."""
    order = [*METHODS, *REMOVED]
    kinds: dict[tuple, dict[str, Runs]] = defaultdict(lambda: defaultdict(dict))
    for run in sorted(runs, key=lambda run: (*kind_of(run), order.index(run.name), run.seed, run.lr)):
        kinds[kind_of(run)][run.name][run] = runs[run]
    return [row for kind, methods in kinds.items() for row in rows_of_kind(kind, methods)]


def rows_of_kind(kind: tuple, methods: dict[str, Runs]) -> list[Row]:
    best_adamw, adamw_at = ({}, {}) if ADAMW not in methods else best_of(methods[ADAMW])
    rows = []
    for name, runs in methods.items():
        seeds, rates = best_of(runs)
        if not seeds:
            continue
        run, line = next(iter(seeds.items()))
        losses = {run.seed: last_loss(line) for run, line in seeds.items()}
        of_adamw = {run.seed: last_loss(line) for run, line in best_adamw.items()}
        ratios = [losses[seed] / of_adamw[seed] for seed in losses if seed in of_adamw]
        dense = 4 * line["parameters"]
        sent = line["bytes_per_step"]["compressed"] or (dense if set(line["phases"]) == {"dense"} else None)
        rows.append(
            {
                "run": name,
                **dict(zip(KIND, kind, strict=True)),
                "parameters": line["parameters"],
                "tokens_per_parameter": TOKENS * run.ranks * run.steps / line["parameters"],
                "lr": run.lr,
                "at_rates": " ".join(f"{lr:g}:{loss:g}" for lr, loss in rates.items()),
                "seeds": len(losses),
                "loss": mean(losses.values()),
                "low": min(losses.values()),
                "high": max(losses.values()),
                "to_adamw": mean(losses.values()) / mean(of_adamw.values()) if of_adamw else None,
                "to_adamw_same_lr": losses[0] / adamw_at[run.lr] if run.lr in adamw_at else None,
                "by_seed": " ".join(f"{ratio:.3f}" for ratio in ratios),
                "step_share": sent and sent / dense,
                "run_share": line["evals"][-1]["bytes"] / (dense * run.steps),
            }
        )
    return rows


def best_of(runs: Runs) -> tuple[Runs, dict[float, float]]:
    """The runs of all seeds at the best rate of seed 0, and the losses of seed 0 by rate."""
    rates = {run.lr: last_loss(line) for run, line in runs.items() if run.seed == 0}
    best = min(rates, key=rates.__getitem__, default=None)
    return {run: line for run, line in runs.items() if run.lr == best}, rates


COLUMNS = {
    "lr": ("lr", "9g"),
    "loss": ("loss", "8.3f"),
    "low": ("low", "8.3f"),
    "high": ("high", "8.3f"),
    "to_adamw": ("x AdamW", "8.3f"),
    "to_adamw_same_lr": ("same lr", "8.3f"),
    "step_share": ("step bytes", "9.2%"),
    "run_share": ("run bytes", "9.2%"),
    "by_seed": ("by seed", ">22"),
    "at_rates": ("loss at rates of seed 0", ">46"),
}
DIGITS = {"loss": 4, "to_adamw": 4, "to_adamw_same_lr": 4, "step_share": 4, "run_share": 5, "tokens_per_parameter": 2}


def show(rows: list[Row]) -> None:
    for kind, of_kind in groupby(rows, key=lambda row: [row[name] for name in KIND]):
        lines = list(of_kind)
        _, bf16, ranks, steps = kind
        products = "bfloat16" if bf16 else "float32"
        about = "{parameters:,} parameters (width {width}), {tokens_per_parameter:.2g} tokens per parameter"
        print(f"\n{steps} steps, {ranks} ranks, {about.format(**lines[0])}, products in {products}")
        print_rows(lines, COLUMNS, "run", 46)


# Seconds


def timings(rate: str, ranks: int = 2) -> dict[str, dict[str, float]]:
    """Of each method timed at this rate: the phases of its steps and the seconds of one step in each."""
    lines = [json.loads(line) for line in TIMED.read_text().splitlines()] if TIMED.exists() else []
    return {line["run"]: line["seconds"] for line in lines if (line["rate"], line["ranks"]) == (rate, ranks)}


def per_step(phases: dict[str, int], seconds: dict[str, float]) -> tuple[float, float]:
    """Seconds of a dense step, and of one after the dense start: the mean over the phases there, by their counts.

    NaN where the run has no such step.
    """
    rest = {phase: count for phase, count in phases.items() if phase != "dense"}
    dense = seconds["dense"] if phases.get("dense") else float("nan")
    return dense, sum(n * seconds[phase] for phase, n in rest.items()) / sum(rest.values()) if rest else float("nan")


def seconds_at(step: int, phases: dict[str, int], seconds: dict[str, float]) -> float:
    """Seconds that a run has taken after `step` steps; its dense steps are its first ones."""
    start = min(step, phases.get("dense", 0))
    dense, after = per_step(phases, seconds)
    return (start * dense if start else 0.0) + ((step - start) * after if step > start else 0.0)


def put_on(rows: list[dict], rate: str) -> None:
    """Add "seconds" to every evaluation of the runs whose phases have all been timed at this rate."""
    timed = timings(rate)
    for row in rows:
        seconds = timed.get(row["run"], {})
        if set(row["phases"]) <= set(seconds):
            row["dense_s"], row["compressed_s"] = per_step(row["phases"], seconds)
            for point in row["evals"]:
                point["seconds"] = seconds_at(point["step"], row["phases"], seconds)


def reached(level: float, evals: list[dict], key: str) -> float | None:
    """The seconds, bytes or steps at which the validation loss first is at `level`, between evaluations in a line.

    None if it never is; the first evaluation's place if it is there already.
    """
    for before, now in zip([None, *evals], evals, strict=False):
        if now["val_loss"] <= level:
            if before is None:
                return now[key]
            share = (before["val_loss"] - level) / (before["val_loss"] - now["val_loss"])
            return before[key] + share * (now[key] - before[key])
    return None


def seconds_rows(runs: Runs) -> list[Row]:
    """Runs of 800 steps on two ranks that were timed, and AdamW's shorter ones: seconds in all and to each level."""
    lines, rate = [], next(run.lr for run in best_of(of_kind(runs, 800, ADAMW))[0])
    for name in METHODS:
        seeds, _ = best_of(of_kind(runs, 800, name))
        lines += [(name, run, line) for run, line in seeds.items() if run.seed == 0]
    for steps in (200, 400):
        short = Run(ADAMW, rate, steps)
        lines += [(f"{ADAMW}, {steps} steps", short, runs[short])] if short in runs else []
    rows = [line | {"run": run.name, "lr": run.lr, "label": name} for name, run, line in lines]
    put_on(rows, RATE)
    timed = [row for row in rows if "dense_s" in row and "seconds" in row["evals"][-1]]
    first = last_loss(timed[0])
    return [
        {
            "run": row["label"],
            **{name: row[name] for name in ("lr", "steps")},
            "loss": last_loss(row),
            "to_first": last_loss(row) / first,
            "dense_s": number(row["dense_s"]),
            "compressed_s": number(row["compressed_s"]),
            "bytes_in_all": row["evals"][-1]["bytes"],
            "seconds": row["evals"][-1]["seconds"],
            **{f"seconds_to_{level}": reached(level * first, row["evals"], "seconds") for level in LEVELS},
            "evals": row["evals"],
        }
        for row in timed
    ]


def of_kind(runs: Runs, steps: int, name: str) -> Runs:
    return {run: line for run, line in runs.items() if run.name == name and kind_of(run) == (128, False, 2, steps)}


def number(x: float) -> float | None:
    return None if x != x else x


SECONDS = {
    "loss": ("loss", "8.3f"),
    "dense_s": ("dense s", "9.3f"),
    "compressed_s": ("compressed s", "9.3f"),
    "seconds": ("s in all", "9.1f"),
    **{f"seconds_to_{level}": (f"s to x{level}", "9.1f") for level in LEVELS},
}


def show_seconds(rows: list[Row]) -> None:
    alone = timings(RATE)["no communication"]["dense"]
    print(f"\nSeconds at {RATE}, 2 ranks, 800 steps; a step without communication takes {alone:.3f} s")
    print_rows(rows, SECONDS, "run", 40)
    digits = {"loss": 4, "to_first": 4, "dense_s": 4, "compressed_s": 4, "seconds": 1}
    digits |= {f"seconds_to_{level}": 1 for level in LEVELS}
    fields = [name for name in rows[0] if name != "evals"]
    write_rows(RESULTS / f"time_to_loss-{RATE}.csv", rows, fields, digits)


# Experiments that were made once

ONCE = {  # file of results/: what it is
    "local_variants": "delays and saves of local steps: 0.14 M parameters, 4 simulated ranks, 600 steps, lr 4e-3",
    "rounding": "what rounding takes off, root mean square, relative; milliseconds for 10 M values",
    "time_to_loss-validation": "60 real steps at 100 Mbit/s: seconds as composed, and by the clock on the wall",
    "residuals": "SCAPE and top-k in one process, 400 steps: means of the last 40",
    "fsdp": "inside FSDP2 and under DDP: 0.86 M parameters, 800 steps, lr 2e-3; bytes a parameter at rest",
    "predicted_runs": "compopt-advise, 400 steps of 0.86 M parameters on 2 ranks, loopback; in times no communication",
    "bytes": "what a rank hands over in a compressed step, and how many times fewer than dense float32",
    "mcbench-boundaries": "what crosses each stage boundary in a step, sent alone",
}
NAMES = ("table", "row", "run", "what", "method", "by", "compressor", "boundary")
LABELS = (*NAMES, "bits", "seed", "steps", "step", "lr", "rate", "phases", "parameters", "ranks")  # are no results


def show_once(name: str) -> None:
    """The rows of a kept file; of several seeds or steps of one run, the means."""
    rows: dict[str, dict[str, list[float]]] = {}
    for row in read_rows(RESULTS / f"{name}.csv"):
        if name == "residuals" and int(row["step"]) <= 360:
            continue
        names = [row[key] for key in NAMES if key in row and name != "rounding"]
        names += [f"{row['parameters']} parameters, {row['ranks']} ranks"] if name == "bytes" else []
        names = names or [f"{row['what']}, int{row['bits']}, {row['row']} values a scale"]
        numbers = rows.setdefault(", ".join(names), {})
        for key, value in row.items():
            if key not in LABELS and value:
                numbers.setdefault(key, []).append(float(value))
    fields = list(dict.fromkeys(key for numbers in rows.values() for key in numbers))
    table = [{"row": label} | {k: mean(v) for k, v in numbers.items()} for label, numbers in rows.items()]
    print(f"\n{name}.csv: {ONCE[name]}")
    print_rows(table, {key: (key, "9.4f") for key in fields}, "row", 78)


def show_all() -> None:
    runs = kept()
    rows = tabulate(runs)
    show(rows)
    show_seconds(seconds_rows(runs))
    write_rows(RESULTS / "quality.csv", rows, digits=DIGITS)
    for name in ONCE:
        show_once(name)


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
    if not args.methods:
        return show_all()
    if set(args.methods) - METHODS.keys():
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
