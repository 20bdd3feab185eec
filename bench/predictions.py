"""Predictions of the advice from a probe's file alone, beside the steps that follow it on the same links.

    sudo .venv/bin/python bench/predictions.py                               # three rates, six minutes
    sudo .venv/bin/python bench/predictions.py --rates 1gbit --steps 20

At each rate `compopt.probe` measures link and memory, as a user would have it do, and links.py's methods then take
their turns. A prediction knows the probe's file and the step without communication, and nothing of the method's own
steps. Prints a table, and saves results/predictions.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

from _interleave import over_links, warn_if_busy
from _model import make_model
from _net import Links
from links import RESULTS, summarise

from compopt.costmodel import METHODS, Cost, Workload, advise, step_seconds
from compopt.planning.probe import read_probe

RANKS = 2
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


def compare(rate: str, work: Workload, rounds: int, steps: int) -> list[dict]:
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


def show(rows: list[dict]) -> None:
    heads = f"{'alone ms':>9}{'own':>6}{'waits':>7}{'predicted':>11}{'measured':>10}{'error':>8}"
    print(f"\n{'rate':<10}{'method':<11}{heads}")
    for row in rows:
        parts = "".join(
            format(1e3 * row[key], f"{width}.0f") for key, width in (("alone_s", 9), ("own_s", 6), ("exchange_s", 7))
        )
        totals = f"{1e3 * row['predicted_s']:>11.0f}{1e3 * row['measured_s']:>10.0f}{row['error']:>+8.1%}"
        print(f"{row['rate']:<10}{row['method']:<11}{parts}{totals}")
    print(f"largest error: {max(abs(row['error']) for row in rows):.1%} over {len(rows)} steps", flush=True)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rates", nargs="+", default=["10gbit", "1gbit", "100mbit"], help="as tc writes them")
    cli.add_argument("--rounds", type=int, default=3, help="blocks a method")
    cli.add_argument("--steps", type=int, default=6, help="timed steps a block")
    args = cli.parse_args()
    work = Workload.of(make_model().named_parameters())
    rows: list[dict] = []
    for rate in args.rates:
        results = compare(rate, work, args.rounds, args.steps)
        show(results)
        rows += results
    with (RESULTS / "predictions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(
            row | {key: round(row[key], 4) for key in row if key.endswith("_s") or key == "error"} for row in rows
        )


if __name__ == "__main__":
    main()
