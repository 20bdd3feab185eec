"""`compopt-advise`: what each method would make of a training step, and whether that is worth it.

    compopt-advise --parameters 350M --ranks 8 --link 1gbit --step-time 400
    compopt-advise --parameters 7B --ranks 64 --link 25gbit --step-time 2000 --loss-budget 0.01
    compopt-advise --ranks 8 --link 100mbit --profile train.py
    compopt-advise --pipeline 2 --hidden 768 --layers 12 --sequence 512 --micro-batch 8 --link 1gbit

To measure the network and the machines instead of naming them, run `torchrun ... -m compopt.probe
--out probe.json` on those that will train, and give `--probed probe.json`. `python -m compopt
advise` is the same command as this one. (`compopt` alone cannot be one: bash has a builtin of that
name.)

With `--tensor` or `--pipeline` it is about activations: what each of their compressors would make
of a step.

The same from Python: `print(advise(model, ranks=8, link_bits_per_s=1e9, step_s=0.4))`, and
`advise_layers`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .costmodel import (
    DEVICES,
    Advice,
    Layers,
    LayersAdvice,
    Row,
    Situation,
    Workload,
    advise,
    advise_layers,
    rows_of,
)
from .costmodel.measure import profile
from .probe import read, read_layers

__all__ = [
    "Advice",
    "LayersAdvice",
    "Row",
    "advise",
    "advise_layers",
    "main",
    "plot",
    "quantity",
]
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def quantity(text: str, suffix: str = "") -> float:
    """'350M', '1.8b' or '12000' as a number; with suffix 'bit', a rate as tc writes it ('100mbit',
    '2.5gbit').
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:e\d{{1,2}})?)([kmgbt]?){suffix}", text.strip().lower())
    if match is None or float(match[1]) == 0:
        example = "100mbit or 2.5gbit" if suffix else "350M, 1.8B or 12000"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: write it like {example}.")
    return float(match[1]) * UNITS[match[2]]


