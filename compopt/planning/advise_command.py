"""`compopt-advise`: predicts a training run with each method, and recommends one.

    compopt-advise --parameters 350M --ranks 8 --link 1gbit --step-time 400
    compopt-advise --parameters 7B --ranks 64 --ranks-per-node 8 --link 50gbit --step-time 2000
    compopt-advise --parameters 1.5B --ranks 4 --link 25mbit --wan --step-time 9000 --memory 80G
    compopt-advise --parameters 1.5B --ranks 16 --sites 2 --link 1gbit --wan --step-time 2000
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
from collections.abc import Iterable, Sequence
from typing import Any

from .activation_advice import Layers, advise_layers
from .advice import WAN_LATENCY, advise
from .figures import plot_speedups
from .formatting import (
    parse_quantity,
    parse_rate,
    print_report,
)
from .hardware import DEVICES, find_device
from .link_probe import read_probe
from .scripts import profile_script
from .workload import Workload

# Options, and the arguments of `advise` and `advise_layers` that they are: of both, and of one.
COMMON_ARGUMENTS = {
    "link": "link_bits_per_s",
    "inside": "inside_bits_per_s",
    "latency": "latency_s",
    "step_time": "step_s",
    "device": "device",
    "loss_budget": "loss_budget",
}
GRADIENT_ARGUMENTS = {
    "ranks": "ranks",
    "ranks_per_node": "ranks_per_node",
    "sites": "sites",
    "overlap": "overlap_s",
    "memory": "memory_bytes",
    "shard": "shard",
    "steps": "steps",
    "tokens_per_parameter": "tokens_per_parameter",
    "save_every": "save_every",
    "frozen": "frozen_bytes",
}
LAYER_ARGUMENTS = {"tensor": "tensor", "pipeline": "pipeline"}
LAYER_SIZES = ("hidden", "layers", "sequence", "micro_batch")
# Options of only one of the two kinds of advice.
GRADIENT_OPTIONS = (*GRADIENT_ARGUMENTS, "parameters", "lora", "profile", "plot")
LAYER_OPTIONS = (*LAYER_SIZES, "micro_batches", "activation_bytes")


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Predict what compression would make of a training run."
    )
    add, ms = parser.add_argument, parse_milliseconds
    add("--parameters", type=parse_quantity, help="of the model, for example 350M (or --profile)")
    add("--ranks", type=int, help="processes in all (or give --probed)")
    add("--ranks-per-node", type=int, help="of them, in one machine (else 1)")
    add("--sites", type=int, help="places whose ranks share one link; --link is then a site's")
    add("--link", type=parse_rate, help="of one rank to other machines, for example 1gbit")
    add("--inside", type=parse_rate, metavar="RATE", help="of one rank inside its machine")
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("--latency", type=ms, metavar="MS", help="of one message (else 0.05)")
    wait.add_argument("--wan", action="store_true", help="a latency of 30 ms, as between sites")
    add("--step-time", type=ms, metavar="MS", help="of one process, without communication")
    add("--profile", nargs=argparse.REMAINDER, metavar="SCRIPT", help="measure it (give it last)")
    add(
        "--overlap",
        type=ms,
        metavar="MS",
        help="of a step, that can hide communication (else 60 %%)",
    )
    add("--steps", type=int, help="of the run (else 10,000)")
    add("--tokens-per-parameter", type=float, metavar="N", help="of the run, in all (else 20)")
    saves = "a checkpoint every N steps: what consolidate_state() sends (else none)"
    add("--save-every", type=int, metavar="N", help=saves)
    frozen = "of weights that are not trained, such as LoRA's base, for example 14G"
    add("--frozen", type=parse_quantity, metavar="BYTES", help=frozen)
    lora = "--parameters are of adapters of this rank on the weights of --frozen"
    add("--lora", type=int, metavar="RANK", help=lora)
    add("--probed", metavar="FILE", help="written by compopt.probe: ranks, link, local speed")
    add("--device", choices=DEVICES, help="for the speed of local work, and memory (else a100)")
    add(
        "--memory-bandwidth",
        type=parse_quantity,
        metavar="BYTES",
        help="of a device, per second, as 3.3T",
    )
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


def parse_milliseconds(text: str) -> float:
    """Seconds, from milliseconds."""
    try:
        return float(text) / 1e3
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be read: write milliseconds, such as 400."
        ) from None


def refuse_given(given: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raise ValueError if one of these options was given."""
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {reason}")


