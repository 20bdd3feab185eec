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
import functools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import activations
from .._state.tensors import get_device, get_device_module
from .formatting import format_number_of
from .hardware import ring_bytes
from .measurement import (
    fit,
    fit_communication,
    measure_local,
    measure_products,
    median_seconds,
)
from .model_parallel import LayerCosts

# Bytes of the messages that are timed, on the slow link and between layers.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 23)
LAYER_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)
# Seconds of a step of the interference test: long enough to see ranks wait for each other.
LEAST_STEP = 0.2


def measure_network() -> dict[str, Any]:
    """The content of a probe's file: what `read_probe` returns, and the seconds of every message;
    the same on all ranks.

    Raises ValueError unless torchrun started this process, with at least two ranks.
    """
    size, device = world_size(), collective_device()
    ranks = activations.MeshRanks.world(device.type, size)
    messages = [torch.ones(nbytes // 4, dtype=torch.float32, device=device) for nbytes in SIZES]
    local = [median_seconds(functools.partial(ranks.sum, x), device) for x in messages]
    seconds = average_over_ranks(local, ranks, device)
    memory, flops = average_over_ranks(measure_local(device), ranks, device)
    # The largest message that is quick on this link.
    message_s, message = max(
        (pair for pair in zip(seconds, messages, strict=True) if pair[0] <= LEAST_STEP / 2),
        key=lambda pair: pair[1].nbytes,
        default=(seconds[0], messages[0]),
    )
    interference = measure_interference(flops, message, message_s, ranks)
    sent = [ring_bytes(size, x.nbytes) for x in messages]
    rate, latency = fit_link(sent, 2.0 * (size - 1), seconds)
    return {
        "ranks": size,
        "link_bits_per_s": rate,
        "latency_s": latency,
        "local": [memory, flops],
        "interference": interference,
        "all_reduce_seconds": dict(zip(map(str, SIZES), seconds, strict=True)),
    }


def world_size() -> int:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        raise ValueError(
            "compopt.probe measures the link between ranks: start it with torchrun and two at "
            "least."
        )
    return size


def collective_device() -> torch.device:
    """The device of this rank's tensors. Apple's devices have no collectives: there it is the
    CPU.
    """
    device = get_device()
    module = get_device_module(device)
    if module is None or not hasattr(module, "set_device"):
        return torch.device("cpu")
    module.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return device


def average_over_ranks(
    values: Sequence[float], ranks: activations.MeshRanks, device: torch.device
) -> list[float]:
    """The mean of each value: all ranks must print the same."""
    local = torch.tensor(values, dtype=torch.float64, device=device)
    means: list[float] = (ranks.sum(local) / ranks.size).tolist()
    return means


def fit_link(
    sent: Sequence[float], messages: float, seconds: Sequence[float]
) -> tuple[float, float]:
    """Bits a second and seconds a message, from the bytes that leave a rank."""
    points = [{"bytes": nbytes, "messages": messages} for nbytes in sent]
    results = fit(points, seconds).coefficients
    return 8 / max(results["bytes"], 1e-15), results["messages"]


def measure_interference(
    flops: float, message: Tensor, message_s: float, ranks: activations.MeshRanks
) -> list[float]:
    """The share of a step that a rank waits for the slowest, and seconds that computation loses for
    each byte sent beside it.

    A step is made of matrix products, and takes twice as long as the messages sent beside it.
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
        handles = [dist.all_reduce(message, async_op=True) for _ in range(messages)]
        for _ in range(products):
            torch.mm(matrix, matrix, out=product)
        for handle in handles:
            handle.wait()
        if meet:
            dist.all_reduce(end)

    cases = (0, False), (0, True), (in_flight, True)
    local = [median_seconds(functools.partial(step, *case), device) for case in cases]
    computing, waiting, sending = average_over_ranks(local, ranks, device)
    nbytes = ring_bytes(ranks.size, in_flight * message.nbytes)
    return [max(0.0, waiting / computing - 1), max(0.0, sending - waiting) / nbytes]


# Layers


def measure_layers(
    device: torch.device, size: int, tensor: int, hidden: int, tokens: int
) -> dict[str, Any]:
    """Arguments for `advise_layers`; the same on all ranks.

    Args:
        device: of this rank.
        size: ranks in all, consecutive ones share a layer.
        tensor: how many of them do.
        hidden, tokens: the width of the layers, and tokens of a micro-batch.

    Raises:
        ValueError: `tensor` does not divide the ranks and the width.
    """
    if min(tensor, hidden, tokens) < 1 or size % tensor or hidden % tensor:
        raise ValueError(
            f"tensor must divide the {size} ranks and the width, which is positive, and a "
            f"micro-batch have tokens; got tensor={tensor}, hidden={hidden} and {tokens} tokens."
        )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    mesh = init_device_mesh(
        device.type, (size // tensor, tensor), mesh_dim_names=("stages", "inside")
    )
    everyone = activations.MeshRanks.world(device.type, size)
    inside = average_over_ranks(
        time_all_reduces(activations.MeshRanks(mesh["inside"]), dtype, device), everyone, device
    )
    between = (
        average_over_ranks(time_stage_messages(mesh, device), everyone, device)
        if size > tensor
        else []
    )
    layer_s, encode_s, *local = average_over_ranks(
        [
            *time_computation(tensor, hidden, tokens, dtype, device),
            *measure_local(device),
            measure_products(device, torch.bfloat16),
        ],
        everyone,
        device,
    )
    elements = [nbytes / dtype.itemsize for nbytes in LAYER_SIZES]
    beta, constant, threshold, _ = (
        fit_communication(elements, inside) if tensor > 1 else (0.0, 0.0, 0, [])
    )
    # A multilayer perceptron of four times the width, forward and backward, on all its ranks.
    flops = 48 * tokens * hidden**2
    costs = LayerCosts(
        layer_s / flops, beta, encode_s / (tokens * hidden), constant, max(1, threshold)
    )
    results = {
        "tensor": tensor,
        "pipeline": size // tensor,
        "activation_bytes": dtype.itemsize,
        "local": local,
        "costs": asdict(costs),
    }
    if tensor > 1:
        sent = [ring_bytes(tensor, nbytes) for nbytes in LAYER_SIZES]
        rate, latency = fit_link(sent, 2.0 * (tensor - 1), inside)
        results |= {"inside_bits_per_s": rate, "inside_latency_s": latency}
    if between:
        rate, latency = fit_link([float(nbytes) for nbytes in LAYER_SIZES], 1.0, between)
        results |= {"link_bits_per_s": rate, "latency_s": latency}
    return results


def time_all_reduces(
    ranks: activations.MeshRanks, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Seconds of an all-reduce of every size; all groups of ranks at once, as in training."""
    messages = [torch.ones(n // dtype.itemsize, dtype=dtype, device=device) for n in LAYER_SIZES]
    return [median_seconds(functools.partial(ranks.sum, x), device) for x in messages]


def time_stage_messages(mesh: DeviceMesh, device: torch.device) -> list[float]:
    """Seconds of a message of every size to the next stage: half a round trip of two stages, the
    third and fourth at the same time. The last of an odd number of stages answers with the first's.
    """
    stages = mesh["stages"]
    group, stage, size = stages.get_group(), stages.get_local_rank(), stages.size()
    is_even = stage % 2 == 0
    if is_even and stage == size - 1:
        local = [0.0] * len(LAYER_SIZES)
    else:
        peer = stage + 1 if is_even else stage - 1
        messages = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in LAYER_SIZES]
        calls = [functools.partial(send_and_return, x, group, peer, is_even) for x in messages]
        local = [median_seconds(call, device) / 2 for call in calls]
    shared = torch.tensor(local, dtype=torch.float64, device=device)
    dist.broadcast(shared, group=group, group_src=0)
    seconds: list[float] = shared.tolist()
    return seconds


def send_and_return(
    message: Tensor, group: dist.ProcessGroup | None, peer: int, sends_first: bool
) -> None:
    if sends_first:
        dist.send(message, group=group, group_dst=peer)
    dist.recv(message, group=group, group_src=peer)
    if not sends_first:
        dist.send(message, group=group, group_dst=peer)


def time_computation(
    tensor: int, hidden: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Seconds of this rank's part of a layer's perceptron, and of an auto-encoder to a tenth,
    forward and backward.
    """
    options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
    perceptron = nn.Sequential(
        nn.Linear(hidden, 4 * hidden // tensor, **options),
        nn.GELU(),
        nn.Linear(4 * hidden // tensor, hidden, **options),
    )
    codec = activations.AutoEncoder(hidden, max(1, hidden // 10)).to(device=device, dtype=dtype)
    x = torch.ones(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.ones_like(x)

    def pass_through(part: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(part(x), [x, *part.parameters()], gradient)

    return [
        median_seconds(functools.partial(pass_through, part), device)
        for part in (perceptron, codec)
    ]


# Files


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
