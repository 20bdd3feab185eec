"""`python -m compopt.probe`: measures the network and the machines that will train.

    torchrun --nproc-per-node 4 -m compopt.probe --out probe.json
    compopt-advise --probed probe.json --parameters 350M --step-time 400

Start it with torchrun on all machines, like the training. It takes seconds, half a minute over a
slow link. All-reduces from 1 KiB to 8 MiB measure the latency and the rate of a rank's link, copies
and products the speed of local work with all ranks busy, and both together their interference.

    torchrun --nproc-per-node 4 -m compopt.probe --layers --tensor 2 --hidden 4096 --out layers.json
    compopt-advise --probed layers.json --tensor 2 --layers 32 ...

Consecutive ranks, `--tensor` of them, share a layer; the rest are stages. It gives what advice on
activations needs: the links inside and between stages, and the constants of MCBench's equations.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .formatting import format_number_of
from .layer_probe import measure_layers
from .model_parallel import LayerCosts
from .network_probe import collective_device, measure_network, world_size


def read_probe(path: str) -> dict[str, Any]:
    """Arguments for `advise` from a file that the probe wrote.

    Raises ValueError for an invalid file.
    """
    names = ("ranks", "link_bits_per_s", "latency_s", "local", "interference")
    with explain_bad_file(path, "compopt.probe"):
        results = {"interference": [0.0, 0.0], **json.loads(Path(path).read_text())}
        return {n: tuple(results[n]) if isinstance(results[n], list) else results[n] for n in names}


def read_layer_probe(path: str) -> dict[str, Any]:
    """Arguments for `advise_layers`, and the bytes of a number, from a file that the probe wrote
    with ``--layers``.

    Raises ValueError for an invalid file.
    """
    needed = ("tensor", "pipeline", "activation_bytes", "local")
    links = ("link_bits_per_s", "latency_s", "inside_bits_per_s", "inside_latency_s")
    with explain_bad_file(path, "compopt.probe --layers"):
        results = json.loads(Path(path).read_text())
        arguments = {name: results[name] for name in needed}
        arguments |= {name: results[name] for name in links if name in results}
        arguments["local"] = tuple(map(float, results["local"]))
        return arguments | {"costs": LayerCosts(**results["costs"])}


@contextmanager
def explain_bad_file(path: str, writer: str) -> Iterator[None]:
    """Turn the errors of reading a file into a sentence."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"--probed {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--probed {path} is not what {writer} writes ({error}): run it again."
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; ``argv`` are its arguments, by default the process's."""
    parser = argparse.ArgumentParser(
        prog="python -m compopt.probe", description="Measure the network that will train."
    )
    parser.add_argument(
        "--out", default="probe.json", metavar="FILE", help="where rank 0 writes it"
    )
    parser.add_argument("--layers", action="store_true", help="for advice on activations")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share a layer (1)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the layers (1024)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch (2048)")
    options = parser.parse_args(argv)
    is_writer = os.environ.get("RANK", "0") == "0"
    folder = Path(options.out).resolve().parent
    if is_writer and not folder.is_dir():
        parser.error(f"--out {options.out}: there is no folder {folder}.")
    try:
        results = (
            measure_layers(
                collective_device(), world_size(), options.tensor, options.hidden, options.tokens
            )
            if options.layers
            else measure_network()
        )
    except ValueError as error:
        parser.error(str(error))
    if not is_writer:
        return
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    if options.layers:
        ranks = format_number_of(results["tensor"], "rank")
        print(f"{ranks} a layer, stages: {results['pipeline']}: {options.out}")
    else:
        print(
            f"{results['ranks']} ranks, {results['link_bits_per_s'] / 1e6:.4g} Mbit/s a rank, "
            f"{1e6 * results['latency_s']:.3g} us a message, {results['local'][0] / 1e9:.3g} GB/s "
            f"in memory, {results['local'][1] / 1e9:.3g} GFLOP/s: {options.out}"
        )
