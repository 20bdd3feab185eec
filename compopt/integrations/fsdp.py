"""FSDP2 and tensor parallelism: parameters that are DTensors, sharded inside a node, averaged
compressed between nodes.

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    group = mesh.get_group("replicate")
    optimizer = compopt.RadiusAdamW(model.parameters(), lr=3e-4, process_group=group)

``fully_shard`` averages over the fast links, densely; the optimizer averages its rank's shards over
``process_group``, from the moment FSDP has reduced them. Every new optimizer with DTensors is
looked at here: its meshes are checked, and its parameters set to those of the first rank of
``process_group``, as DistributedDataParallel does for those it wraps. Where FSDP cuts parameters
over the optimizer's own ranks it averages in FSDP's backward, if it can (``_fsdp_inside``).
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._engine import base
from .._engine.base import CompressedOptimizer
from .._engine.inside import ReducingOptimizer
from .._state.tensors import to_local
from .._wire.collectives import list_mesh_groups
from .._wire.requests import Broadcast
from ._fsdp_inside import HOOKS, go_inside
from ._watch import call_after_backward

ADVICE = (
    "call fully_shard(model, mesh=mesh['shard']) with the mesh dimension inside a node, and give "
    "the optimizer process_group=mesh.get_group('replicate'), the dimension between nodes."
)


def check_meshes(optimizer: CompressedOptimizer) -> None:
    """Raise ValueError where ranks of the optimizer's group hold different shards, or have averaged
    gradients already.

    Also where FullyShardedDataParallel made flat parameters of matrices.
    """
    session = optimizer._session
    group = getattr(session.comm, "group", None)
    ours = set(dist.get_process_group_ranks(group)) if group is not None else set()
    for bucket in [*session.buckets, *session.shelf]:
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
    for dim, (group, placement) in enumerate(list_mesh_groups(p)):
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
    session = optimizer._session
    comm = session.comm
    for bucket in [*session.buckets, *session.shelf]:
        for p in bucket.params:
            comm.start(Broadcast(to_local(p.detach()))).wait()


class Listener:
    """A hook of one parameter: hears of a shard's gradient as soon as FSDP has reduced it, so that
    the exchange between nodes begins in backward.
    """

    def __init__(self, optimizer: CompressedOptimizer):
        self._optimizer, self._running = weakref.ref(optimizer), -1

    def __call__(self, p: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._running:
            self._running = backward
            # after FSDP's own callback, which reduces what is left
            call_after_backward(lambda: call_after_backward(self._done))
        optimizer.gradients_ready([p])

    def _done(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.backward_done()


def listen(optimizer: CompressedOptimizer) -> None:
    """Hear of the gradients of ``optimizer``, in place of who did before.

    One that was made earlier over the same parameters may still be alive on some ranks and not on
    others, and would start exchanges that not all of them take part in.
    """
    listener = Listener(optimizer)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        hooks = getattr(p, HOOKS, None) or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, Listener)]:
            del hooks[key]
        mesh = getattr(p, "device_mesh", None)
        # FSDP copies gradients to host memory without waiting, unless somebody listens
        if p.requires_grad and mesh is not None and mesh.device_type == p.device.type:
            p.register_post_accumulate_grad_hook(listener)


def _meet(optimizer: CompressedOptimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, ReducingOptimizer) and optimizer.reduces_inside:
        go_inside(optimizer)
        return
    sharded = any(hasattr(p, "device_mesh") for p in params)
    if sharded or any(map(_flattened, params)):
        check_meshes(optimizer)
    if sharded:
        broadcast_parameters(optimizer)
        listen(optimizer)


def _flattened(p: Tensor) -> bool:
    """Whether FullyShardedDataParallel made ``p`` a part of a flat parameter (its own mark)."""
    return getattr(p, "_fsdp_flattened", False)


base.constructed.append(_meet)
