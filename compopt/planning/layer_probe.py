"""Measurement of the links and the work of tensor- and pipeline-parallel layers."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import activations
from .hardware import ring_bytes
from .measurement import fit_communication, measure_local, measure_products, median_seconds
from .model_parallel import LayerCosts
from .network_probe import average_over_ranks, fit_link

# Bytes of the messages that are timed.
LAYER_SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)


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
    world = activations.MeshRanks.world(device.type, size)
    average = functools.partial(average_over_ranks, ranks=world, device=device)
    inside = average(time_all_reduces(activations.MeshRanks(mesh["inside"]), dtype, device))
    between = average(time_stage_messages(mesh, device)) if size > tensor else []
    layer_s, encode_s, *local = average(
        [
            *time_computation(tensor, hidden, tokens, dtype, device),
            *measure_local(device),
            measure_products(device, torch.bfloat16),
        ]
    )
    beta, constant, threshold = 0.0, 0.0, 0
    if tensor > 1:
        elements = [nbytes / dtype.itemsize for nbytes in LAYER_SIZES]
        beta, constant, threshold, _ = fit_communication(elements, inside)
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
