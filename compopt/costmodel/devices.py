"""What common accelerators can do, from their makers' data sheets; a share of it is what training
gets.

Every figure is a peak: memory of the card, bytes a second of its memory, float32 operations a
second outside tensor cores, which is what the passes and small products of an optimizer use, and
16-bit operations a second of tensor cores, without sparsity, which is what layers use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of the peak bytes a second that elementwise passes reach.
MEMORY_SHARE = 0.75
# Of the peak operations a second that thin matrix products reach.
PRODUCT_SHARE = 0.5
# Of the peak operations a second that a transformer's layers reach in training.
LAYER_SHARE = 0.4


@dataclass(frozen=True)
class Speed:
    """What one rank computes with.

    Args:
        memory_bytes_per_s: that elementwise passes move.
        flops_per_s: of matrix products in float32.
        half_flops_per_s: of matrix products in 16 bits.
    """

    memory_bytes_per_s: float
    flops_per_s: float
    half_flops_per_s: float

    def __post_init__(self) -> None:
        for name in ("memory_bytes_per_s", "flops_per_s", "half_flops_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite; got {getattr(self, name)}.")


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or a core of a CPU.

    Args:
        memory_bytes: what fits; None where that is not the device's to say.
        bytes_per_s: peak of its memory.
        flops_per_s: peak in float32.
        half_flops_per_s: peak in 16 bits.
        source: where the figures stand.
    """

    memory_bytes: float | None
    bytes_per_s: float
    flops_per_s: float
    half_flops_per_s: float
    source: str

    @property
    def local(self) -> tuple[float, float]:
        """Bytes and float32 operations a second that an optimizer's work is taken to reach."""
        return MEMORY_SHARE * self.bytes_per_s, PRODUCT_SHARE * self.flops_per_s

    @property
    def speed(self) -> Speed:
        """The same, and what products in 16 bits are taken to reach: a compressor's work."""
        return Speed(*self.local, PRODUCT_SHARE * self.half_flops_per_s)


DEVICES = {
    "h200": Device(141e9, 4.8e12, 67e12, 989e12, "NVIDIA H200 SXM data sheet"),
    "h100": Device(80e9, 3.35e12, 67e12, 989e12, "NVIDIA H100 SXM data sheet"),
    "a100": Device(80e9, 2.039e12, 19.5e12, 312e12, "NVIDIA A100 80GB SXM data sheet"),
    "l40s": Device(48e9, 0.864e12, 91.6e12, 362e12, "NVIDIA L40S data sheet"),
    "l4": Device(24e9, 0.3e12, 30.3e12, 121e12, "NVIDIA L4 data sheet"),
    "v100": Device(32e9, 0.9e12, 15.7e12, 125e12, "NVIDIA V100 SXM2 data sheet"),
    "rtx4090": Device(24e9, 1.008e12, 82.6e12, 165e12, "NVIDIA GeForce RTX 4090 data sheet"),
    "mi300x": Device(192e9, 5.3e12, 163.4e12, 1307e12, "AMD Instinct MI300X data sheet"),
    "cpu": Device(
        None, 13e9, 100e9, 100e9, "one core of the shared Xeon that bench/results was measured on"
    ),
}
