"""How good predictions are: steps of compopt.advise, and the order that compopt.diagnose gives.

    sudo .venv/bin/python bench/predictions.py steps       # three rates, six minutes
    .venv/bin/python bench/predictions.py diagnosis        # ten times 60 steps watched, ten minutes on a quiet core
    .venv/bin/python bench/predictions.py diagnosis --show # train nothing: the tables of what is there

steps: at each rate `compopt.probe` measures link and memory, as a user would have it do, and links.py's methods then
take their turns. A prediction knows the probe's file and the step without communication, and nothing of the method's
own steps. Saves results/predictions.csv.

diagnosis: the GPT and the training of quality.py's runs (two ranks' batches averaged in one process), watched for 60
steps from the first one on, and for 60 after the dense start, with every method of results/quality.jsonl that is a
class and not a rival's. For each group of runs of the same length and rate: Kendall's tau and Spearman's rho of `kept`,
falling, and the loss, rising. Saves results/diagnosed.csv.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from _model import make_model
from _net import Links
from _table import RESULTS, print_rows, read_rows, write_rows
from links import over_links, summarise, warn_if_busy
from quality import kept

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import corpus  # noqa: E402
import train_gpt  # noqa: E402

import compopt  # noqa: E402
from compopt.costmodel import Workload, advise  # noqa: E402
from compopt.planning.candidates import ADAMS_BETAS, Candidate, construct_silently  # noqa: E402
from compopt.planning.diagnosis import Diagnosis  # noqa: E402
from compopt.planning.link_probe import read_probe  # noqa: E402
from compopt.planning.methods import METHODS, Cost  # noqa: E402
from compopt.planning.prediction import step_seconds  # noqa: E402

RANKS = 2


def make_gpt() -> train_gpt.GPT:
    return train_gpt.GPT(layers=4, width=128, heads=4, context=64)


# Steps

STEADY = 10**9  # links.py times sparse steps only: a mask that is never drawn again


def costs(work: Workload) -> dict[str, Cost]:
    """links.py's methods by its names, with its settings."""
    return {
        "ddp": METHODS["AdamW+DDP"](work, RANKS),
        "radius": METHODS["RadiusAdamW"](work, RANKS, density=0.4, interval=STEADY),
        "scape": METHODS["ScapeAdamS"](work, RANKS, density=0.01),
        "separate": METHODS["SeparateAdam, Gaussian 16"](work, RANKS, ratio=16),
        "tracked16": METHODS["SeparateAdam"](work, RANKS),
    }


def probed(rate: str) -> dict:
    """Return what the probe writes, of ranks on links of this rate."""
    with tempfile.TemporaryDirectory() as folder, Links(RANKS, rate) as links:
        file = str(Path(folder, "probe.json"))
        links.run([sys.executable, "-m", "compopt.probe", "--out", file])
        return read_probe(file)


def compare_steps(rate: str, work: Workload, rounds: int, steps: int) -> list[dict]:
    """A row for each method: its step as predicted, and as measured afterwards."""
    results, known = probed(rate), costs(work)
    words = ["--worker", "--methods", "none", *known, "--rounds", str(rounds), "--steps", str(steps)]
    label, gathered = over_links([sys.executable, str(Path(__file__).with_name("links.py")), *words], RANKS, rate)
    timed = summarise(label, RANKS, gathered)
    seconds = {row["method"]: row["step_ms"] / 1e3 for row in timed}
    warn_if_busy(timed[0]["cpu_share"])
    single = seconds["none"]
    there = advise(work, **results, step_s=single).situation
    rows = []
    for method, cost in known.items():
        step = step_seconds(there.machine, cost, there.compute_s, there.overlap_s)
        rows.append(
            {
                "rate": label,
                "method": method,
                "alone_s": single,
                "own_s": step.local,
                "exchange_s": step.exchange,
                "predicted_s": step.total,
                "measured_s": seconds[method],
                "error": step.total / seconds[method] - 1,
            }
        )
    return rows


