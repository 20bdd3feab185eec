"""`python -m compopt.probe`: measures the network and the machines that will train.

    torchrun --nproc-per-node 4 -m compopt.probe --out probe.json
    compopt-advise --probed probe.json --parameters 350M --step-time 400

Start it with torchrun on all machines, like the training. It takes seconds, half a minute over a
slow link. All-reduces from 1 KiB to 8 MiB measure the latency and the rate of a rank's link, copies
and products the speed of local work with all ranks busy, and both together their interference.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .network_probe import measure_network


def read_probe(path: str) -> dict[str, Any]:
    """Arguments for `advise` from a file that the probe wrote.

    Raises ValueError for an invalid file.
    """
    names = ("ranks", "link_bits_per_s", "latency_s", "local", "interference")
    try:
        results = {"interference": [0.0, 0.0], **json.loads(Path(path).read_text())}
        return {n: tuple(results[n]) if isinstance(results[n], list) else results[n] for n in names}
    except OSError as error:
        raise ValueError(f"--probed {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--probed {path} is not what compopt.probe writes ({error}): run it again."
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; ``argv`` are its arguments, by default the process's."""
    parser = argparse.ArgumentParser(
        prog="python -m compopt.probe", description="Measure the network that will train."
    )
    parser.add_argument(
        "--out", default="probe.json", metavar="FILE", help="where rank 0 writes it"
    )
    options = parser.parse_args(argv)
    is_writer = os.environ.get("RANK", "0") == "0"
    folder = Path(options.out).resolve().parent
    if is_writer and not folder.is_dir():
        parser.error(f"--out {options.out}: there is no folder {folder}.")
    try:
        results = measure_network()
    except ValueError as error:
        parser.error(str(error))
    if not is_writer:
        return
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{results['ranks']} ranks, {results['link_bits_per_s'] / 1e6:.4g} Mbit/s a rank, "
        f"{1e6 * results['latency_s']:.3g} us a message, {results['local'][0] / 1e9:.3g} GB/s "
        f"in memory, {results['local'][1] / 1e9:.3g} GFLOP/s: {options.out}"
    )
