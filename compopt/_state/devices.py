"""The device that tensors are on, whoever makes it: "cuda" for NVIDIA's and AMD's, "xpu" for
Intel's, or one that its maker adds to PyTorch under a name of its own (PrivateUse1).

Their modules in torch have the same few names, which are used here only. What some makers' devices
alone can do stands in ``_ops/backends.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")


def here() -> torch.device:
    """Where this process would train: on the accelerator, if there is one, else on the CPU."""
    # Before torch 2.7 current_accelerator raises where there is none.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def is_accelerator(device: torch.device) -> bool:
    """Whether it holds numbers (meta does not) in memory of its own, and works beside the host."""
    return module_of(device) is not None


def module_of(device: torch.device) -> Any | None:
    """torch.cuda, torch.xpu, ...; None where the device is no accelerator."""
    try:
        return None if device.type == "cpu" else torch.get_device_module(device)
    except RuntimeError:
        return None


def has_streams(device: torch.device) -> bool:
    """Whether copies can run beside work: not on the CPU, nor on Apple's devices."""
    return hasattr(module_of(device), "Stream")


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, in memory that the device reads and writes while the host goes on."""
    return tensor.pin_memory() if is_accelerator(device) else tensor


def synchronize(device: torch.device) -> None:
    """Wait, on the host, until the device has done what it was given."""
    if device.type != "cpu" and device.type == here().type:
        torch.accelerator.synchronize(device)
