"""`compopt-advise`: predicts a training run with each method, and recommends one.

    compopt-advise --parameters 350M --ranks 8 --link 1gbit --step-time 400
    compopt-advise --parameters 7B --ranks 64 --ranks-per-node 8 --link 50gbit --step-time 2000
    compopt-advise --parameters 1.5B --ranks 4 --link 25mbit --wan --step-time 9000 --memory 80G
    compopt-advise --ranks 8 --link 100mbit --profile train.py
    compopt-advise --pipeline 2 --hidden 768 --layers 12 --sequence 512 --micro-batch 8 --link 1gbit

To measure the network and the machines instead of naming them, run `torchrun ... -m compopt.probe
--out probe.json` on the machines of the training, and pass `--probed probe.json`. The same command
is `python -m compopt advise`. (There is no command `compopt`, because bash has a builtin of that
name.)

With `--tensor` or `--pipeline` it predicts a step with each compressor of activations.

The same from Python: `print(compopt.costmodel.advise(model, ranks=8, link_bits_per_s=1e9,
step_s=0.4))`, and `compopt.costmodel.advise_layers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from .activation_advice import advise_layers
from .advice import WAN_LATENCY, advise
from .decision import at_link_rate
from .formatting import (
    format_count,
    format_seconds,
    make_figure,
    parse_quantity,
    parse_rate,
    save_figure,
)
from .hardware import DEVICES
from .methods import Workload
from .pipeline import Layers
from .prediction import Situation, predict_rows
from .probe import read_layer_probe, read_probe
from .scripts import profile_script

# Options of only one of the two kinds of advice.
GRADIENT_OPTIONS = (
    "parameters",
    "ranks",
    "ranks_per_node",
    "profile",
    "overlap",
    "memory",
    "shard",
    "plot",
    "steps",
    "tokens_per_parameter",
)
LAYER_SIZES = "hidden", "layers", "sequence", "micro_batch"
LAYER_OPTIONS = *LAYER_SIZES, "micro_batches", "activation_bytes"


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Predict what compression would make of a training run."
    )
    add = parser.add_argument
    add("--parameters", type=parse_quantity, help="of the model, for example 350M (or --profile)")
    add("--ranks", type=int, help="processes in all (or give --probed)")
    add("--ranks-per-node", type=int, help="of them, in one machine (else 1)")
    add("--link", type=parse_rate, help="of one rank to other machines, for example 1gbit")
    add("--inside", type=parse_rate, metavar="RATE", help="of one rank inside its machine")
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("--latency", type=float, metavar="MS", help="of one message (else 0.05)")
    wait.add_argument("--wan", action="store_true", help="a latency of 30 ms, as between sites")
    add("--step-time", type=float, metavar="MS", help="of one process, without communication")
    add("--profile", nargs=argparse.REMAINDER, metavar="SCRIPT", help="measure it (give it last)")
    add("--overlap", type=float, metavar="MS", help="of it that hides communication (else 60 %%)")
    add("--steps", type=int, help="of the run (else 10,000)")
    add("--tokens-per-parameter", type=float, metavar="N", help="of the run, in all (else 20)")
    add("--probed", metavar="FILE", help="written by compopt.probe: ranks, link, local speed")
    add("--device", choices=DEVICES, help="for the speed of local work, and memory (else a100)")
    add("--memory-bandwidth", type=parse_quantity, metavar="BYTES", help="a second, as 3.3T")
    add("--memory", type=parse_quantity, metavar="BYTES", help="of one device, for example 80G")
    add("--shard", type=int, help="ranks that hold one copy of the model together (FSDP2)")
    budget = "over AdamW's loss, or of the accuracy of activations (0.02)"
    add("--loss-budget", type=float, default=0.02, metavar="SHARE", help=budget)
    add("--all", action="store_true", help="show the methods that others beat, too")
    add("--plot", metavar="FILE.png", help="speed-up over link rates")
    group = parser.add_argument_group("activations of tensor- and pipeline-parallel layers")
    group.add_argument("--tensor", type=int, help="ranks that share a layer")
    group.add_argument("--pipeline", type=int, help="stages; --link is the one between them")
    group.add_argument("--hidden", type=int, help="width of the layers")
    group.add_argument("--layers", type=int, help="how many, in all stages")
    group.add_argument("--sequence", type=int, help="tokens")
    group.add_argument("--micro-batch", type=int, help="sequences")
    group.add_argument("--micro-batches", type=int, help="of a step (else 4 for each stage)")
    group.add_argument("--activation-bytes", type=int, help="of a number, 2 or 4 (else 2)")
    return parser


def list_given(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Of these options those that were given, as they are written."""
    return [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) is not None]


def read_latency(options: argparse.Namespace) -> tuple[float | None, str]:
    """Return the seconds of a message and their source; None where they are not given."""
    if options.wan:
        return WAN_LATENCY, "assumed: --wan"
    return (None, "") if options.latency is None else (options.latency / 1e3, "given")


