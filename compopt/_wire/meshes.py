"""Device meshes of DTensors, as communicators."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from .collectives import Communicator
from .launch import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def list_mesh_groups(p: Tensor) -> list[tuple[ProcessGroup, Placement]]:
    """Return the group of each mesh dimension of a DTensor, and the placement of ``p`` on it."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return []
    return list(zip(mesh.get_all_groups(), getattr(p, "placements", ()), strict=True))


def is_sharded_over(p: Tensor, comm: Communicator) -> bool:
    """True if ``p`` is a DTensor that is sharded over exactly these ranks."""
    groups = list_mesh_groups(p)
    if len(groups) != 1 or comm.group is None or comm.size == 1 or not groups[0][1].is_shard():
        return False
    return Communicator(groups[0][0]).ranks == comm.ranks


def make_shard_communicators(params: Iterable[Tensor]) -> list[Communicator]:
    """Return a communicator for each mesh dimension of the DTensors: together, the ranks that hold
    one model.
    """
    meshes = dict.fromkeys(getattr(p, "device_mesh", None) for p in params)
    groups: dict[str, ProcessGroup] = {}
    for mesh in filter(None, meshes):
        for group in mesh.get_all_groups():
            groups.setdefault(group.group_name, group)
    return [comm for comm in map(Communicator, groups.values()) if comm.size > 1]


def get_replicate_size(p: Tensor, shards: list[Communicator]) -> int:
    """Return how many of the ranks that hold one model have the same part of ``p``."""
    cutting = {group.group_name for group, where in list_mesh_groups(p) if not where.is_replicate()}
    return math.prod(
        comm.size for comm in shards if comm.group is None or comm.group.group_name not in cutting
    )
