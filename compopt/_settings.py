"""What all ranks must have alike: told in the handshake, and in every step's payload by a few bits of a checksum."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

# Options that may change from step to step without a word: they change no message's length.
FREE = {"params", "param_names", "step", "lr", "betas", "eps", "weight_decay", "maximize", "max_grad_norm"}


def settings_of(optimizer: Any) -> list:
    """Its class, the options of its groups, its back end."""
    groups = optimizer._option_groups
    return [
        type(optimizer).__name__ + (" (sharded)" if optimizer.sharded else ""),
        *({k: plain(v) for k, v in g.items() if k not in ("params", "param_names")} for g in groups),
        {"backend": optimizer.backend},  # two round differently, and select differently among equals
    ]


def structure_of(groups: list[dict[str, Any]]) -> str:
    """The options that decide what is sent, and so the lengths of messages."""
    return repr([{k: v for k, v in group.items() if k not in FREE} for group in groups])


def plain(value: object) -> object:
    return float(value) if isinstance(value, Tensor) else str(value) if isinstance(value, torch.dtype) else value


def bits_of(settings: list) -> list[float]:
    """16 bits of a checksum and their complements, as numbers whose mean over ranks shows any difference."""
    code = zlib.crc32(repr(settings).encode())
    bits = [float(code >> i & 1) for i in range(16)]
    return bits + [1 - b for b in bits]
