"""`python -m compopt.probe`: the network and the machines that will train, measured.

    torchrun --nproc-per-node 4 -m compopt.probe --out probe.json
    compopt-advise --probed probe.json --parameters 350M --step-time 400

Start it with torchrun on all machines, as the training will be. It takes seconds, half a minute
over a slow link: all-reduces from 1 KiB to 8 MiB give the latency and the rate of a rank's link,
copies and products the speed of local work with all ranks busy, and both at once what they take
from each other.

    torchrun --nproc-per-node 4 -m compopt.probe --layers --tensor 2 --hidden 4096 --out layers.json
    compopt-advise --probed layers.json --tensor 2 --layers 32 ...

Consecutive ranks, `--tensor` of them, share a layer; the rest are stages. It gives what advice on
activations needs: the links inside and between stages, and the constants of MCBench's equations.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import activations
from ._state.devices import here, module_of
from .costmodel.fitting import fit
from .costmodel.measure import measure_local, median_seconds
from .costmodel.measure_layers import measure_layers
from .costmodel.model_parallel import LayerCosts

# Bytes of the messages that are timed.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 23)
# Seconds, so that what ranks wait for each other is seen.
LEAST_STEP = 0.2


def measured() -> dict[str, Any]:
    """What `read` gives back, and the seconds of every message it was fitted to; the same on all
    ranks.

    Raises ValueError where this process was not started by torchrun, or alone.
    """
    size, device = _size(), _device()
    ranks = activations.MeshRanks.world(device.type, size)
    messages = [torch.ones(nbytes // 4, dtype=torch.float32, device=device) for nbytes in SIZES]
    seconds = [median_seconds(functools.partial(ranks.sum, x), device) for x in messages]
    agreed = _mean(seconds, ranks, device)
    memory, flops = _mean(measure_local(device), ranks, device)
    # the largest message that is quick here
    message_s, message = max(
        (pair for pair in zip(agreed, messages, strict=True) if pair[0] <= LEAST_STEP / 2),
        key=lambda pair: pair[1].nbytes,
        default=(agreed[0], messages[0]),
    )
    interference = _interference(flops, message, message_s, ranks)
    points = [
        {"bytes": 2 * (size - 1) / size * x.nbytes, "messages": 2.0 * (size - 1)} for x in messages
    ]
    found = fit(points, agreed).coefficients
    return {
        "ranks": size,
        "link_bits_per_s": 8 / max(found["bytes"], 1e-15),
        "latency_s": found["messages"],
        "local": [memory, flops],
        "interference": interference,
        "all_reduce_seconds": dict(zip(map(str, SIZES), agreed, strict=True)),
    }


def _size() -> int:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        raise ValueError(
            "compopt.probe measures the link between ranks: start it with torchrun and two at "
            "least."
        )
    return size


def _device() -> torch.device:
    """Where this rank's tensors are. Apple's devices have no collectives: there it is the CPU."""
    device = here()
    module = module_of(device)
    if module is None or not hasattr(module, "set_device"):
        return torch.device("cpu")
    module.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return device


def _mean(
    values: Sequence[float], ranks: activations.MeshRanks, device: torch.device
) -> list[float]:
    """Over ranks: all must print the same."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    found: list[float] = (ranks.sum(own) / ranks.size).tolist()
    return found


def _interference(
    flops: float, message: torch.Tensor, message_s: float, ranks: activations.MeshRanks
) -> list[float]:
    """The share of a step that a rank waits for the slowest, and seconds that computation loses for
    each byte sent beside it.

    A step is made of matrix products, twice as long as what is sent beside it.
    """
    device = message.device
    step_s = max(LEAST_STEP, 2 * message_s)
    matrix = torch.ones(512, 512, dtype=torch.float32, device=device)
    product = torch.empty_like(matrix)
    products, in_flight = (
        max(1, round(x)) for x in (step_s * flops / (2 * 512**3), step_s / (2 * message_s))
    )
    end = torch.zeros(1, dtype=torch.float32, device=device)

    def step(messages: int, meet: bool) -> None:
        sent = [dist.all_reduce(message, async_op=True) for _ in range(messages)]
        for _ in range(products):
            torch.mm(matrix, matrix, out=product)
        for handle in sent:
            handle.wait()
        if meet:
            dist.all_reduce(end)

    cases = (0, False), (0, True), (in_flight, True)
    alone, met, sending = _mean(
        [median_seconds(functools.partial(step, *case), device) for case in cases], ranks, device
    )
    nbytes = in_flight * message.nbytes * 2 * (ranks.size - 1) / ranks.size
    return [max(0.0, met / alone - 1), max(0.0, sending - met) / nbytes]


def read(path: str) -> dict[str, Any]:
    """Arguments for `advise` from a file that the probe wrote.

    ValueError says what is wrong with it.
    """
    names = ("ranks", "link_bits_per_s", "latency_s", "local", "interference")
    with _told(path, "compopt.probe"):
        found = {"interference": [0.0, 0.0], **json.loads(Path(path).read_text())}
        return {n: tuple(found[n]) if isinstance(found[n], list) else found[n] for n in names}


def read_layers(path: str) -> dict[str, Any]:
    """Arguments for `advise_layers`, and the bytes of a number, from a file that the probe wrote
    with ``--layers``.

    ValueError says what is wrong with it.
    """
    needed = ("tensor", "pipeline", "activation_bytes", "local")
    links = ("link_bits_per_s", "latency_s", "inside_bits_per_s", "inside_latency_s")
    with _told(path, "compopt.probe --layers"):
        found = json.loads(Path(path).read_text())
        asked = {name: found[name] for name in needed}
        asked |= {name: found[name] for name in links if name in found}
        asked["local"] = tuple(map(float, found["local"]))
        return asked | {"costs": LayerCosts(**found["costs"])}


@contextmanager
def _told(path: str, writer: str) -> Iterator[None]:
    """What is wrong with the file, in a sentence."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"--probed {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--probed {path} is not what {writer} writes ({error}): run it again."
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    """The command; ``argv`` are its arguments, by default the process's."""
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
    try:
        found = (
            measure_layers(_device(), _size(), options.tensor, options.hidden, options.tokens)
            if options.layers
            else measured()
        )
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("RANK", "0") == "0" and options.layers:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        print(f"{found['tensor']} ranks a layer, stages: {found['pipeline']}: {options.out}")
    elif os.environ.get("RANK", "0") == "0":
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{found['ranks']} ranks, {found['link_bits_per_s'] / 1e6:.4g} Mbit/s a rank, "
            f"{1e6 * found['latency_s']:.3g} us a message, {found['local'][0] / 1e9:.3g} GB/s in "
            f"memory, {found['local'][1] / 1e9:.3g} GFLOP/s: {options.out}"
        )


if __name__ == "__main__":
    main()
