"""What advice on activations needs to know of a machine, measured on the ranks that will train:
`LayerCosts` of MCBench's equations, and the links inside and between stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import activations
from .fitting import fit, fit_communication
from .measure import measure_local, measure_products, median_seconds
from .model_parallel import LayerCosts

# Bytes of the messages that are timed.
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)


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
    if tensor < 1 or size % tensor or hidden % tensor or tokens < 1:
        raise ValueError(
            f"tensor must divide the {size} ranks and the width, and a micro-batch have tokens; "
            f"got tensor={tensor}, hidden={hidden} and {tokens} tokens."
        )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    mesh = init_device_mesh(
        device.type, (size // tensor, tensor), mesh_dim_names=("stages", "inside")
    )
    everyone = activations.MeshRanks.world(device.type, size)

    def agreed(values: Sequence[float]) -> list[float]:
        own = torch.tensor(values, dtype=torch.float64, device=device)
        found: list[float] = (everyone.sum(own) / size).tolist()
        return found

    inside = agreed(_inside_seconds(activations.MeshRanks(mesh["inside"]), dtype, device))
    between = agreed(_between_seconds(mesh, device)) if size > tensor else []
    layer_s, encode_s, *local = agreed(
        [
            _layer_seconds(tensor, hidden, tokens, dtype, device),
            _encode_seconds(hidden, tokens, dtype, device),
            *measure_local(device),
            measure_products(device, torch.bfloat16),
        ]
    )
    elements = [nbytes / dtype.itemsize for nbytes in SIZES]
    beta, constant, threshold, _ = (
        fit_communication(elements, inside) if tensor > 1 else (0.0, 0.0, 0, [])
    )
    # A multilayer perceptron of four times the width, forward and backward, on all its ranks.
    flops = 48 * tokens * hidden**2
    costs = LayerCosts(
        layer_s / flops, beta, encode_s / (tokens * hidden), constant, max(1, threshold)
    )
    found = {
        "tensor": tensor,
        "pipeline": size // tensor,
        "activation_bytes": dtype.itemsize,
        "local": local,
        "costs": asdict(costs),
    }
    if tensor > 1:
        sent = [2 * (tensor - 1) / tensor * nbytes for nbytes in SIZES]
        rate, latency = _link(sent, 2.0 * (tensor - 1), inside)
        found |= {"inside_bits_per_s": rate, "inside_latency_s": latency}
    if between:
        rate, latency = _link([float(nbytes) for nbytes in SIZES], 1.0, between)
        found |= {"link_bits_per_s": rate, "latency_s": latency}
    return found


def _link(sent: Sequence[float], messages: float, seconds: Sequence[float]) -> tuple[float, float]:
    """Bits a second and seconds a message, from bytes that leave a rank."""
    points = [{"bytes": nbytes, "messages": messages} for nbytes in sent]
    found = fit(points, seconds).coefficients
    return 8 / max(found["bytes"], 1e-15), found["messages"]


def _inside_seconds(
    ranks: activations.MeshRanks, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Of an all-reduce of every size; all groups of ranks at once, as in training."""
    messages = [torch.ones(n // dtype.itemsize, dtype=dtype, device=device) for n in SIZES]
    return [median_seconds(functools.partial(ranks.sum, x), device) for x in messages]


def _between_seconds(mesh: DeviceMesh, device: torch.device) -> list[float]:
    """Of a message of every size to the next stage: half a round trip of two stages, the third and
    fourth at the same time. The last of an odd number waits, and answers with the first's.
    """
    stages = mesh["stages"]
    group, stage, size = stages.get_group(), stages.get_local_rank(), stages.size()
    even = stage % 2 == 0
    if even and stage == size - 1:
        taken = [0.0] * len(SIZES)
    else:
        peer = stage + 1 if even else stage - 1
        messages = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in SIZES]
        calls = [functools.partial(_there_and_back, x, group, peer, even) for x in messages]
        taken = [median_seconds(call, device) / 2 for call in calls]
    found = torch.tensor(taken, dtype=torch.float64, device=device)
    dist.broadcast(found, group=group, group_src=0)
    seconds: list[float] = found.tolist()
    return seconds


def _there_and_back(
    message: Tensor, group: dist.ProcessGroup | None, peer: int, first: bool
) -> None:
    if first:
        dist.send(message, group=group, group_dst=peer)
    dist.recv(message, group=group, group_src=peer)
    if not first:
        dist.send(message, group=group, group_dst=peer)


def _layer_seconds(
    tensor: int, hidden: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Of this rank's part of a layer's perceptron, forward and backward."""
    options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
    part = nn.Sequential(
        nn.Linear(hidden, 4 * hidden // tensor, **options),
        nn.GELU(),
        nn.Linear(4 * hidden // tensor, hidden, **options),
    )
    return _trained_seconds(part, hidden, tokens, dtype, device)


def _encode_seconds(hidden: int, tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of an auto-encoder to a tenth, forward and backward."""
    codec = activations.AutoEncoder(hidden, max(1, hidden // 10)).to(device=device, dtype=dtype)
    return _trained_seconds(codec, hidden, tokens, dtype, device)


def _trained_seconds(
    part: nn.Module, hidden: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> float:
    x = torch.ones(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.ones_like(x)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(part(x), [x, *part.parameters()], gradient)

    return median_seconds(call, device)