def merge_arguments(
    given: argparse.Namespace, names: dict[str, str], probed: dict[str, Any], latency: str
) -> dict[str, Any]:
    """Return the arguments that were given as options of these names or measured by a probe, and
    the sources of measured numbers.

    ``latency`` is the name of the latency among the sources.
    """
    values = {argument: getattr(given, option) for option, argument in names.items()}
    arguments = {name: value for name, value in values.items() if value is not None}
    sources = {
        source: "measured"
        for source, name in (
            ("link", "link_bits_per_s"),
            (latency, "latency_s"),
            ("inside", "inside_bits_per_s"),
            ("inside latency", "inside_latency_s"),
        )
        if name in probed and name not in arguments
    }
    if given.wan:
        arguments["latency_s"], sources[latency] = WAN_LATENCY, "assumed: --wan"
    return {**probed, **arguments, "sources": sources}


def gradient_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `advise`; raises ValueError for a missing one."""
    probed = read_probe(given.probed) if given.probed else {}
    if given.device:
        probed.pop("local", None)
    arguments = merge_arguments(given, COMMON_ARGUMENTS | GRADIENT_ARGUMENTS, probed, "latency")
    sources = arguments["sources"]
    if "ranks" not in arguments:
        last = " before --profile, whose script gets all that follows" if given.profile else ""
        raise ValueError(f"The number of ranks is missing: give --ranks{last}, or --probed FILE.")
    if given.sites is not None and given.link is None:
        raise ValueError("--sites needs --link, the rate of one site's link to the others.")
    node = arguments.get("ranks_per_node", arguments.get("shard", 1))
    if "link_bits_per_s" not in arguments and node != arguments["ranks"]:
        raise ValueError(
            "The link is missing: give --link, the rate at which one rank sends to other machines, "
            "or --probed FILE. If all ranks are in one machine, --ranks-per-node "
            f"{arguments['ranks']} says so."
        )
    if given.lora is not None and not (given.parameters and given.frozen):
        raise ValueError("--lora needs --parameters of the adapters, and --frozen of the weights.")
    if given.lora is not None:
        size = round(given.parameters)
        arguments["model"] = Workload.of_adapters(size, given.lora, given.frozen)
    elif given.parameters:
        arguments["model"] = round(given.parameters)
    if given.profile:
        step_s, work = profile_script(given.profile[0], given.profile[1:])
        if given.step_time is None:
            arguments["step_s"], sources["computation"] = step_s, "measured"
        arguments.setdefault("model", work)
    if not {"model", "step_s"} <= arguments.keys():
        raise ValueError(
            "The model is missing: give --parameters and --step-time, or --profile SCRIPT."
        )
    if given.memory_bandwidth:
        _, flops = arguments.get("local") or find_device(given.device)[0].local
        arguments["local"], sources["own work"] = (given.memory_bandwidth, flops), "given"
    return arguments


def layer_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `advise_layers`; raises ValueError for a missing or invalid one."""
    if any(getattr(given, name) is None for name in LAYER_SIZES):
        raise ValueError(
            "The layers are missing: give --hidden, --layers, --sequence and --micro-batch."
        )
    probed = read_probe(given.probed) if given.probed else {}
    for name in ("ranks", "interference", *(["local"] if given.device else [])):
        probed.pop(name, None)
    arguments = {"tensor": 1, "pipeline": 1} | merge_arguments(
        given, COMMON_ARGUMENTS | LAYER_ARGUMENTS, probed, "link latency"
    )
    micro_batches = given.micro_batches
    if micro_batches is None:
        micro_batches = 4 * max(1, arguments["pipeline"])
        arguments["sources"]["micro-batches"] = "assumed"
    if given.memory_bandwidth:
        _, flops = arguments.get("local") or find_device(given.device)[0].local
        arguments["local"] = given.memory_bandwidth, flops
        arguments["sources"]["own work"] = "bandwidth given"
    sizes = {name: getattr(given, name) for name in LAYER_SIZES}
    nbytes = 2 if given.activation_bytes is None else given.activation_bytes
    work = Layers(**sizes, micro_batches=micro_batches, activation_bytes=nbytes)
    return arguments | {"work": work}


def main(argv: Sequence[str] | None = None, prog: str = "compopt-advise") -> None:
    """Run the command `compopt-advise`; ``argv`` are its arguments, by default the process's."""
    parser = make_parser(prog)
    given = parser.parse_args(argv)
    try:
        if given.tensor is not None or given.pipeline is not None:
            reason = "is for advice on gradients: leave out --tensor, --pipeline."
            refuse_given(given, GRADIENT_OPTIONS, reason)
            print_report(str(advise_layers(**layer_arguments(given))))
            return
        reason = "is for activations: give --tensor, --pipeline or both."
        refuse_given(given, LAYER_OPTIONS, reason)
        advice = advise(**gradient_arguments(given))
        if given.plot:
            plot_speedups(given.plot, advice.situation)
        print_report(advice.format(given.all))
    except (ValueError, OverflowError) as error:
        parser.error(str(error))