def predict_steps(rates: list[str], rounds: int, steps: int) -> None:
    work, rows = Workload.of(make_model().named_parameters()), []
    for rate in rates:
        rows += [row | {"name": f"{row['rate']} {row['method']}"} for row in compare_steps(rate, work, rounds, steps)]
    columns = {"alone_s": ("alone s", "9.3f"), "own_s": ("own s", "9.3f"), "exchange_s": ("waits s", "9.3f")}
    columns |= {"predicted_s": ("predicted", "9.3f"), "measured_s": ("measured", "9.3f"), "error": ("error", "+8.1%")}
    print_rows(rows, columns, "name", 24)
    print(f"largest error: {max(abs(row['error']) for row in rows):.1%} over {len(rows)} steps", flush=True)
    seconds = ("alone_s", "own_s", "exchange_s", "predicted_s", "measured_s")
    write_rows(
        RESULTS / "predictions.csv", rows, ["rate", "method", *seconds, "error"], dict.fromkeys([*seconds, "error"], 4)
    )


# Diagnosis

WATCHED, START = 60, 10
GROUPS = ((800, 2e-3), (400, 2e-3), (800, 4e-3), (1500, 1e-3), (800, 1e-3))
FIELDS = ("steps", "lr", "run", "loss", "first", "after", "residual")


class Everywhere(Candidate):
    """Attention too: naive top-k, which TAGC is otherwise."""

    def make_optimizer(self, groups, start):
        return super().make_optimizer([{**group, "compress": True} for group in groups], start)


class AroundAdamS(Candidate):
    """Separate, around AdamS."""

    def make_optimizer(self, groups, start):
        groups = [{**group, "betas": ADAMS_BETAS} for group in groups]
        base = construct_silently(compopt.AdamS, groups, lr=1.0)
        return construct_silently(compopt.Separate, base, simulate=True, dense_steps=start, **self.options)


def separate(cls=Candidate, **options) -> Candidate:
    return cls("SeparateAdam", options)


def radius(density: float, interval: int = 20, **options) -> Candidate:
    return Candidate("RadiusAdamW", {"density": density, "interval": interval, **options})


def gaussian(ratio: int, **options) -> dict:
    return {"projection": "gaussian", "ratio": ratio, **options}


CANDIDATES: dict[str, Candidate] = {
    "AdamS": Candidate("AdamS", {}),
    **{f"RadiusAdamW {d}": radius(d) for d in (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9)},
    **{f"RadiusAdamW {d}, interval {i}": radius(d, i) for d in (0.2, 0.4, 0.6, 0.8) for i in (100, 400)},
    "RadiusAdamW 0.4, int8": radius(0.4, payload_dtype="int8"),
    **{f"ScapeAdamS {d}": Candidate("ScapeAdamS", {"density": d}) for d in (0.2, 0.1, 0.05, 0.01)},
    "ScapeAdamS 0.1, int8": Candidate("ScapeAdamS", {"density": 0.1, "payload_dtype": "int8"}),
    **{f"SeparateAdam {r}": separate(**gaussian(r)) for r in (8, 16, 64)},
    **{f"SeparateAdam {r}, no error feedback": separate(**gaussian(r, ef_beta=1.0)) for r in (16, 64)},
    **{f"PowerSGD rank {r}": separate(rank=r, payload_dtype=None) for r in (2, 4, 6, 8, 13)},
    **{f"SeparateAdam tracked {r}, int8": separate(rank=r) for r in (4, 16)},
    **{f"SeparateAdam tracked {r}, int4": separate(rank=r, payload_dtype="int4") for r in (4, 8, 16, 32)},
    "Separate tracked 16 around AdamS, int8": separate(AroundAdamS, rank=16),
    "Separate 16 around AdamS": separate(AroundAdamS, **gaussian(16)),
    **{f"TagcAdamW {d}": Candidate("TagcAdamW", {"density": d}) for d in (0.2, 0.1, 0.0125)},
    **{f"naive top-k {d}": Everywhere("TagcAdamW", {"density": d}) for d in (0.4, 0.025)},
}


