"""FSDP2 and tensor parallelism: parameters that are DTensors, sharded inside a node, averaged
compressed between nodes.

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    group = mesh.get_group("replicate")
    optimizer = compopt.RadiusAdamW(model.parameters(), lr=3e-4, process_group=group)

``fully_shard`` averages over the fast links, densely; the optimizer averages its rank's shards over
``process_group``. Every new optimizer with DTensors is looked at here: its meshes are checked, and
its parameters set to those of the first rank of ``process_group``, as DistributedDataParallel does
for those it wraps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._engine import base
from .._engine.base import CompressedOptimizer
from .._state.buckets import local
from .._wire.comm import mesh_groups
from .._wire.requests import Broadcast
from ..tagc import TagcAdamW
from ._fsdp_inside import go_inside

ADVICE = (
    "call fully_shard(model, mesh=mesh['shard']) with the mesh dimension inside a node, and give "
    "the optimizer process_group=mesh.get_group('replicate'), the dimension between nodes."
)


def check_meshes(optimizer: CompressedOptimizer) -> None:
    """Raise ValueError where ranks of the optimizer's group hold different shards, or have averaged
    gradients already.

    Also where FullyShardedDataParallel made flat parameters of matrices.
    """
    engine = optimizer._engine
    group = getattr(engine.comm, "group", None)
    ours = set(dist.get_process_group_ranks(group)) if group is not None else set()
    for bucket in [*engine.buckets, *engine.shelf]:
        for p, name in zip(bucket.params, bucket.names, strict=True):
            if _flattened(p):
                raise ValueError(
                    f"{name} belongs to a FullyShardedDataParallel, whose flat shards cannot be "
                    f"compressed a matrix at a time: {ADVICE}"
                )
            mesh = getattr(p, "device_mesh", None)
            if mesh is not None:
                _check_mesh(p, mesh, name, ours)


def _check_mesh(p: Tensor, mesh: DeviceMesh, name: str, ours: set[int]) -> None:
    for dim, (group, placement) in enumerate(mesh_groups(p)):
        shared = sorted(ours.intersection(dist.get_process_group_ranks(group)))
        if len(shared) < 2:
            continue
        where = (
            f"mesh dimension {mesh.mesh_dim_names[dim]!r}"
            if mesh.mesh_dim_names
            else f"mesh dimension {dim}"
        )
        if placement.is_replicate():
            raise ValueError(
                f"the gradient of {name} is averaged over {where} before the optimizer sees it, "
                f"and process_group holds ranks {shared} of it as well, so nothing would be saved: "
                f"{ADVICE}"
            )
        raise ValueError(
            f"process_group holds ranks {shared}, which have different shards of {name} ({where}), "
            f"so their gradients cannot be averaged: {ADVICE}"
        )


@torch.no_grad()
def broadcast_parameters(optimizer: CompressedOptimizer) -> None:
    """Set the parameters of all ranks of the optimizer's group to those of its first.

    All ranks must call it.
    """
    engine = optimizer._engine
    comm = engine.comm
    for bucket in [*engine.buckets, *engine.shelf]:
        for p in bucket.params:
            comm.start(Broadcast(local(p.detach()))).wait()


def _meet(optimizer: CompressedOptimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, TagcAdamW) and optimizer.reduces_inside:
        go_inside(optimizer)
        return
    sharded = any(hasattr(p, "device_mesh") for p in params)
    if sharded or any(map(_flattened, params)):
        check_meshes(optimizer)
    if sharded:
        broadcast_parameters(optimizer)


def _flattened(p: Tensor) -> bool:
    """Whether FullyShardedDataParallel made ``p`` a part of a flat parameter (its own mark)."""
    return getattr(p, "_fsdp_flattened", False)


base.constructed.append(_meet)
