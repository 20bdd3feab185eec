"""Loss against seconds of training on real text over slow links: measured step times x measured losses.

    python bench/time_to_loss.py ladder                        # the ladder's rows, 4 ranks, three rates: ten minutes
    python bench/time_to_loss.py ladder --size 0.9M --rates 100mbit 1gbit --rows "DDP + AdamW" "LocalSteps(Muon) 30"
    python bench/time_to_loss.py ladder --show                 # no network: what is kept

    python bench/time_to_loss.py                               # methods of quality.py, 2 ranks, 100 Mbit/s: 6 minutes
    python bench/time_to_loss.py --rate 1gbit --methods "AdamW (DDP)" "PowerSGD rank 4"
    python bench/time_to_loss.py --validate "AdamW (DDP)" "ScapeAdamS 0.01"    # a minute
    python bench/time_to_loss.py --show

NOT one wall clock. Seconds at step s are the sum of the measured times of the steps up to s, by what each step does:
dense steps at the start, compressed ones after, local steps with and without an exchange. Training steps only, no
evaluation, no start-up. All methods of a rate are timed in one set of processes, in turns. Shaped links need root.

With ``ladder`` losses are those of results/ladder.jsonl, each row at its best settings on seed 0, and rounds of local
steps grow as they did there. Local steps are timed in whole rounds, by means over all ranks. "Compute" is a step of the
same optimizer without communication, while all ranks take one: where ranks share a core, as four do on two cores, it
takes longer than on machines of their own, and the network's part is smaller. "Network" is the rest of the step:
sending, waiting, compressing. Losses of local steps within the run are those of one replica. Step times are kept in
results/time_to_loss-ladder.jsonl, the table and the plot in results/time_to_loss-SIZE.csv and .png.

Without it losses are those of 800-step runs of examples/train_gpt.py (`bench/quality.py time_to_loss` trains what is
missing). --validate trains for real at the rate and says how far the composed seconds are from the clock on the wall.
What a token bucket lets through ahead of the rate is 32 KiB here, and 72 in bench/links.py: most compressed payloads of
this small model would cross in no time. Step times are kept in results/time_to_loss.jsonl, the table and the plot in
results/time_to_loss-RATE.csv and .png, validations in results/time_to_loss-validation.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import _clock
import _ladder_clock
import _ladder_links
import _ladder_runs
import quality
import torch
import torch.distributed as dist
from _clock import RATE, put_on, reached
from _ladder_clock import TIMED
from _ladder_model import SIZES
from _net import Links, bits_per_second
from _runs import TABLES, WEIGHT_DECAY, parts
from _turns import Runner, over_links, take_turns, warn_if_busy
from ladder import choose_products
from quality import RESULTS, ROOT
from torch.nn.parallel import DistributedDataParallel

TABLE = "time_to_loss"
ALONE = "no communication"  # each rank by itself
LEVELS = (1.05, 1.1, 1.2)  # times AdamW's last loss
YARDSTICK = "AdamW (DDP)"
SHORTER = (200, 400)  # steps of AdamW runs, their learning rate falling in that time: dense, and stopping earlier
BURST = 32 * 1024  # bytes
SETTLE = 4  # untimed steps: past the first selection, and PowerSGD's two dense steps
NEVER_COMPRESS = 10**9  # dense steps at the start
CHECK = 60  # steps of a validation run


def work(jobs: list[tuple[str, bool]], rounds: int, steps: int) -> None:
    """One rank: a runner a job, which is a method and whether its dense steps are timed or its compressed ones."""
    sys.path.insert(0, str(ROOT / "examples"))
    import baselines
    import corpus
    import train_gpt

    sys.argv = ["train_gpt.py"]
    args = train_gpt.parse()  # the sizes of the runs whose losses are known
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text, _ = corpus.load()
    batch = functools.partial(next, corpus.batches(text, args.batch, args.context, seed=1 + dist.get_rank()))

    def runner(name: str, dense: bool) -> Runner:
        torch.manual_seed(0)
        model = train_gpt.GPT(args.layers, args.width, args.heads, args.context)
        if name == ALONE:
            return Runner(
                name, model, torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY, fused=True), batch
            )
        make, hook, setting = parts(name)
        if hook == "powersgd":
            baselines.POWERSGD_RANK = int(setting)
        wrapped, warmup = DistributedDataParallel(model), NEVER_COMPRESS if dense else 0
        matrices, scales = ([(n, p) for n, p in model.named_parameters() if (p.dim() >= 2) == m] for m in (True, False))
        optimizer = make([{"params": matrices}, {"params": scales, "weight_decay": 0.0}], args.lr, warmup)
        baseline = baselines.attach(hook, wrapped, argparse.Namespace(warmup=warmup, density=float(setting or 0)))
        return Runner(name, wrapped, optimizer, batch, None if hasattr(optimizer, "stats") else baseline)

    runners = [runner(name, dense) for name, dense in jobs]
    for each in runners:
        for _ in range(SETTLE):
            each.step()
    take_turns(runners, rounds, steps)
    dist.destroy_process_group()


def measure(names: list[str], rate: str, rounds: int, steps: int) -> None:
    """Time the phases that the runs of these methods went through, and keep a line a method."""
    phases = {row["run"]: row["phases"] for row in quality.best_of(TABLE)}
    jobs = [(ALONE, True)]
    for name in names:
        if name not in phases:
            raise SystemExit(f"No run of {name!r} is kept: train it first, python bench/quality.py {TABLE}.")
        kinds = {phase == "dense" for phase in phases[name]}
        jobs += [(name, kind) for kind in sorted(kinds, reverse=True)]
    worker = [sys.executable, __file__, "--worker", json.dumps(jobs), "--rounds", str(rounds), "--steps", str(steps)]
    label, gathered = over_links(worker, 2, rate, BURST)
    outcomes: dict[str, dict[str, list[float]]] = {}
    for result in (result for results in gathered for result in results):
        mine, seconds = outcomes.setdefault(result["method"], {}), result["seconds"]
        for phase, second in zip(result["phases"] or ["dense"] * len(seconds), seconds, strict=True):
            mine.setdefault(phase, []).append(second)
    for name in names:
        if missing := set(phases[name]) - set(outcomes[name]):
            raise SystemExit(f"No timed step of {name!r} was {' or '.join(missing)}: ask for more --rounds.")
    with _clock.KEPT.open("a") as file:
        for name, mine in outcomes.items():
            line = {"run": name, "rate": label, "ranks": 2}
            line["seconds"] = {phase: round(statistics.median(times), 5) for phase, times in mine.items()}
            line["iqr"] = {phase: round(spread(times), 5) for phase, times in mine.items()}
            line["timed"] = {phase: len(times) // 2 for phase, times in mine.items()}
            file.write(json.dumps(line) + "\n")
    warn_if_busy(statistics.mean(result["cpu_share"] for result in gathered[0]))
    if label != rate:
        raise SystemExit(f"The links were not shaped: kept as {label!r}; show it with --rate {label} --show.")


def spread(times: list[float]) -> float:
    low, _, high = statistics.quantiles(times, n=4)
    return high - low


def validate(names: list[str], rate: str) -> None:
    """Train for real over links of the rate: the seconds of all steps beside what the kept step times make of them."""
    path, lrs = RESULTS / "time_to_loss-validation.csv", {row["run"]: row["lr"] for row in quality.best_of(TABLE)}
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for name in names:
        with Links(2, rate, BURST) as links, tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run.json")
            worker = [sys.executable, quality.__file__, "--worker", name, str(lrs[name]), str(CHECK), "0", out]
            links.run(worker, env={"CUDA_VISIBLE_DEVICES": ""})
            label, run = rate if links.private else "loopback", json.loads(Path(out).read_text())
        composed = _clock.seconds_at(CHECK, run["phases"], _clock.timings(label)[name])
        wall = run["evals"][-1]["seconds"]
        print(f"{name}, {label}, {CHECK} steps: composed {composed:.1f} s, wall {wall:.1f} s, {composed / wall:.3f}")
        rows = [row for row in rows if (row["run"], row["rate"]) != (name, label)]
        phases = " ".join(f"{phase}:{count}" for phase, count in run["phases"].items())
        rows.append(
            {"run": name, "rate": label, "phases": phases, "composed_s": round(composed, 2), "wall_s": round(wall, 2)}
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def shorter(lr: float) -> list[dict]:
    """Kept runs of AdamW over fewer steps, at the rate that was best."""
    there = quality.kept()
    runs = [there[key] for steps in SHORTER if (key := quality.Run(YARDSTICK, lr, steps)) in there]
    return [{**run, "loss": run["evals"][-1]["val_loss"], "bytes_in_all": run["evals"][-1]["bytes"]} for run in runs]


def table(rate: str) -> list[dict]:
    """A row for each method that has run and was timed: seconds and bytes in all, and to reach each level."""
    rows = quality.best_of(TABLE)
    rows += shorter(rows[0]["lr"])
    put_on(rows, rate)
    for row in rows:
        if row["steps"] in SHORTER:
            row["run"] += f", {row['steps']} steps"
    if untimed := [row["run"] for row in rows if "dense_s" not in row]:
        print(f"Not timed at {rate} yet: {', '.join(untimed)}.")
    first = rows[0]["loss"]
    rows = [row for row in rows if "dense_s" in row]
    for row in rows:
        row["to_first"] = row["loss"] / first
        row["seconds"] = row["evals"][-1]["seconds"]
        for level in LEVELS:
            row[f"seconds_to_{level}"] = reached(level * first, row["evals"], "seconds")
    return rows


COLUMNS = {  # key: heading, format, digits kept in the CSV
    "steps": ("steps", "7d", None),
    "loss": ("loss", "8.3f", 4),
    "to_first": ("x AdamW", "9.3f", 4),
    "dense_s": ("dense s", "9.3f", 4),
    "compressed_s": ("compr. s", "10.3f", 4),
    "bytes_in_all": ("bytes", "15,.0f", None),
    "seconds": ("s in all", "10.1f", 1),
    **{f"seconds_to_{level}": (f"s to x{level}", "11.1f", 1) for level in LEVELS},
}


def show(rows: list[dict], rate: str) -> None:
    """Print the table and write it as CSV. dense s, compr. s: a step before and after the dense start."""
    widths = [len(format(0, form)) for _, form, _ in COLUMNS.values()]
    heads = "".join(head.rjust(width) for (head, *_), width in zip(COLUMNS.values(), widths, strict=True))
    single = _clock.timings(rate).get(ALONE, {}).get("dense", float("nan"))
    print(f"\n{rate}, 2 ranks; a step without communication takes {single:.3f} s\n{'run (lr)':<38}{heads}")
    kept = []
    for row in rows:
        values = {key: None if row[key] is None or row[key] != row[key] else row[key] for key in COLUMNS}
        cells = [
            "-".rjust(width) if values[key] is None else format(values[key], form)
            for (key, (_, form, _)), width in zip(COLUMNS.items(), widths, strict=True)
        ]
        print(f"{row['run'] + ' (' + format(row['lr'], 'g') + ')':<38}{''.join(cells)}")
        rounded = {k: v if v is None or COLUMNS[k][2] is None else round(v, COLUMNS[k][2]) for k, v in values.items()}
        kept.append({"run": row["run"], "lr": row["lr"], **rounded})
    with (RESULTS / f"time_to_loss-{rate}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, kept[0].keys())
        writer.writeheader()
        writer.writerows(kept)


def add_ladder(cli: argparse.ArgumentParser) -> None:
    cli.add_argument("--size", choices=SIZES, default="0.2M")
    cli.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "1gbit"], help="as tc writes them")
    cli.add_argument("--rows", nargs="+", choices=TIMED, default=TIMED, metavar="ROW", help=", ".join(TIMED))
    cli.add_argument("--ranks", type=int, default=4)
    cli.add_argument("--blocks", type=int, default=3, help="of timed steps, for each row")
    cli.add_argument("--steps", type=int, default=14, help="timed steps of a block; a round has one more")
    cli.add_argument("--tokens", type=float, default=20, help="per parameter, of the runs whose losses are taken")
    cli.add_argument("--products", choices=["bfloat16", "float32"], help="default: what is faster here")
    cli.add_argument("--show", action="store_true", help="time nothing")


def run_ladder(args: argparse.Namespace) -> None:
    products = args.products or choose_products("cpu")
    for rate in args.rates:
        bits_per_second(rate)
    for rate in () if args.show else args.rates:
        print(f"{time.strftime('%H:%M:%S')} {args.size}, {args.ranks} ranks, {rate}, {products}", flush=True)
        _ladder_links.measure(args.rows, args.size, args.ranks, rate, products, args.blocks, args.steps)
    others = {"ranks": args.ranks, "tokens": args.tokens, "products": products}
    lines = _ladder_clock.tabulate(_ladder_runs.kept(), _ladder_clock.kept(), args.size, **others)
    if not lines:
        raise SystemExit(
            f"No rate has DDP + AdamW of {args.size} timed, or no such run has finished (bench/ladder.py)."
        )
    _ladder_clock.show(lines)
    _ladder_clock.save(lines, RESULTS / f"time_to_loss-{args.size}.csv")
    _ladder_clock.draw(lines, RESULTS / f"time_to_loss-{args.size}.png")


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rate", default=RATE, help="as tc writes it, or 'unshaped' ('loopback' to show)")
    cli.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=TABLES[TABLE].rows,
        default=list(TABLES[TABLE].rows),
        help="methods; a wrong name lists them",
    )
    cli.add_argument("--rounds", type=int, default=6, help="blocks of timed steps a method and phase")
    cli.add_argument("--steps", type=int, default=7, help="timed steps a block")
    what = cli.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="time nothing")
    what.add_argument(
        "--validate",
        nargs="+",
        metavar="METHOD",
        choices=TABLES[TABLE].rows,
        help="train these for real, time nothing else",
    )
    cli.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    add_ladder(
        cli.add_subparsers(dest="runs", metavar="ladder").add_parser("ladder", help="the rows of bench/ladder.py")
    )
    args = cli.parse_args()
    if args.runs == "ladder":
        run_ladder(args)
        return
    if args.worker:
        work(args.worker, args.rounds, args.steps)
        return
    if args.rate not in ("unshaped", "loopback"):
        bits_per_second(args.rate)
    if args.validate:
        validate(args.validate, args.rate)
        return
    if not args.show:
        best = quality.best_of(TABLE)[0]["lr"]
        for steps in SHORTER:
            if (run := quality.Run(YARDSTICK, best, steps)) not in quality.kept():
                quality.train(run)
        measure(args.methods, args.rate, args.rounds, args.steps)
    if rows := table(args.rate):
        show(rows, args.rate)
        quality.draw(rows, ("seconds", "bytes"), RESULTS / f"time_to_loss-{args.rate}.png", args.rate)


if __name__ == "__main__":
    main()