def gradient_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `advise`; raises ValueError for a missing one."""
    arguments: dict[str, Any] = read_probe(options.probed) if options.probed else {}
    sources = {"latency": "measured"} if options.probed else {}
    if options.probed and options.link is None:
        sources["link"] = "measured"
    for name, value in (("ranks", options.ranks), ("link_bits_per_s", options.link)):
        arguments |= {name: value} if value is not None else {}
    if "ranks" not in arguments or "link_bits_per_s" not in arguments:
        raise ValueError("The network is missing: give --ranks and --link, or --probed FILE.")
    latency, source = read_latency(options)
    if latency is not None:
        arguments["latency_s"], sources["latency"] = latency, source
    model: Workload | int | None = round(options.parameters) if options.parameters else None
    step_s = options.step_time / 1e3 if options.step_time is not None else None
    if options.profile:
        measured_s, work = profile_script(options.profile[0], options.profile[1:])
        sources |= {"computation": "measured"} if step_s is None else {}
        step_s, model = measured_s if step_s is None else step_s, model or work
    if model is None or step_s is None:
        raise ValueError(
            "The model is missing: give --parameters and --step-time, or --profile SCRIPT."
        )
    if options.memory_bandwidth:
        flops = DEVICES[options.device or "a100"].local[1]
        arguments["local"], sources["own work"] = (options.memory_bandwidth, flops), "given"
    elif options.device:
        arguments.pop("local", None)
    return arguments | {
        "model": model,
        "step_s": step_s,
        "overlap_s": None if options.overlap is None else options.overlap / 1e3,
        "device": options.device,
        "memory_bytes": options.memory,
        "shard": options.shard,
        "loss_budget": options.loss_budget,
        "ranks_per_node": options.ranks_per_node,
        "inside_bits_per_s": options.inside,
        "steps": options.steps,
        "tokens_per_parameter": options.tokens_per_parameter,
        "sources": sources,
    }


def layer_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `advise_layers`; raises ValueError for a missing or invalid one."""
    if misplaced := list_given(options, GRADIENT_OPTIONS):
        raise ValueError(
            f"{misplaced[0]} is for advice on gradients: leave out --tensor, --pipeline."
        )
    if len(list_given(options, LAYER_SIZES)) < len(LAYER_SIZES):
        raise ValueError(
            "The layers are missing: give --hidden, --layers, --sequence and --micro-batch."
        )
    arguments: dict[str, Any] = read_layer_probe(options.probed) if options.probed else {}
    measured = ("link", "link latency", "inside", "inside latency") if options.probed else ()
    sources = dict.fromkeys(measured, "measured")
    if options.probed and options.tensor not in (None, arguments["tensor"]):
        raise ValueError(
            f"--probed {options.probed} was measured with --tensor {arguments['tensor']}."
        )
    nbytes = arguments.pop("activation_bytes", 2)
    for name in ("tensor", "pipeline"):
        value = getattr(options, name)
        arguments[name] = arguments.get(name, 1) if value is None else value
    for name, value in (("link", options.link), ("inside", options.inside)):
        if value is not None:
            arguments[f"{name}_bits_per_s"], sources[name] = value, "given"
    latency, source = read_latency(options)
    if latency is not None:
        arguments["latency_s"], sources["link latency"] = latency, source
    if options.micro_batches is None:
        sources["micro-batches"] = "assumed"
    chosen = DEVICES[options.device or "a100"].speed
    if options.memory_bandwidth:
        speeds = options.memory_bandwidth, chosen.flops_per_s, chosen.half_flops_per_s
        arguments["local"], sources["own work"] = speeds, "bandwidth given"
    elif options.device:
        arguments = {n: value for n, value in arguments.items() if n not in ("local", "costs")}
    stages = max(1, arguments["pipeline"])
    work = Layers(
        options.hidden,
        options.layers,
        options.sequence,
        options.micro_batch,
        4 * stages if options.micro_batches is None else options.micro_batches,
        nbytes if options.activation_bytes is None else options.activation_bytes,
    )
    return arguments | {
        "work": work,
        "step_s": options.step_time / 1e3 if options.step_time is not None else None,
        "device": options.device,
        "loss_budget": options.loss_budget,
        "sources": sources,
    }


def plot_speedups(path: str, situation: Situation) -> None:
    """Save a PNG: speed-up of every method's run over link rates from 10 Mbit/s to 100 Gbit/s."""
    figure, axes = make_figure(f"--plot {path}", path)
    rates = [10 ** (exponent / 10) for exponent in range(70, 111)]
    tables = [predict_rows(at_link_rate(situation, rate)) for rate in rates]
    for i, row in enumerate(tables[0]):
        speedups = [table[i].run for table in tables]
        style = "-" if row.ours else "--"
        axes.plot([rate / 1e6 for rate in rates], speedups, style, label=row.method)
    machine = situation.machine
    axes.axvline(8 * machine.link_bytes_per_s / 1e6, color="grey", linestyle=":", label="your link")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="link of a rank, Mbit/s",
        ylabel="speed-up of the run over AdamW+DDP",
        title=f"{format_count(situation.work.parameters)} parameters, {machine.ranks} ranks, "
        f"{format_seconds(situation.compute_s)} of computation",
    )
    axes.legend(fontsize=8)
    save_figure(figure, path)


def main(argv: Sequence[str] | None = None, prog: str = "compopt-advise") -> None:
    """Run the command `compopt-advise`; ``argv`` are its arguments, by default the process's."""
    parser = make_parser(prog)
    options = parser.parse_args(argv)
    try:
        if options.tensor is not None or options.pipeline is not None:
            arguments = layer_arguments(options)
            print(advise_layers(arguments.pop("work"), **arguments))
            return
        if misplaced := list_given(options, LAYER_OPTIONS):
            raise ValueError(
                f"{misplaced[0]} is for activations: give --tensor, --pipeline or both."
            )
        arguments = gradient_arguments(options)
        advice = advise(arguments.pop("model"), **arguments)
        if options.plot:
            plot_speedups(options.plot, advice.situation)
        print(advice.format(options.all))
    except (ValueError, OverflowError) as error:
        parser.error(str(error))
