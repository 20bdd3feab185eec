"""Steps of a round of local steps: what the exchange at its end costs, spread over the round and at its worst.

    sudo .venv/bin/python bench/rounds.py                        # 100 Mbit/s and loopback, ten minutes
    sudo .venv/bin/python bench/rounds.py --rates 100mbit --delays 0 1 30

A rank on its own ("none"), DDP with AdamW, and LocalSteps around the same AdamW, of 10 M parameters, in one piece with
each of the delays and in fragments that are exchanged at different steps of a round, take turns in one set of processes
(_interleave.py), block by block of two rounds. Means tell what a run takes, and the slowest step against
the median whether training stands still once a round; "none" has slow steps too, of which the machine is the cause.
Over a shaped link DDP is left out: links.py has it. Prints a table a rate, and saves results/rounds.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys

import torch
import torch.distributed as dist
from _interleave import Runner, interleave, over_links, warn_if_busy
from _model import Batches, make_model
from links import RESULTS, Factory, Method, alone, ddp, fused_adamw
from torch import nn

import compopt


def local(every: int, delay: int, fragments: int) -> Factory:
    def make(model: nn.Module, group: dist.ProcessGroup) -> Method:
        optimizer = compopt.LocalSteps(
            fused_adamw(model), every, delay=delay, fragments=fragments, every_warmup_steps=0, process_group=group
        )
        return nn.parallel.DistributedDataParallel(model, process_group=group), optimizer

    return make


def work(shaped: bool, every: int, delays: list[int], fragments: int, blocks: int) -> None:
    """One rank. Blocks begin in the middle of a round: its end is not in the step that opens a block untimed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    factories = {"none": alone, **({} if shaped else {"ddp": ddp})}
    factories |= {f"delay={delay}": local(every, delay, 1) for delay in delays}
    factories[f"delay=1, fragments={fragments}"] = local(every, 1, fragments)
    batches, runners = Batches(dist.get_rank()), []
    for name, factory in factories.items():
        runners.append(Runner(name, *factory(make_model(), dist.new_group()), batches.next))
        for _ in range(every + every // 2):
            runners[-1].step()
    interleave(runners, blocks, 2 * every - 1)
    dist.destroy_process_group()


def summarise(rate: str, every: int, gathered: list[tuple[dict, ...]]) -> list[dict]:
    rows = []
    for results in gathered:
        seconds = [second for result in results for second in result["seconds"]]
        rows.append(
            {
                "rate": rate,
                "method": results[0]["method"],
                "every": every,
                "mean_ms": 1e3 * statistics.mean(seconds),
                "median_ms": 1e3 * statistics.median(seconds),
                "slowest_to_median": max(seconds) / statistics.median(seconds),
                "socket_bytes": results[0]["bytes"],
                "cpu_share": statistics.mean(result["cpu_share"] for result in results),
            }
        )
    for row in rows:
        row["mean_to_none"] = row["mean_ms"] / rows[0]["mean_ms"]
    return rows


def show(rows: list[dict]) -> None:
    print(f"\n{rows[0]['rate']}, rounds of {rows[0]['every']} steps")
    print(f"{'method':<22}{'mean ms':>9}{'x none':>8}{'median ms':>11}{'slowest':>9}{'socket B/step':>15}")
    for row in rows:
        sent = "-" if row["socket_bytes"] is None else f"{row['socket_bytes']:,.0f}"
        ratios = f"{row['mean_to_none']:>8.3f}{row['median_ms']:>11.1f}{row['slowest_to_median']:>8.2f}x"
        print(f"{row['method']:<22}{row['mean_ms']:>9.1f}{ratios}{sent:>15}", flush=True)
    warn_if_busy(rows[0]["cpu_share"])


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rates", nargs="+", default=["100mbit", "unshaped"])
    cli.add_argument("--every", type=int, default=30, help="steps of a round")
    cli.add_argument("--delays", type=int, nargs="+", default=[0, 1, 30], help="steps until an exchange is applied")
    cli.add_argument("--fragments", type=int, default=4, help="of the model, beside one piece")
    cli.add_argument("--blocks", type=int, default=4, help="of two rounds, for each method")
    cli.add_argument("--worker", choices=["shaped", "unshaped"], help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.worker:
        work(args.worker == "shaped", args.every, args.delays, args.fragments, args.blocks)
        return
    rows: list[dict] = []
    for rate in args.rates:
        kind = "unshaped" if rate == "unshaped" else "shaped"
        numbers = [
            "--every",
            args.every,
            "--fragments",
            args.fragments,
            "--blocks",
            args.blocks,
            "--delays",
            *args.delays,
        ]
        label, gathered = over_links([sys.executable, __file__, "--worker", kind, *map(str, numbers)], 2, rate)
        rows += summarise(label, args.every, gathered)
        show(rows[-len(gathered) :])
    with (RESULTS / "rounds.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
