"""`compopt-advise`: what each method would make of a training step, and whether that is worth it.

    compopt-advise --parameters 350M --ranks 8 --link 1gbit --step-time 400
    torchrun --nproc-per-node 4 -m compopt.advise --probe --parameters 350M --step-time 400
    compopt-advise --ranks 8 --link 100mbit --profile train.py --plot speedup.png

`python -m compopt advise` is the same command. (`compopt` alone cannot be one: bash has a builtin of that name.)

The same from Python: `print(advise(model, ranks=8, link_bits_per_s=1e9, step_s=0.4))`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .costmodel import METHODS, Machine, Workload, step_seconds, training_speedup
from .costmodel.measure import measure_local, probe, profile

DENSE = "AdamW+DDP"
WARMUP = {"RadiusAdamW": 0.15}  # share of the steps that stay dense, where a method needs them
WORTH_IT = 1.05  # below this a prediction says nothing: stay dense
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


@dataclass(frozen=True)
class Row:
    """One method: bytes a rank hands to collectives a step, seconds a step, speed-ups, bytes of optimizer state."""

    method: str
    sent: float
    step_s: float
    speedup: float
    training: float
    state: float


@dataclass(frozen=True)
class Advice:
    """Result of `advise`: a row a method, and what to do. `str()` is the table."""

    rows: list[Row]
    recommendation: str

    def __str__(self) -> str:
        head = f"{'method':<16}{'MB sent/step':>14}{'step ms':>10}{'speed-up':>10}{'training':>10}{'state MB':>10}"
        lines = [
            f"{r.method:<16}{r.sent / 1e6:>14.2f}{r.step_s * 1e3:>10.1f}{r.speedup:>9.2f}x{r.training:>9.2f}x"
            f"{r.state / 1e6:>10.1f}"
            for r in self.rows
        ]
        return "\n".join([head, *lines, "", self.recommendation])


def advise(
    model: torch.nn.Module | Workload | int,
    *,
    ranks: int,
    link_bits_per_s: float,
    step_s: float,
    overlap_s: float = 0.0,
    latency_s: float = 50e-6,
    local: tuple[float, float] | None = None,
) -> Advice:
    """Predict a training step with every method of `costmodel.METHODS` and say what to use.

    Args:
        model: a model, a `Workload`, or a number of parameters (a transformer's shapes are then assumed).
        ranks: processes that average gradients.
        link_bits_per_s: what one rank can send.
        step_s: seconds of a dense step of one process, without communication.
        overlap_s: seconds of it during which gradients may already travel.
        latency_s: seconds of one message.
        local: bytes a second in memory and FLOPs a second of a rank; measured on this machine when None.

    Raises:
        ValueError: a number is out of range; the sentence names it.
    """
    if isinstance(model, torch.nn.Module):
        model = Workload.of(model.named_parameters())
    work = model if isinstance(model, Workload) else Workload.of_size(model)
    if not link_bits_per_s > 0:
        raise ValueError(f"link_bits_per_s must be positive; got {link_bits_per_s}.")
    memory, flops = local or measure_local()
    machine = Machine(ranks, link_bits_per_s / 8, latency_s, memory, flops)
    rows = _rows(work, machine, step_s, overlap_s)
    return Advice(rows, _recommend(rows, work, machine, step_s, overlap_s))


def _rows(work: Workload, machine: Machine, step_s: float, overlap_s: float) -> list[Row]:
    costs = {name: cost(work, machine.ranks) for name, cost in METHODS.items()}
    seconds = {name: step_seconds(machine, cost, step_s, overlap_s).total for name, cost in costs.items()}
    dense = seconds[DENSE]
    return [
        Row(n, c.sent, seconds[n], dense / seconds[n], training_speedup(dense, seconds[n], WARMUP.get(n, 0.0)), c.state)
        for n, c in costs.items()
    ]


def _best(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row.training)


def _recommend(rows: list[Row], work: Workload, machine: Machine, step_s: float, overlap_s: float) -> str:
    best, dense = _best(rows), next(row for row in rows if row.method == DENSE)
    if machine.ranks == 1:
        return "Stay dense: one process averages with nobody."
    if best.training < WORTH_IT:
        rate = _pays_below(work, machine, step_s, overlap_s)
        below = f" Below about {_rate(rate)} it would pay." if rate else ""
        waiting = 100 * (1 - step_s / dense.step_s) if dense.step_s > step_s else 0.0
        return f"Stay dense: communication is {waiting:.0f} % of the step and no method gains 5 %.{below}"
    warmup = WARMUP.get(best.method)
    dense_part = f", the first {100 * warmup:.0f} % of the steps dense" if warmup else ""
    return (
        f"Use {best.method}: predicted {best.step_s * 1e3:.0f} ms a step instead of {dense.step_s * 1e3:.0f}, "
        f"{best.training:.1f} times as fast over the training{dense_part}. "
        "Watch the validation loss: this predicts time, not quality."
    )


def _pays_below(work: Workload, machine: Machine, step_s: float, overlap_s: float) -> float | None:
    """The fastest link, in bit/s, on which some method gains 5 %; None if none does down to 1 Mbit/s."""
    rates = [10 ** (exponent / 10) for exponent in range(60, 130)]
    at = [replace(machine, link_bytes_per_s=rate / 8) for rate in rates]
    paying = [
        rate for rate, m in zip(rates, at, strict=True) if _best(_rows(work, m, step_s, overlap_s)).training >= WORTH_IT
    ]
    return max(paying, default=None)


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.2g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def plot(path: str, work: Workload, machine: Machine, step_s: float, overlap_s: float = 0.0) -> None:
    """Save a PNG: speed-up of every method over link rates from 10 Mbit/s to 100 Gbit/s."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = [10 ** (exponent / 10) for exponent in range(70, 111)]
    tables = [_rows(work, replace(machine, link_bytes_per_s=rate / 8), step_s, overlap_s) for rate in rates]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for i, row in enumerate(tables[0]):
        axes.plot([rate / 1e6 for rate in rates], [table[i].training for table in tables], label=row.method)
    axes.axvline(machine.link_bytes_per_s * 8 / 1e6, color="grey", linestyle=":", label="your link")
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel=f"training speed-up over {DENSE}")
    axes.set_title(
        f"{work.parameters / 1e6:.4g} M parameters, {machine.ranks} ranks, {step_s * 1e3:.4g} ms of computation"
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def quantity(text: str, suffix: str = "") -> float:
    """'350M', '1.8b' or '12000' as a number; with suffix 'bit', a rate as tc writes it ('100mbit', '2.5gbit')."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:e\d+)?)([kmgb]?){suffix}", text.strip().lower())
    if match is None or float(match[1]) == 0:
        example = "100mbit or 2.5gbit" if suffix else "350M, 1.8B or 12000"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: write it like {example}.")
    return float(match[1]) * UNITS[match[2]]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Predict what compression would make of a training step.")
    parser.add_argument("--parameters", type=quantity, help="of the model, for example 350M (or give --profile)")
    parser.add_argument("--ranks", type=int, help="processes that average gradients (or give --probe)")
    parser.add_argument("--link", type=lambda text: quantity(text, "bit"), help="of one rank, for example 1gbit")
    parser.add_argument("--probe", action="store_true", help="measure ranks and link, under torchrun")
    parser.add_argument("--step-time", type=float, metavar="MS", help="of one process, without communication")
    parser.add_argument("--profile", nargs=argparse.REMAINDER, metavar="SCRIPT", help="measure that (give it last)")
    parser.add_argument("--overlap", type=float, default=0.0, metavar="MS", help="of it that hides communication")
    parser.add_argument("--plot", metavar="FILE.png", help="speed-up over link rates")
    return parser


def _inputs(options: argparse.Namespace) -> tuple[Workload, Machine, float]:
    """What is given or measured; ValueError says what is missing."""
    ranks, link, latency = options.ranks, options.link, 50e-6
    if options.probe:
        size, measured, latency = probe()
        ranks, link = ranks or size, link or measured
    step_s = options.step_time / 1e3 if options.step_time is not None else None
    work = Workload.of_size(round(options.parameters)) if options.parameters else None
    if options.profile:
        measured, found = profile(options.profile[0], options.profile[1:])
        step_s, work = step_s or measured, work or found
    if ranks is None or link is None:
        raise ValueError("The network is missing: give --ranks and --link, or start --probe with torchrun.")
    if work is None or step_s is None:
        raise ValueError("The model is missing: give --parameters and --step-time, or --profile SCRIPT.")
    return work, Machine(ranks, link / 8, latency, *measure_local()), step_s


def main(argv: Sequence[str] | None = None, prog: str = "compopt-advise") -> None:
    """The command `compopt-advise`; ``argv`` are its arguments, by default the process's."""
    parser = _parser(prog)
    options = parser.parse_args(argv)
    try:
        work, machine, step_s = _inputs(options)
        overlap_s = options.overlap / 1e3
        advice = advise(
            work,
            ranks=machine.ranks,
            link_bits_per_s=machine.link_bytes_per_s * 8,
            step_s=step_s,
            overlap_s=overlap_s,
            latency_s=machine.latency_s,
            local=(machine.memory_bytes_per_s, machine.flops_per_s),
        )
        if os.environ.get("RANK", "0") == "0":
            link = machine.link_bytes_per_s * 8
            print(f"{work.parameters / 1e6:.4g} M parameters on {machine.ranks} ranks, {_rate(link)},")
            print(f"{step_s * 1e3:.4g} ms of computation a step, {options.overlap:g} ms of it hiding communication;")
            print(
                f"compressing as fast as here: {machine.memory_bytes_per_s / 1e9:.3g} GB/s in memory, "
                f"{machine.flops_per_s / 1e9:.3g} GFLOP/s.\n"
            )
            print(advice)
            if options.plot:
                plot(options.plot, work, machine, step_s, overlap_s)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
