"""One tensor: its local part, its gradient's dtype, whether it is compressed, and its device.

A device is "cuda" for NVIDIA's and AMD's accelerators, "xpu" for Intel's, or one that its maker
adds to PyTorch under another name (PrivateUse1). Their modules in torch have the same few
functions, which only this file calls; ``_backends/choice.py`` knows what some of them alone can do.

``Bucket`` and all that handle parameters call it: one may be a DTensor, of which ``to_local`` is
this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")
HOOKS = "_post_accumulate_grad_hooks"  # torch's attribute of a parameter
# Smaller tensors, norm scales and biases are averaged dense.
MIN_COMPRESSED_NUMEL = 4096
# Decides whether to compress a parameter of this group and name.
CompressionRule = Callable[[Tensor, dict[str, Any], str], bool]


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor is returned unchanged."""
    method: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return method() if method else tensor


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, as a vector; of one with gaps, those of a copy."""
    flat = tensor.detach().contiguous()
    # the strides of a tensor of one element or none may be anything
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def distribute_like(p: Tensor, local: Tensor) -> Tensor:
    """Return this rank's part of a state as a DTensor with the mesh and placements of ``p``; the
    part itself if p is no DTensor.
    """
    if not hasattr(p, "to_local"):
        return local
    if local.storage_offset() and local.is_contiguous():
        # The same memory as a storage of its own: torch neither copies nor saves a DTensor whose
        # local part begins within a storage.
        begin = local.storage_offset() * local.element_size()
        storage = local.untyped_storage()[begin : begin + local.numel() * local.element_size()]
        empty = torch.empty(0, dtype=local.dtype, device=local.device)
        local = empty.set_(storage, 0, local.shape, local.stride())
    # Importing DTensor for its type would cost every user seconds.
    dtensor: Any = p
    result: Tensor = type(dtensor).from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )
    return result


def largest_part_numel(p: Tensor) -> int:
    """Return the elements of the largest rank's part of ``p``: one number on all ranks, though
    shards may be uneven.
    """
    shape, mesh = [*p.shape], getattr(p, "device_mesh", None)
    if mesh is not None:
        dtensor: Any = p
        for ranks, placement in zip(mesh.shape, dtensor.placements, strict=True):
            if placement.is_shard():
                shape[placement.dim] = -(-shape[placement.dim] // ranks)
    return math.prod(shape)


def gather_whole(p: Tensor, local: Tensor) -> Tensor:
    """Return the whole of a tensor that is sharded like ``p``, from all ranks' ``local`` parts."""
    dtensor: Any = distribute_like(p, local)
    result: Tensor = dtensor.full_tensor()
    return result


def take_local_part(p: Tensor, whole: Tensor) -> Tensor:
    """Return what this rank has of ``whole`` if it is sharded like ``p``, without communication."""
    dtensor: Any = p
    replicated = type(dtensor).from_local(whole, dtensor.device_mesh, run_check=False)
    return to_local(replicated.redistribute(placements=dtensor.placements))


def get_grad_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of the gradients of ``p``: its own, unless ``p.grad_dtype`` (PyTorch 2.10)
    is set, to the same on all ranks.
    """
    return getattr(p, "grad_dtype", None) or p.dtype


def has_gradient_hook(p: Tensor) -> bool:
    """True if a hook reads the gradient of ``p`` once backward has accumulated it."""
    return bool(getattr(p, HOOKS, None))


def is_compressed(p: Tensor, group: dict[str, Any], name: str = "") -> bool:
    """True if ``p`` is compressed: as its group says, else if it is at least 2-D and has at least
    4096 elements.
    """
    choice = group.get("compress")
    return p.dim() >= 2 and p.numel() >= MIN_COMPRESSED_NUMEL if choice is None else bool(choice)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products have the precision of x, and not autocast's: replicas need
    that, and the other end of a stage boundary, which knows a payload's from its activation's.
    """
    kind = x.device.type
    # the meta device has no autocast
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


# Devices


def get_device() -> torch.device:
    """Return the accelerator of this process, if there is one, else the CPU."""
    # Before torch 2.7 current_accelerator raises if there is none.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return HOST if device is None else device


def get_device_module(device: torch.device) -> Any | None:
    """Return torch.cuda, torch.xpu, ...; None if the device is no accelerator."""
    try:
        return None if device.type == "cpu" else torch.get_device_module(device)
    except RuntimeError:
        return None


def is_accelerator(device: torch.device) -> bool:
    """True if the device has memory (meta has none) and works beside the host."""
    return get_device_module(device) is not None


def has_streams(device: torch.device) -> bool:
    """True if copies can run beside computation; not on CPUs, nor on Apple's devices."""
    return hasattr(get_device_module(device), "Stream")


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor in pinned memory, which the device reads and writes asynchronously."""
    return tensor.pin_memory() if is_accelerator(device) else tensor


def upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device, without a host wait."""
    tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
    return tensor if device.type == "cpu" else pin(tensor, device).to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Block the host until the device has finished all work given to it."""
    if device.type != "cpu" and device.type == get_device().type:
        torch.accelerator.synchronize(device)
