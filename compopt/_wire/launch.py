"""Who was launched: this process's rank, and whether torch.distributed is initialized."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

# Aliases, because torch may be built without torch.distributed.
ProcessGroup: TypeAlias = "dist.ProcessGroup"


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return the global rank of this process; before initialization, the one torchrun gave it."""
    if is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def is_launched_by_torchrun() -> bool:
    """True if torchrun, or another elastic agent of torch, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def count_launched_ranks() -> int:
    """Return how many processes a launcher such as torchrun has started, while torch.distributed is
    not initialized; else 1.
    """
    if "RANK" not in os.environ or is_initialized():
        return 1
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def get_timeout(group: ProcessGroup | None) -> timedelta | None:
    """Return the timeout of the group's collectives, which torch has under a private name only;
    None if it cannot be read.
    """
    try:
        device = group._device_types[0]  # type: ignore[union-attr]
        limit = group._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, IndexError, RuntimeError):
        return None
    return limit if isinstance(limit, timedelta) else None


def list_ranks_of_call(operator: torch._ops.OpOverload, given: dict[str, Any]) -> list[int]:
    """Return the global ranks among which a call of an operator of PyTorch communicates.

    ``given``: its arguments by name. Nobody, if it is no collective.
    """
    kind = operator.namespace
    if kind == "c10d" and "process_group" in given:
        return list_group_ranks(dist.ProcessGroup.unbox(given["process_group"])) or []
    if kind == "_c10d_functional" and isinstance(name := given.get("group_name"), str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        return dist.get_process_group_ranks(resolve(name))
    return []


def list_group_ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    """Return the global ranks of a process group. None if there is no group, or torch has not
    registered it: it was destroyed, or a library made it (torchft).
    """
    try:
        return None if group is None else dist.get_process_group_ranks(group)
    except KeyError:
        return None
