"""`python -m compopt.probe`: the network and the machines that will train, measured.

    torchrun --nproc-per-node 4 -m compopt.probe --out probe.json
    compopt-advise --probed probe.json --parameters 350M --step-time 400

Start it with torchrun on all machines, as the training will be. It takes a few seconds: all-reduces
from 1 KiB to 8 MiB give the latency and the rate of a rank's link, copies and products the speed of
local work with all ranks busy.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ._state.devices import here, module_of
from .activations import MeshRanks
from .costmodel.fitting import fit
from .costmodel.measure import measure_local, median_seconds

# Bytes of the messages that are timed.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 23)


def measured() -> dict[str, Any]:
    """What `read` gives back, and the seconds of every message it was fitted to; the same on all
    ranks.

    Raises ValueError where this process was not started by torchrun, or alone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        raise ValueError(
            "compopt.probe measures the link between ranks: start it with torchrun and two at "
            "least."
        )
    device = here()
    if module := module_of(device):
        module.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    ranks = MeshRanks.world(device.type, size)
    messages = [torch.ones(nbytes // 4, dtype=torch.float32, device=device) for nbytes in SIZES]
    seconds = [median_seconds(functools.partial(ranks.sum, x), device) for x in messages]
    own = torch.tensor([*seconds, *measure_local()], dtype=torch.float64, device=device)
    # All ranks must print the same.
    *agreed, memory, flops = (ranks.sum(own) / size).tolist()
    points = [
        {"bytes": 2 * (size - 1) / size * x.nbytes, "messages": 2.0 * (size - 1)} for x in messages
    ]
    found = fit(points, agreed).coefficients
    return {
        "ranks": size,
        "link_bits_per_s": 8 / max(found["bytes"], 1e-15),
        "latency_s": found["messages"],
        "local": [memory, flops],
        "all_reduce_seconds": dict(zip(map(str, SIZES), agreed, strict=True)),
    }


def read(path: str) -> dict[str, Any]:
    """Arguments for `advise` from a file that the probe wrote.

    ValueError says what is wrong with it.
    """
    names = ("ranks", "link_bits_per_s", "latency_s", "local")
    try:
        found = json.loads(Path(path).read_text())
        return {name: tuple(found[name]) if name == "local" else found[name] for name in names}
    except OSError as error:
        raise ValueError(f"--probed {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--probed {path} is not what compopt.probe writes ({error}): run it again."
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    """The command; ``argv`` are its arguments, by default the process's."""
    parser = argparse.ArgumentParser(
        prog="python -m compopt.probe", description="Measure the network that will train."
    )
    parser.add_argument(
        "--out", default="probe.json", metavar="FILE", help="where rank 0 writes it"
    )
    options = parser.parse_args(argv)
    try:
        found = measured()
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("RANK", "0") == "0":
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{found['ranks']} ranks, {found['link_bits_per_s'] / 1e6:.4g} Mbit/s a rank, "
            f"{1e6 * found['latency_s']:.3g} us a message, {found['local'][0] / 1e9:.3g} GB/s in "
            f"memory, {found['local'][1] / 1e9:.3g} GFLOP/s: {options.out}"
        )


if __name__ == "__main__":
    main()