def watched(steps: int, lr: float, skip: int) -> dict[str, tuple[float, float]]:
    """`kept` and the residual of every method, over 60 steps after so many."""
    torch.manual_seed(0)
    model = make_gpt()
    matrices, scales = ([p for p in model.parameters() if (p.dim() >= 2) == m] for m in (True, False))
    groups = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    text = corpus.load()[0]
    data = [corpus.batches(text, 8, 64, seed=1 + rank) for rank in range(RANKS)]

    def train(number: int) -> None:
        for _ in range(number):
            for batches in data:
                (model(*next(batches)) / RANKS).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    train(skip)
    with Diagnosis(model, optimizer, WATCHED, START, 1 << 21, None, CANDIDATES) as records:
        train(WATCHED)
    print(f"lr {lr:g}, steps {skip + 1} to {skip + WATCHED}: {records.seconds:.0f} s of diagnosis", flush=True)
    return {row.method: (row.kept, row.residual) for row in records.rows}


def tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's, b: ties count for neither side."""
    pairs = [((a - b), (c - d)) for (a, c), (b, d) in itertools.combinations(zip(x, y, strict=True), 2)]
    signs = [((a > 0) - (a < 0), (c > 0) - (c < 0)) for a, c in pairs]
    untied = math.prod(sum(s[i] != 0 for s in signs) for i in (0, 1))
    return sum(a * c for a, c in signs) / math.sqrt(untied)


def ranks(x: Sequence[float]) -> list[float]:
    return [sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


def rho(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks."""
    both = torch.tensor([ranks(x), ranks(y)], dtype=torch.float64)
    return float(torch.corrcoef(both)[0, 1])


def measure_diagnosis() -> list[dict]:
    losses = {
        (run.steps, run.lr, run.name): result["evals"][-1]["val_loss"]
        for run, result in kept().items()
        if (run.ranks, run.seed, run.width, run.bf16) == (RANKS, 0, 128, False) and run.name in CANDIDATES
    }
    rows = []
    for steps, lr in GROUPS:
        first, after = watched(steps, lr, 0), watched(steps, lr, round(0.15 * steps))
        for (s, rate, name), loss in losses.items():
            if (s, rate) == (steps, lr):
                numbers = {"first": first[name][0], "after": after[name][0], "residual": first[name][1]}
                rows.append({"steps": steps, "lr": lr, "run": name, "loss": loss} | numbers)
    return rows


def show_diagnosis(rows: list[dict]) -> None:
    for steps, lr in GROUPS:
        group = sorted((r for r in rows if (r["steps"], r["lr"]) == (steps, lr)), key=lambda r: r["loss"])
        loss = [r["loss"] for r in group]
        print(f"\n{steps} steps, lr {lr:g}, {len(group)} runs{'':<17}{'loss':>9}{'kept, first':>13}{'kept, after':>13}")
        for r in group:
            print(f"  {r['run']:<40}{r['loss']:>9.4f}{r['first']:>13.3f}{r['after']:>13.3f}")
        for name, score in (("Kendall's tau", tau), ("Spearman's rho", rho)):
            cells = [score([-r[key] for r in group], loss) for key in ("first", "after")]
            print(f"  {name:<49}" + "".join(f"{cell:>13.2f}" for cell in cells))


def diagnose(show: bool) -> None:
    path = RESULTS / "diagnosed.csv"
    if not show:
        write_rows(path, measure_diagnosis(), FIELDS, dict.fromkeys(("loss", "first", "after", "residual"), 4))
    rows = [{k: v if k == "run" else json.loads(v) for k, v in row.items()} for row in read_rows(path)]
    show_diagnosis(rows)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=["steps", "diagnosis"])
    cli.add_argument("--rates", nargs="+", default=["10gbit", "1gbit", "100mbit"], help="of `steps`, as tc writes them")
    cli.add_argument("--rounds", type=int, default=3, help="of `steps`: blocks a method")
    cli.add_argument("--steps", type=int, default=6, help="of `steps`: timed steps of a block")
    cli.add_argument("--show", action="store_true", help="of `diagnosis`: train nothing")
    args = cli.parse_args()
    torch.set_num_threads(1)
    if args.what == "steps":
        predict_steps(args.rates, args.rounds, args.steps)
    else:
        diagnose(args.show)


if __name__ == "__main__":
    main()
