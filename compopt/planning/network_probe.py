"""Measurement of the link between ranks, and of what an exchange costs beside computation.

``link_probe`` runs it on all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import activations
from .._state.tensors import get_device, get_device_module
from .hardware import ring_bytes
from .measurement import fit, measure_local, median_seconds

# Bytes of the messages that are timed.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 23)
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
