"""Questions about one parameter: its local part, its gradients' dtype, whether it is compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import pin

COMPRESS_FROM = 4096  # elements; smaller tensors, norm scales and biases are averaged dense
Chosen = Callable[[Tensor, dict[str, Any], str], bool]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor


def laid_out_as(p: Tensor, view: Tensor) -> Tensor:
    """This rank's part of a state as a DTensor with the mesh and placements of ``p``.

    Where p is no DTensor it is ``view`` itself.
    """
    if not hasattr(p, "to_local"):
        return view
    of_p: Any = p  # importing DTensor for its type would cost everybody seconds
    result: Tensor = type(of_p).from_local(
        view,
        of_p.device_mesh,
        of_p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )
    return result


def upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device. Nobody waits: a pinned copy is read when the device comes to it."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else pin(tensor, device).to(device, non_blocking=True)


def grad_dtype(p: Tensor) -> torch.dtype:
    """Of the gradients of ``p``: its own, unless PyTorch (2.10) was told of another.

    A setting, alike on all ranks.
    """
    return getattr(p, "grad_dtype", None) or p.dtype


def is_compressed(p: Tensor, group: dict[str, Any], name: str = "") -> bool:
    """Whether ``p`` is compressed: what its group says, else whether it is a matrix or larger.

    Matrices are of at least 4096 elements.
    """
    said = group.get("compress")
    return p.dim() >= 2 and p.numel() >= COMPRESS_FROM if said is None else bool(said)