def plot(path: str, situation: Situation) -> None:
    """Save a PNG: speed-up of every method's run over link rates from 10 Mbit/s to 100 Gbit/s."""
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {Path(path).resolve().parent}.")
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = [10 ** (exponent / 10) for exponent in range(70, 111)]
    machine = situation.machine
    tables = [
        rows_of(replace(situation, machine=replace(machine, link_bytes_per_s=rate / 8)))
        for rate in rates
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for i, row in enumerate(tables[0]):
        style = "-" if row.ours else "--"
        axes.plot(
            [rate / 1e6 for rate in rates],
            [table[i].run for table in tables],
            style,
            label=row.method,
        )
    axes.axvline(8 * machine.link_bytes_per_s / 1e6, color="grey", linestyle=":", label="your link")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="link of a rank, Mbit/s",
        ylabel="speed-up of the run over AdamW+DDP",
    )
    axes.set_title(
        f"{situation.work.parameters / 1e6:.4g} M parameters a rank, {machine.ranks} replicas, "
        f"{situation.compute_s * 1e3:.4g} ms of computation"
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Predict what compression would make of a training run."
    )
    parser.add_argument(
        "--parameters", type=quantity, help="of the model, for example 350M (or give --profile)"
    )
    parser.add_argument("--ranks", type=int, help="processes in all (or give --probed)")
    parser.add_argument("--link", type=_rate, help="of one rank, for example 1gbit")
    parser.add_argument(
        "--step-time", type=float, metavar="MS", help="of one process, without communication"
    )
    parser.add_argument(
        "--profile", nargs=argparse.REMAINDER, metavar="SCRIPT", help="measure that (give it last)"
    )
    parser.add_argument(
        "--overlap", type=float, metavar="MS", help="of it that hides communication (else 60 %%)"
    )
    parser.add_argument(
        "--probed", metavar="FILE", help="what compopt.probe measured: ranks, link and local speed"
    )
    parser.add_argument(
        "--device", choices=DEVICES, help="for the speed of local work, and memory (else a100)"
    )
    parser.add_argument(
        "--memory-bandwidth", type=quantity, metavar="BYTES", help="a second, for example 3.3T"
    )
    parser.add_argument(
        "--memory", type=quantity, metavar="BYTES", help="of one device, for example 80G"
    )
    parser.add_argument(
        "--shard", type=int, help="ranks that hold one copy of the model together (FSDP in a node)"
    )
    parser.add_argument(
        "--loss-budget", type=float, default=0.02, metavar="SHARE", help="over AdamW's loss (0.02)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="speed-up over link rates")
    group = parser.add_argument_group("activations of tensor- and pipeline-parallel layers")
    group.add_argument("--tensor", type=int, help="ranks that share a layer")
    group.add_argument("--pipeline", type=int, help="stages; --link is the one between them")
    group.add_argument("--inside", type=_rate, metavar="RATE", help="link of a rank to those")
    group.add_argument("--hidden", type=int, help="width of the layers")
    group.add_argument("--layers", type=int, help="how many, in all stages")
    group.add_argument("--sequence", type=int, help="tokens")
    group.add_argument("--micro-batch", type=int, help="sequences")
    group.add_argument("--micro-batches", type=int, help="of a step (else 4 for each stage)")
    group.add_argument("--activation-bytes", type=int, help="of a number, 2 or 4 (else 2)")
    return parser


def _rate(text: str) -> float:
    return quantity(text, "bit")


# What only one of the two kinds of advice understands.
GRADIENTS = "parameters", "ranks", "profile", "overlap", "memory", "shard", "plot"
SIZES = "hidden", "layers", "sequence", "micro_batch"
ACTIVATIONS = *SIZES, "micro_batches", "inside", "activation_bytes"


def _given(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Of these options those that were given, as they are written."""
    return [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) is not None]


def _asked_layers(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `advise_layers`; ValueError says what is missing or out of place."""
    if wrong := _given(options, GRADIENTS):
        raise ValueError(f"{wrong[0]} is for advice on gradients: leave out --tensor, --pipeline.")
    if len(_given(options, SIZES)) < len(SIZES):
        raise ValueError(
            "The layers are missing: give --hidden, --layers, --sequence and --micro-batch."
        )
    asked: dict[str, Any] = read_layers(options.probed) if options.probed else {}
    measured = ("link", "link latency", "inside", "inside latency") if options.probed else ()
    sources = dict.fromkeys(measured, "measured")
    if options.probed and options.tensor not in (None, asked["tensor"]):
        raise ValueError(f"--probed {options.probed} was measured with --tensor {asked['tensor']}.")
    nbytes = asked.pop("activation_bytes", 2)
    for name in ("tensor", "pipeline"):
        value = getattr(options, name)
        asked[name] = asked.get(name, 1) if value is None else value
    for name, value in (("link", options.link), ("inside", options.inside)):
        if value is not None:
            asked[f"{name}_bits_per_s"], sources[name] = value, "given"
    if options.micro_batches is None:
        sources["micro-batches"] = "assumed"
    chosen = DEVICES[options.device or "a100"].speed
    if options.memory_bandwidth:
        asked["local"] = (
            options.memory_bandwidth,
            chosen.flops_per_s,
            chosen.half_flops_per_s,
        )
        sources["own work"] = "bandwidth given"
    elif options.device:
        asked = {name: asked[name] for name in asked if name not in ("local", "costs")}
    work = Layers(
        options.hidden,
        options.layers,
        options.sequence,
        options.micro_batch,
        4 * max(1, asked["pipeline"]) if options.micro_batches is None else options.micro_batches,
        nbytes if options.activation_bytes is None else options.activation_bytes,
    )
    return asked | {
        "work": work,
        "step_s": options.step_time / 1e3 if options.step_time is not None else None,
        "device": options.device,
        "loss_budget": options.loss_budget,
        "sources": sources,
    }


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `advise`; ValueError says what is missing."""
    asked: dict[str, Any] = read(options.probed) if options.probed else {}
    sources = {"link": "measured"} if options.probed and options.link is None else {}
    asked |= {"ranks": options.ranks} if options.ranks is not None else {}
    asked |= {"link_bits_per_s": options.link} if options.link is not None else {}
    if "ranks" not in asked or "link_bits_per_s" not in asked:
        raise ValueError("The network is missing: give --ranks and --link, or --probed FILE.")
    model: Workload | int | None = round(options.parameters) if options.parameters else None
    step_s = options.step_time / 1e3 if options.step_time is not None else None
    if options.profile:
        measured, found = profile(options.profile[0], options.profile[1:])
        sources |= {"computation": "measured"} if step_s is None else {}
        step_s, model = measured if step_s is None else step_s, model or found
    if model is None or step_s is None:
        raise ValueError(
            "The model is missing: give --parameters and --step-time, or --profile SCRIPT."
        )
    if options.memory_bandwidth:
        asked["local"] = options.memory_bandwidth, DEVICES[options.device or "a100"].local[1]
        sources["own work"] = "bandwidth given"
    elif options.device:
        asked.pop("local", None)
    return asked | {
        "model": model,
        "step_s": step_s,
        "overlap_s": None if options.overlap is None else options.overlap / 1e3,
        "device": options.device,
        "memory_bytes": options.memory,
        "shard": options.shard,
        "loss_budget": options.loss_budget,
        "sources": sources,
    }


def main(argv: Sequence[str] | None = None, prog: str = "compopt-advise") -> None:
    """The command `compopt-advise`; ``argv`` are its arguments, by default the process's."""
    parser = _parser(prog)
    options = parser.parse_args(argv)
    try:
        if options.tensor is not None or options.pipeline is not None:
            asked = _asked_layers(options)
            print(advise_layers(asked.pop("work"), **asked))
            return
        if wrong := _given(options, ACTIVATIONS):
            raise ValueError(f"{wrong[0]} is for activations: give --tensor, --pipeline or both.")
        asked = _asked(options)
        advice = advise(asked.pop("model"), **asked)
        if options.plot:
            plot(options.plot, advice.situation)
        print(advice)
    except (ValueError, OverflowError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
