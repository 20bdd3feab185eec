"""DTensors, and the ranks over which they are cut or copied."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from .comm import Comm, ProcessGroup, mesh_groups


def is_cut_over(p: Tensor, comm: Comm) -> bool:
    """Whether ``p`` is a DTensor of which each of these ranks has a part of its own, and no other
    rank has any.
    """
    groups = mesh_groups(p)
    if len(groups) != 1 or comm.group is None or comm.size == 1 or not groups[0][1].is_shard():
        return False
    return Comm(groups[0][0]).ranks == comm.ranks


def shard_comms(params: Iterable[Tensor]) -> list[Comm]:
    """Communicators over the meshes of DTensors, one a mesh dimension: together, the ranks that
    hold one model.
    """
    groups: dict[str, ProcessGroup] = {}
    for mesh in {
        mesh: None for p in params if (mesh := getattr(p, "device_mesh", None)) is not None
    }:
        for group in mesh.get_all_groups():
            groups.setdefault(group.group_name, group)
    return [comm for comm in map(Comm, groups.values()) if comm.size > 1]


def copies_of(p: Tensor, shards: list[Comm]) -> int:
    """Among the ranks that hold one model, how many hold the same part of ``p``."""
    cut = {group.group_name for group, where in mesh_groups(p) if not where.is_replicate()}
    return math.prod(
        comm.size for comm in shards if comm.group is None or comm.group.group_name not in cut
    )
